# SPDX-License-Identifier: MIT
"""attn beside PyTorch and ONNX Runtime, on the same operands, on the same core, in the same minutes.

    python3 -m venv venv && venv/bin/pip install -r bench/peers/requirements.txt
    cmake --workflow --preset compare
    taskset -c 0 venv/bin/python bench/peers/peers.py build/compare/bench/attn_compare

Each round times every library on a shape in turn, so that what else the machine does and how its clock moves
meets them alike; the table has the median over the rounds. One thread is timed by its CPU time. attn runs in
attn_compare, whose time is that of the call alone, and the others are called as their users do: PyTorch's
scaled_dot_product_attention on [B, H, L, D], ONNX Runtime's fused MultiHeadAttention on [B, L, H D] (its own layout).
A library that is not installed is left out.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import tempfile
import time

import numpy as np
from safetensors.numpy import save_file

# name: batch, heads, heads of k and v, n_q, n_kv, width, causal
SHAPES = {
    "2048": (1, 8, 8, 2048, 2048, 64, False),
    "2048 causal": (1, 8, 8, 2048, 2048, 64, True),
    "2048, d 128": (1, 8, 8, 2048, 2048, 128, False),
    "2048, d 128, causal": (1, 8, 8, 2048, 2048, 128, True),
    "8 x 12 heads of 128": (8, 12, 12, 128, 128, 64, False),
    "4 x 12 heads of 512": (4, 12, 12, 512, 512, 64, False),
    "4096 x 1024": (1, 1, 1, 4096, 1024, 64, False),
    "decode, 32 heads over 8, 4096": (1, 32, 8, 1, 4096, 128, False),
}


class Problem:
    def __init__(self, batch, heads, heads_kv, n_q, n_kv, width, causal):
        random = np.random.default_rng(1)
        self.causal = causal
        self.q = random.standard_normal((batch, heads, n_q, width), dtype=np.float32)
        self.k = random.standard_normal((batch, heads_kv, n_kv, width), dtype=np.float32)
        self.v = random.standard_normal((batch, heads_kv, n_kv, width), dtype=np.float32)

    def error(self, out):
        """Largest error over 16 rows of the first and last head, against numpy in double."""
        worst = 0.0
        batch, heads, n_q, width = self.q.shape
        for b, h in {(0, 0), (batch - 1, heads - 1)}:
            rows = np.unique(np.linspace(0, n_q - 1, 16).astype(int))
            group = heads // self.k.shape[1]
            k, v = (x[b, h // group].astype(np.float64) for x in (self.k, self.v))
            scores = self.q[b, h, rows].astype(np.float64) @ k.T / math.sqrt(width)
            if self.causal:
                scores[np.arange(k.shape[0]) > rows[:, None]] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            right = weights @ v / weights.sum(axis=1, keepdims=True)
            worst = max(worst, np.abs(out[b, h, rows] - right).max())
        return worst


def median_ms(call, threads, calls=5):
    clock = time.thread_time if threads == 1 else time.perf_counter
    times = []
    for _ in range(calls):
        begin = clock()
        call()
        times.append(1e3 * (clock() - begin))
    return statistics.median(times)


class Attn:
    def __init__(self, problem, threads, program, folder):
        path = os.path.join(folder, "problem.safetensors")
        save_file({"q": problem.q, "k": problem.k, "v": problem.v}, path)
        self.result = os.path.join(folder, "result.json")
        self.command = [program, path, "--method", "dense", "--threads", str(threads), "--repeat", "5",
                        "--json", self.result] + (["--causal"] if problem.causal else [])

    def measure(self):
        subprocess.run(self.command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with open(self.result) as file:
            dense = json.load(file)["methods"][0]
        return dense["ms"], dense["max_error"]


class PyTorch:
    def __init__(self, problem, threads):
        import torch
        torch.set_num_threads(threads)
        self.problem, self.threads = problem, threads
        q, k, v = (torch.from_numpy(x) for x in (problem.q, problem.k, problem.v))
        grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
        attend = torch.nn.functional.scaled_dot_product_attention
        self.call = torch.no_grad()(lambda: attend(q, k, v, is_causal=problem.causal, **grouped))
        self.error = problem.error(self.call().numpy())

    def measure(self):
        return median_ms(self.call, self.threads), self.error


class OnnxRuntime:
    def __init__(self, problem, threads):
        import onnx
        import onnxruntime
        batch, heads, n_q, width = problem.q.shape
        heads_kv, n_kv = problem.k.shape[1:3]
        f32 = onnx.TensorProto.FLOAT
        if heads == heads_kv:
            names, shape = ["query", "key", "value"], lambda h, n: [batch, n, h * width]
            node = onnx.helper.make_node("MultiHeadAttention", names, ["out"], domain="com.microsoft",
                                         num_heads=heads, unidirectional=int(problem.causal))
            feeds = [x.transpose(0, 2, 1, 3).reshape(batch, x.shape[2], -1) for x in
                     (problem.q, problem.k, problem.v)]
            back = lambda y: y.reshape(batch, n_q, heads, width).transpose(0, 2, 1, 3)
        else:  # MultiHeadAttention knows no grouped heads, the operator of ONNX itself does
            names, shape = ["Q", "K", "V"], lambda h, n: [batch, h, n, width]
            node = onnx.helper.make_node("Attention", names, ["out"], is_causal=int(problem.causal))
            feeds, back = [problem.q, problem.k, problem.v], lambda y: y
        value = onnx.helper.make_tensor_value_info
        graph = onnx.helper.make_graph(
            [node], "attention",
            [value(names[0], f32, shape(heads, n_q)), value(names[1], f32, shape(heads_kv, n_kv)),
             value(names[2], f32, shape(heads_kv, n_kv))], [value("out", f32, shape(heads, n_q))])
        model = onnx.helper.make_model(graph, ir_version=10, opset_imports=[
            onnx.helper.make_opsetid("", 23), onnx.helper.make_opsetid("com.microsoft", 1)])
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
        inputs = {name: np.ascontiguousarray(x) for name, x in zip(names, feeds)}
        self.threads = threads
        self.call = lambda: session.run(["out"], inputs)[0]
        self.error = problem.error(back(self.call()))

    def measure(self):
        return median_ms(self.call, self.threads), self.error


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("attn_compare", help="the program, built for this machine")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shape", action="append", choices=SHAPES, help="only this shape; may be repeated")
    arguments = parser.parse_args()

    print("| shape | attn ms | PyTorch ms | ONNX Runtime ms | the faster one over attn |")
    print("|---|---|---|---|---|")
    for name in arguments.shape or SHAPES:
        problem = Problem(*SHAPES[name])
        with tempfile.TemporaryDirectory() as folder:
            libraries = {"attn": Attn(problem, arguments.threads, arguments.attn_compare, folder)}
            for peer in (PyTorch, OnnxRuntime):
                try:
                    libraries[peer.__name__] = peer(problem, arguments.threads)
                except ImportError:
                    pass
                except Exception as reason:  # an operator that this version does not have
                    print(f"{peer.__name__} on {name}: {str(reason).splitlines()[0]}")
            times = {library: [] for library in libraries}
            errors = {}
            for _ in range(arguments.rounds):
                for library, runner in libraries.items():
                    ms, errors[library] = runner.measure()
                    times[library].append(ms)
        medians = {library: statistics.median(t) for library, t in times.items()}
        peers = [ms for library, ms in medians.items() if library != "attn"]
        cell = lambda library: f"{medians[library]:.3g}" if library in medians else "-"
        ratio = f"{min(peers) / medians['attn']:.2f}" if peers else "-"
        print(f"| {name} | {cell('attn')} | {cell('PyTorch')} | {cell('OnnxRuntime')} | {ratio} |",
              flush=True)
        wrong = {library: error for library, error in errors.items() if not error < 1e-5}
        if wrong:
            print(f"wrong on {name}: {wrong}")


if __name__ == "__main__":
    main()
