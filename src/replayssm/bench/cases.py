"""What is measured: shapes of published models' layers, and cases as data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from replayssm.checks import ReplayError
from replayssm.inputs import GdnInputs, Inputs, KdaInputs, Mamba2Inputs
from replayssm.layout import GDN, KDA, MAMBA2, Layout, Precision, Recurrence
from replayssm.plan import choose_window

RECURRENCES = {recurrence.name: recurrence for recurrence in (MAMBA2, GDN, KDA)}


@dataclass(frozen=True)
class Size:
    """The sizes of a layer."""

    recurrence: Recurrence
    heads: int
    groups: int
    head_dim: int
    state_dim: int


SHAPES = {
    "mamba2-128x64x128": Size(MAMBA2, 128, 8, 64, 128),  # Nemotron-3 Super
    "mamba2-96x80x128": Size(MAMBA2, 96, 8, 80, 128),  # Nemotron-3 Nano 4B
    "gdn-64x128x128": Size(GDN, 64, 16, 128, 128),  # Qwen3.5-122B
    "kda-64x128x128": Size(KDA, 64, 64, 128, 128),  # GLM-5 Next
    "kda-32x128x128": Size(KDA, 32, 32, 128, 128),  # Kimi Linear 48B
}
_FREE = re.compile(r"(mamba2|gdn|kda)-(\d+)x(\d+)x(\d+)g(\d+)")


def size_of(shape: str) -> Size:
    """A published shape by name, or a free one: ``RECURRENCE-HEADSxHEAD_DIMxSTATE_DIMgGROUPS``."""
    if shape in SHAPES:
        return SHAPES[shape]
    found = _FREE.fullmatch(shape)
    if found is None:
        raise ReplayError(
            f"shape: got {shape!r}, expected one of {', '.join(SHAPES)}, or sizes such as gdn-32x128x128g16 "
            "(heads x head_dim x state_dim g groups)"
        )
    heads, head_dim, state_dim, groups = map(int, found.groups()[1:])
    return Size(RECURRENCES[found[1]], heads, groups, head_dim, state_dim)


@dataclass(frozen=True)
class Case:
    """One figure.

    Attributes:
        shape: as ``size_of`` reads it.
        batch: rows, each with its own slot.
        window: entries of the buffer, drafts included.
        draft: tokens a row brings a step; 1 is plain decode.
        accepted: tokens that each commit accepts.
        precision: a preset's name.
    """

    shape: str
    batch: int
    window: int = 32
    draft: int = 1
    accepted: int = 1
    precision: str = "fp32"

    @property
    def name(self) -> str:
        """What tables call it."""
        return name_of(vars(self))

    @property
    def layout(self) -> Layout:
        """The layout of the case, bfloat16 activations."""
        size = size_of(self.shape)
        sizes = (size.recurrence, size.heads, size.groups, size.head_dim, size.state_dim)
        policy = Precision.preset(self.precision)
        return Layout(*sizes, window=self.window, max_draft=self.draft, precision=policy)

    @property
    def period(self) -> int:
        """Model steps from fold to fold of a row."""
        return self.layout.room // self.accepted + 1


def name_of(row: Mapping[str, Any]) -> str:
    """The name of a row's case: shape, batch, tokens accepted of those drafted, window, precision."""
    tokens = "1" if row["draft"] == 1 else f"{row['accepted']}of{row['draft']}"
    return f"{row['shape']}/b{row['batch']}/t{tokens}/w{row['window']}/{row['precision']}"


def usual_accepted(draft: int) -> int:
    """Tokens that a commit accepts: 3 of 4, 5 of 8, about two thirds of others."""
    return {4: 3, 8: 5}.get(draft, max(1, round(0.65 * draft)))


def default_cases(device: str) -> list[Case]:
    """The cases of docs/performance.md, the ones that matter most first; a few small ones on the CPU."""
    if device == "cpu":
        shapes = ("mamba2-128x64x128", "gdn-64x128x128", "kda-64x128x128")
        return [Case(shape, batch, 16) for batch in (16, 1) for shape in shapes]
    found = [make_case(s, b, t) for b, t in ((256, 1), (256, 4), (256, 8), (64, 1), (64, 4), (64, 8)) for s in SHAPES]
    policies = ("fp16sr", "float32+fp8", "float32+nvfp4", "fp16sr+nvfp4", "float32+int8")
    found += [make_case(s, 256, precision=policy) for policy in policies for s in SHAPES]
    found += [make_case(s, 256, 8, precision="float32+fp8") for s in SHAPES]
    return found + [make_case(s, batch) for batch in (512, 16, 1) for s in SHAPES]


