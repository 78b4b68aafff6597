"""The names of ``--policies``: which loop keeps the state, and in which format."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from replayssm.checks import ReplayError
from replayssm.formats import FORMATS
from replayssm.layout import Precision

CONVENTIONAL = "conventional"


@dataclass(frozen=True)
class Policy:
    """One way to decode.

    Attributes:
        conventional: the state is read, advanced and rounded at every token, as decoding without replay does; else
            it goes through the library's cache, whose checkpoint is rounded once a window.
        precision: format and rounding of the state, or of checkpoint and read copy.
    """

    conventional: bool
    precision: Precision

    @property
    def name(self) -> str:
        """As ``parse`` reads it."""
        kept = self.precision.name.replace("fp32", "float32")
        if not self.conventional:
            return kept
        return CONVENTIONAL if self.exact else f"{CONVENTIONAL}+{kept}"

    @property
    def exact(self) -> bool:
        """Whether the recurrence goes on from a float32 state."""
        return self.precision.checkpoint == torch.float32

    @property
    def kind(self) -> str:
        """What the state goes through: "exact", "rounded every token", "rounded every window" or "read rounded"."""
        if self.exact:
            return "exact" if self.precision.read_copy is None else "read rounded"
        return "rounded every token" if self.conventional else "rounded every window"

    @property
    def format(self) -> str:
        """The coarsest format that an output depends on, with "sr" for stochastic rounding; policies of one compare."""
        return self.precision.name.rpartition("+")[2]


REFERENCE = Policy(conventional=True, precision=Precision())
"""The conventional loop with a float32 state, which every other policy is compared with."""

DEFAULT = (
    "conventional,float32,"
    "conventional+bf16,conventional+fp16sr,conventional+fp8,conventional+int8,conventional+nvfp4,conventional+nvfp4sr,"
    "bf16,fp16sr,fp8,int8,nvfp4,nvfp4sr,"
    "float32+bf16,float32+fp8,float32+int8,float32+nvfp4"
)


def parse(names: str) -> list[Policy]:
    """The policies of a list of names separated by commas, the reference first, each once.

    Raises:
        ReplayError: a name that is none; the message lists them.
    """
    found = [REFERENCE, *(_policy(name.strip()) for name in names.split(",") if name.strip())]
    return list(dict.fromkeys(found))


def _policy(name: str) -> Policy:
    kept = name.removeprefix(CONVENTIONAL)
    conventional = kept != name
    try:
        if conventional and kept[:1] not in ("", "+"):
            raise ReplayError(name)
        precision = Precision.preset(kept.removeprefix("+") or "fp32" if conventional else name)
        if (conventional and precision.read_copy is not None) or precision.checkpoint == torch.float64:
            raise ReplayError(name)
    except ReplayError:
        formats = [form for form in FORMATS if form not in ("fp64", "fp32")]
        raise ReplayError(
            f"policy {name!r}: expected {CONVENTIONAL}, {CONVENTIONAL}+FORMAT (rounded at every token), FORMAT "
            f"(rounded once a window), float32, or float32+FORMAT (reads of a copy); formats: {', '.join(formats)}; "
            "with sr for stochastic rounding of a state, such as fp16sr or fp16sr+fp8"
        ) from None
    return Policy(conventional, precision)
