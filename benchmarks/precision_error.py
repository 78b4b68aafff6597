"""Errors of formats on realistic states, and of the written values' formats against the float64 recurrence.

    python benchmarks/precision_error.py formats
    python benchmarks/precision_error.py written --tokens 16384 --rows 8

``formats`` encodes states of the boxed model after held-out text, and sums of outer products as Mamba-2 makes them, and
compares what comes back, and what reads of it give. ``written`` decodes random tokens through caches that differ in
``Precision.buffer`` alone, beside the conventional float32 recurrence; errors are root mean squares, relative.
"""

from __future__ import annotations

import argparse
import json

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm import GDN, GdnInputs, Layout, Precision, ReplayCache, Rows, models, step
from replayssm.formats import BUFFERS, FORMATS


def model_states(tokens: tuple[int, ...] = (500, 3000, 6000)) -> Tensor:
    """States [N, H, P, K] of every recurrent layer of the boxed model after so many tokens of held-out text."""
    model, tokenizer = models.load(models.resolve(models.DEFAULT), dtype=torch.float32)
    found = []
    for source in ("rust", "python"):
        ids = tokenizer("\n".join(models.heldout(source))[: 10 * max(tokens)], return_tensors="pt")["input_ids"]
        for count in tokens:
            with torch.no_grad():
                layers = model(ids[:, :count], use_cache=True, logits_to_keep=1).past_key_values.layers
            for layer in layers:
                if hasattr(layer, "recurrent_states"):
                    found += [state.transpose(-1, -2) for state in layer.recurrent_states.values()]
    return torch.cat(found).contiguous()


def outer_product_states(rows: int = 4, heads: int = 32, head_dim: int = 64, state_dim: int = 128) -> Tensor:
    """Decayed sums of 400 outer products of silu-gated, unevenly scaled keys and values."""
    source = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source)

    rate = torch.rand(heads, generator=source) * 4 + 0.05
    key_size, value_size = torch.exp(0.7 * draw(state_dim)), torch.exp(0.7 * draw(heads, head_dim))
    state = torch.zeros(rows, heads, head_dim, state_dim)
    for _ in range(400):
        key, value = F.silu(draw(rows, state_dim)) * key_size, F.silu(draw(rows, heads, head_dim)) * value_size
        dt = F.softplus(draw(rows, heads) - 3)
        state = state * torch.exp(-rate * dt)[..., None, None] + (dt[..., None] * value)[..., None] * key[:, None, None]
    return state


def formats() -> None:
    """Print one line a format: bytes an element, error of the state and of reads of it."""
    states = {"docs_gdn": model_states(), "outer products": outer_product_states()}
    for name, form in FORMATS.items():
        row: dict[str, object] = {"format": name}
        for label, state in states.items():
            parts = form.encode(state)
            back = form.decode(parts, state.shape[-1], torch.float32)
            probe = F.normalize(torch.randn(*state.shape[:2], state.shape[-1], 1), dim=-2)
            row[f"{label}: bytes"] = sum(part.nbytes for part in parts.values()) / state.numel()
            row[f"{label}: state"] = float((back - state).norm() / state.norm())
            row[f"{label}: read"] = float(((back - state) @ probe).norm() / (state @ probe).norm())
        print(json.dumps(row), flush=True)


def written(tokens: int, rows: int, dtype: torch.dtype) -> None:
    """Print the output error of each format of the written values, and of the conventional recurrence."""
    layout = Layout(GDN, 2, 1, 64, 64, dtype=dtype)
    caches = {}
    for name in BUFFERS:
        if name != "fp64":
            policy = Precision(buffer=name)
            caches[name] = ReplayCache.allocate(
                Layout(GDN, 2, 1, 64, 64, dtype=dtype, precision=policy), layers=1, slots=rows
            )
    every, ones = Rows.decode(range(rows)), [1] * rows
    states = {wide: torch.zeros(rows, 2, 64, 64, dtype=wide) for wide in (torch.float64, torch.float32)}
    a_log, bias = torch.randn(2) - 2, torch.randn(2)
    sums = dict.fromkeys([*caches, "conventional", "scale"], 0.0)
    for _ in range(tokens):
        q, k, v = (torch.randn(rows, n, 64).to(dtype) for n in (1, 1, 2))
        inputs = GdnInputs(q, k, v, torch.randn(rows, 2), torch.randn(rows, 2), a_log, bias)
        outs = {name: step(cache[0], inputs, every) for name, cache in caches.items()}
        for cache in caches.values():
            cache.commit(every, ones)
        truth = _token(states[torch.float64], inputs, layout)
        outs["conventional"] = _token(states[torch.float32], inputs, layout).to(dtype)
        for name, out in outs.items():
            sums[name] += float((out.double() - truth).square().sum())
        sums["scale"] += float(truth.square().sum())
    error = {name: (total / sums["scale"]) ** 0.5 for name, total in sums.items() if name != "scale"}
    ratio = {name: value / error["conventional"] for name, value in error.items()}
    print(json.dumps({"dtype": str(dtype), "tokens": tokens, "rows": rows, "error": error, "ratio": ratio}), flush=True)


def _token(state: Tensor, inputs: GdnInputs, layout: Layout) -> Tensor:
    """One token of the recurrence in the state's dtype, in place; gates in float32 as everywhere."""
    low = inputs.lower(layout)
    assert low.g is not None
    assert low.key_scale is not None
    q, beta = low.q.to(state.dtype), low.beta.to(state.dtype)
    key = (low.k.to(state.dtype) * low.key_scale[..., None].to(state.dtype))[:, :, None]
    state *= low.g.to(state.dtype).exp()[..., None, None]
    value = low.v.to(state.dtype) - (state * key).sum(-1)
    state += (beta[..., None] * value)[..., None] * key
    return (state * q[:, :, None]).sum(-1)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["formats", "written"])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rows", type=int, default=8)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.what == "formats":
        formats()
    else:
        for dtype in (torch.bfloat16, torch.float32):
            written(arguments.tokens, arguments.rows, dtype)


if __name__ == "__main__":
    main()
