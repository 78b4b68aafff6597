"""What a kernel is handed: records of pointers and strides, and one record of compile-time numbers and words.

A tensor that a layout does not have is None in its record, and a kernel asks for that instead of for a mode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Shape:
    """Compile-time numbers and words of a kernel. One record, so that kernels do not have forty arguments.

    Attributes:
        H, G, P, K, W, T: heads, groups, head_dim, state_dim, window, max_draft of the layout.
        BT: tokens of a tile: 1 for plain decode (no tensor cores), else a power of two of at least 4.
        BE: entries that are taken at once, a power of two.
        BP, BK: rows and columns of a tile of the state, powers of two.
        C: tiles of BK columns: decode (there a power of two), steps and the fold take all columns at once.
        KP: state_dim as decode has it, a power of two.
        N: heads of a tile, in decode, a power of two: BP / N rows of each.
        share: heads with one key and one decay of it: H/G, or 1 where the decay is per channel. Their keys' scores are
            taken once.
        lanes: ``share`` rounded up to a power of two.
        stages: tiles of the state on their way at once, in decode.
        update: "add" or "delta".
        gate: "mamba2", "softplus" (GDN, KDA), "bounded" (KDA with a lower bound) or "linear" (already lowered).
        unit: whether q and k are l2-normalised.
        tree: whether drafts form a tree.
        dot: "bf16", or "interpret" for the interpreter, which has no bfloat16.
        read: the format of what steps read (``triton.formats``).
        arch: compute capability of a CUDA GPU, 90 for 9.0; 0 elsewhere, for what has instructions of its own.
    """

    H: int
    G: int
    P: int
    K: int
    W: int
    T: int
    BT: int
    BE: int
    BP: int
    BK: int
    C: int
    KP: int
    N: int
    share: int
    lanes: int
    stages: int
    update: str
    gate: str = "linear"
    unit: bool = False
    tree: bool = False
    dot: str = "bf16"
    read: str = "fp32"
    arch: int = 0


class Layer(NamedTuple):
    """One number or tensor for each tensor of a layer: pointers, or strides between slots.

    ``state`` is what steps read (checkpoint or read copy), ``scale`` and ``head_scale`` are its scales; ``decay`` is
    per head, ``channels`` per channel; ``written_scale`` and ``written_low`` belong to ``written``.
    """

    state: Any
    scale: Any
    head_scale: Any
    key: Any
    value: Any
    weight: Any
    decay: Any
    channels: Any
    key_scale: Any
    written: Any
    written_scale: Any
    written_low: Any


class Tokens(NamedTuple):
    """Raw inputs, or their strides between tokens. ``a`` is a gate per head, ``channels`` one per channel."""

    q: Any
    k: Any
    v: Any
    a: Any
    channels: Any
    b: Any
    rate: Any
    bias: Any


class Batch(NamedTuple):
    """Rows of a step and the books that it reads: see ``Rows`` and ``ReplayCache``."""

    slots: Any
    offsets: Any
    parents: Any
    length: Any
    drafts: Any
    error: Any


class Books(NamedTuple):
    """The counters of a cache that a commit changes.

    ``owner`` int32 [slots] finds a slot that comes twice.
    """

    length: Any
    folds: Any
    limit: Any
    position: Any
    drafts: Any
    owner: Any
    error: Any


@dataclass(frozen=True)
class Types:
    """Formats and element types behind the addresses of a fold's table, and which tensors are there.

    Attributes:
        act: element type of keys and values.
        state: format of the checkpoint that is read.
        target: of what is written: the checkpoint's, or "fp32" for ``materialise``.
        copy: of the read copy; None where there is none.
        written: element type of the delta rule's values; None where there are none.
        decay, channels, key_scale, written_scale, written_low: whether the layout has these tensors.
        stochastic: how the target is rounded.
        align: a power of two that divides every address but those of scales, in bytes.
    """

    act: Any
    state: str
    target: str
    copy: str | None = None
    written: Any = None
    decay: bool = False
    channels: bool = False
    key_scale: bool = False
    written_scale: bool = False
    written_low: bool = False
    stochastic: bool = False
    align: int = 16
