"""Which window: as ``auto`` chooses a precision, from what was measured instead of bytes alone.

Bytes say how wide an entry is (``predict.best_window``), not what a fold costs in a kernel. benchmarks/NOTES.md has the
sweeps: four and eight drafts on an H200.
"""

from __future__ import annotations

from replayssm.layout import KDA, Recurrence


def choose_window(recurrence: Recurrence, max_draft: int = 1, device: str = "cuda") -> int:
    """The fastest of the windows that were tried with drafts, entries of those included; without, that of the tables.

    On a GPU (float32, batch 256): 16 where an entry has a decay per channel; else 32, or 48 where a fold is one product
    beside steps of more than four drafts; and room for two steps at least. On the CPU 16 entries and room for the
    drafts.

    Args:
        recurrence: of the layers.
        max_draft: most tokens of a row in a step, 1 for plain decode.
        device: type of the device, "cpu" or "cuda".
    """
    if device == "cpu":
        return 15 + max_draft
    if recurrence.decay == KDA.decay:
        return max(16, 2 * max_draft)
    return 48 if recurrence.update == "add" and max_draft > 4 else 32