def make_case(
    shape: str,
    batch: int,
    draft: int = 1,
    window: int | None = None,
    precision: str = "fp32",
    accepted: int | None = None,
) -> Case:
    """A case with the usual window and acceptance where they are not given; wrong values raise."""
    case = Case(
        shape,
        batch,
        window or choose_window(size_of(shape).recurrence, draft),
        draft,
        accepted or usual_accepted(draft),
        Precision.preset(precision).name,
    )
    if not 1 <= case.accepted <= draft:
        raise ReplayError(f"accepted: got {case.accepted}, expected 1…{draft}, the tokens of a step")
    _ = case.layout  # raises for what does not fit together
    return case


@dataclass(frozen=True)
class Choice:
    """Which cases or rows are wanted; an empty list excludes nothing.

    Attributes:
        recurrences: names.
        shapes: names, parts of published names, or free sizes.
        batches, drafts, windows, precisions: values.
        parts: what a name contains, one of them.
    """

    recurrences: Sequence[str] = ()
    shapes: Sequence[str] = ()
    batches: Sequence[int] = ()
    drafts: Sequence[int] = ()
    windows: Sequence[int] = ()
    precisions: Sequence[str] = ()
    parts: Sequence[str] = ()

    def __post_init__(self) -> None:
        wrong = [name for name in self.recurrences if name not in RECURRENCES]
        if wrong:
            raise ReplayError(f"recurrence: got {wrong[0]!r}, supported: {', '.join(RECURRENCES)}")
        named = [s for name in self.shapes for s in ([p for p in SHAPES if name in p] or [name])]
        for name in named:
            size_of(name)
        object.__setattr__(self, "shapes", list(dict.fromkeys(named)))
        object.__setattr__(self, "precisions", [Precision.preset(name).name for name in self.precisions])

    def has(self, row: Mapping[str, Any]) -> bool:
        """Whether a row, or the fields of a case, is wanted."""
        checks = (
            (self.shapes, row["shape"]),
            (self.batches, row["batch"]),
            (self.drafts, row["draft"]),
            (self.windows, row["window"]),
            (self.precisions, row["precision"]),
            (self.recurrences, size_of(row["shape"]).recurrence.name),
        )
        part = not self.parts or any(part in name_of(row) for part in self.parts)
        return part and all(not wanted or value in wanted for wanted, value in checks)

    def cases(self, device: str) -> list[Case]:
        """The device's default cases that are wanted.

        The product of the lists, instead, where a value is in none of them.
        """
        defaults = default_cases(device)
        found = [case for case in defaults if self.has(vars(case))]
        lists = {"shape": self.shapes, "batch": self.batches, "draft": self.drafts}
        lists |= {"window": self.windows, "precision": self.precisions}
        if any(not set(wanted) <= {getattr(case, name) for case in found} for name, wanted in lists.items()):
            shapes = self.shapes or list(dict.fromkeys(case.shape for case in defaults))
            batches = self.batches or [16 if device == "cpu" else 256]
            chosen = (batches, self.drafts or [1], self.windows or [None], self.precisions or ["fp32"], shapes)
            found = [c for b, t, w, p, s in product(*chosen) if self.has(vars(c := make_case(s, b, t, w, p)))]
        if not found:
            raise ReplayError("no case is left of those that --list shows without options")
        return found


def power_of_2(number: int) -> int:
    """The smallest power of two that is not below ``number``."""
    return 1 << (number - 1).bit_length()


def random_inputs(layout: Layout, tokens: int, device: str, seed: int = 0) -> Inputs:
    """Inputs of a decode step with the gates' usual ranges."""
    source = torch.Generator(device).manual_seed(seed)
    h, g, p, k, n = layout.heads, layout.groups, layout.head_dim, layout.state_dim, tokens

    def rand(*shape: int, dtype: torch.dtype = layout.dtype) -> Tensor:
        return torch.randn(*shape, generator=source, device=device).to(dtype)

    wide = torch.float32
    rate = torch.rand(h, generator=source, device=device) * 4 + 0.5
    if layout.recurrence == MAMBA2:
        bias = torch.rand(h, generator=source, device=device) * 3 - 5
        return Mamba2Inputs(rand(n, h, p), rand(n, h), rand(n, g, k), rand(n, g, k), -rate, bias)
    q, key, v = rand(n, g, k), rand(n, g, k), rand(n, h, p)
    if layout.recurrence == GDN:
        return GdnInputs(q, key, v, rand(n, h), rand(n, h), rate.log(), rand(h, dtype=wide) - 3)
    return KdaInputs(q, key, v, rand(n, h, k), rand(n, h), rate.log(), rand(h, k, dtype=wide) - 3)


def take(inputs: Inputs, index: Tensor) -> Inputs:
    """The tokens of ``index`` [N'] alone."""
    names = [f.name for f in fields(inputs) if f.name not in ("A", "A_log", "dt_bias")]  # type: ignore[arg-type]
    picked = {n: v[index] for n in names if isinstance(v := getattr(inputs, n), Tensor)}
    return replace(inputs, **picked)  # type: ignore[type-var]
