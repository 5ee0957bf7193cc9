# SPDX-License-Identifier: MIT
"""What PyTorch and ONNX Runtime make of masked rows, masked NaN and huge values.

    venv/bin/python bench/peers/cases.py      (requirements as for peers.py)

attn's answers to the same are in its tests; docs/peers.md has all three side by side.
"""

import numpy as np
import onnx
import onnxruntime
import torch

HEADS, N_Q, N_KV, WIDTH = 2, 5, 7, 16


def pytorch(q, k, v, mask):
    tensors = (torch.from_numpy(x) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*tensors, attn_mask=torch.from_numpy(mask)).numpy()


def onnx_runtime(q, k, v, mask):
    f32 = onnx.TensorProto.FLOAT
    mask_type = onnx.TensorProto.BOOL if mask.dtype == bool else f32
    value = onnx.helper.make_tensor_value_info
    inputs = [value(n, t, x.shape) for n, t, x in
              (("q", f32, q), ("k", f32, k), ("v", f32, v), ("mask", mask_type, mask))]
    node = onnx.helper.make_node("Attention", ["q", "k", "v", "mask"], ["out"])
    graph = onnx.helper.make_graph([node], "attention", inputs, [value("out", f32, q.shape)])
    model = onnx.helper.make_model(graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", 23)])
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(["out"], {"q": q, "k": k, "v": v, "mask": mask})[0]


def main():
    random = np.random.default_rng(1)
    q, k, v = (random.standard_normal((1, HEADS, n, WIDTH), dtype=np.float32) for n in (N_Q, N_KV, N_KV))
    every = np.ones((1, 1, N_Q, N_KV), dtype=bool)
    row_out, key_out, bias = every.copy(), every.copy(), np.zeros(every.shape, np.float32)
    row_out[0, 0, 2] = False
    key_out[..., 3] = False
    bias[0, 0, 2] = -np.inf

    def poisoned(x, value):
        y = x.copy()
        y[:, :, 3] = value
        return y

    cases = {
        "a row whose keys are all masked": (q, k, v, row_out),
        "the same by a bias of -inf": (q, k, v, bias),
        "NaN in a masked key": (q, poisoned(k, np.nan), v, key_out),
        "NaN in a masked value": (q, k, poisoned(v, np.nan), key_out),
        "infinity in a masked value": (q, k, poisoned(v, np.inf), key_out),
        "scores of 1e30": (q * np.float32(1e15), k * np.float32(1e15), v, every),
        "values of 3e38": (q, k, np.full_like(v, 3e38), every),
    }
    for name, case in cases.items():
        for library in (pytorch, onnx_runtime):
            out = library(*case)
            rest = np.delete(out, 2, axis=2)
            print(f"{name}: {library.__name__}: row 2 starts with {out[0, 0, 2, 0]:.4g}; other rows "
                  f"{'have NaN' if np.isnan(rest).any() else 'overflow' if np.isinf(rest).any() else 'are finite'}")


if __name__ == "__main__":
    main()
