"""All answers about one model in one document of plain values: what `replayssm explain` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from replayssm.checks import dtype_name

from .gpus import Gpu
from .predict import KV_BYTES, Prediction, Setting, best_window, capacity, predict, recurrent_traffic
from .shape import Block, ModelShape
from .traffic import state_bytes

DRAFT_SHOWN = 4
"""Tokens a step for the memory that drafts would need, when plain decode is asked about."""


def report(
    shape: ModelShape, gpu: Gpu, setting: Setting, batches: Sequence[int], memory: float | None = None
) -> dict[str, Any]:
    """The document: bytes, seconds and elements, unless a key says otherwise.

    `memory` is for sequences (bytes); None takes what the weights leave of the GPU.
    """
    conventional, replayed = recurrent_traffic(shape, setting)
    tokens, (window, cost) = setting.cycle.tokens, best_window(shape, setting)
    weights = shape.params_total * setting.weight_bits / 8
    layouts = [setting.layout(layout) for layout in shape.layouts]
    return {
        "model": {
            "name": shape.name,
            "model_type": shape.model_type,
            "source": shape.source,
            "params_total": round(shape.params_total),
            "params_active": shape.params_active,
            "weight_bytes": round(weights),
            "weights_fit": weights < gpu.memory,
            "groups": [_group(block, count, setting) for block, count in shape.groups()],
        },
        "gpu": {"key": gpu.key, "name": gpu.name, "measured": gpu.measured, "source": gpu.source},
        "setting": {
            "window": setting.window,
            "draft": setting.max_draft,
            "acceptance": setting.acceptance,
            "context": setting.context,
            "weight_bits": setting.weight_bits,
            "precision": setting.precision.name,
            "checkpoint": _dtype(setting.precision.checkpoint),
            "read_copy": _dtype(setting.precision.read_copy),
            "tokens_per_step": tokens,
        },
        "bytes_per_sequence": {
            "state": sum(map(state_bytes, layouts)),
            "slot": sum(layout.slot_bytes for layout in layouts),
            "kv": sum(block.kv_kept(setting.context) for block in shape.blocks) * KV_BYTES,
        },
        "recurrent_bytes_per_token": {"conventional": conventional.total / tokens, "replay": replayed.total / tokens},
        "best_window": {"window": window, "bytes_per_token": cost},
        "predictions": [_times(predict(shape, gpu, batch, setting)) for batch in batches],
        "memory": _memory(shape, setting, gpu.memory - weights if memory is None else memory),
    }


def _group(block: Block, count: int, setting: Setting) -> dict[str, Any]:
    row: dict[str, Any] = {"kind": block.kind, "count": count, "params_each": round(block.params_stored)}
    if block.layout is not None:
        layout = setting.layout(block.layout)
        row |= {
            "recurrence": layout.recurrence.name,
            "heads": layout.heads,
            "groups": layout.groups,
            "head_dim": layout.head_dim,
            "state_dim": layout.state_dim,
            "state_bytes_each": state_bytes(layout),
            "slot_bytes_each": layout.slot_bytes,
        }
    if block.kv_elements:
        row |= {"kv_bytes_each": block.kv_kept(setting.context) * KV_BYTES}
    return row


def _memory(shape: ModelShape, setting: Setting, room: float) -> dict[str, Any]:
    """How many sequences fit, for plain decode and for drafts; counts are None when the weights leave no room."""
    drafts = setting.max_draft if setting.max_draft > 1 else min(DRAFT_SHOWN, setting.window)
    rows = []
    for draft in dict.fromkeys((1, drafts)):
        one = capacity(shape, replace(setting, max_draft=draft), room)
        sizes = {"conventional": one.conventional, "snapshots": one.snapshots, "replay": one.replay}
        counts = {way: one.sequences(size) for way, size in sizes.items()} if room > 0 else None
        rows.append({"draft": draft, "bytes_per_sequence": sizes, "sequences": counts})
    return {"bytes_for_sequences": round(room), "rows": rows}


def _times(one: Prediction) -> dict[str, Any]:
    return {
        "batch": one.batch,
        "recurrent_seconds": {"conventional": one.recurrent_conventional, "replay": one.recurrent_replay},
        "recurrent_speedup": one.recurrent_speedup,
        "step_seconds": {"conventional": one.step_conventional, "replay": one.step_replay},
        "step_speedup": one.step_speedup,
        "speedup_over_plain": one.speedup_over_plain,
    }


def _dtype(dtype: torch.dtype | str | None) -> str | None:
    return dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype
