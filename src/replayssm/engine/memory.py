"""Whether sequences fit, before memory is taken for them."""

from __future__ import annotations

from pathlib import Path

import torch

from replayssm import ReplayError


def expect_memory(slots: int, each: int, device: torch.device) -> None:
    """Raise if a device has no memory for ``slots`` sequences of ``each`` bytes."""
    free = _on_gpu(device) if device.type == "cuda" else _on_host()
    if free is not None and slots * each > free:
        raise ReplayError(
            f"slots: {slots} sequences of {each} bytes do not fit into the {free} free bytes of {device}; at most "
            f"{free // each} do"
        )


def _on_gpu(device: torch.device) -> int:
    free = torch.cuda.mem_get_info(device)[0]
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _on_host(system: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup/memory.max")) -> int | None:
    """What Linux says is available, at most what a container may have; None where nothing says it.

    Without this a host would promise any memory, and end the process when it is written to.
    """
    found: list[int] = []
    if system.exists():
        lines = (line.split() for line in system.read_text(encoding="ascii").splitlines())
        found += [int(line[1]) << 10 for line in lines if line[0] == "MemAvailable:"]
    if group.exists() and (limit := group.read_text(encoding="ascii").strip()).isdigit():
        found.append(int(limit))
    return min(found, default=None)
