"""Facts about GPUs (data/gpus.json, with their sources) and the time that traffic takes on one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

from .traffic import Traffic


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        key: its word on the command line.
        name: the vendor's name.
        memory: bytes.
        read: bytes per second when only reading.
        copy: bytes per second, both directions counted, when as much is written as read.
        compute: multiply-adds per second, times two, that decoding is taken to reach.
        step: seconds that a conventional recurrent layer takes beyond its bytes.
        replay: seconds that a layer of `replayssm` takes beyond its bytes.
        block: seconds that the other kernels of a block take beyond their bytes.
        measured: what was measured, on what and when.
        source: the vendor's document.
    """

    key: str
    name: str
    memory: float
    read: float
    copy: float
    compute: float
    step: float
    replay: float
    block: float
    measured: str
    source: str

    def seconds(self, traffic: Traffic) -> float:
        """Time to move the bytes: what is read and rewritten at `copy` speed, what is only read at `read` speed."""
        both = min(traffic.read, traffic.write)
        only_read, only_written = traffic.read - both, traffic.write - both
        return (2 * both + only_written) / self.copy + only_read / self.read


@cache
def gpus() -> dict[str, Gpu]:
    """The GPUs known here, by key."""
    facts = json.loads(resources.files("replayssm").joinpath("data/gpus.json").read_text(encoding="utf-8"))
    efficiency = facts["matrix_efficiency"]
    return {
        key: Gpu(
            key=key,
            name=fact["name"],
            memory=fact["memory_gb"] * 1e9,
            read=fact["read_tb_s"] * 1e12,
            copy=fact["copy_tb_s"] * 1e12,
            compute=fact["matrix_tflops"] * 1e12 * efficiency,
            step=fact["step_us"] * 1e-6,
            replay=fact["replay_us"] * 1e-6,
            block=fact["block_us"] * 1e-6,
            measured=fact["measured"],
            source=fact["source"],
        )
        for key, fact in facts["gpus"].items()
    }
