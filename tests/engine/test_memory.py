"""What does not fit is refused before memory is taken."""

import pytest
import torch
from engine_tiny import engine, tiny

from replayssm import ReplayError
from replayssm.engine import memory


def test_more_sequences_than_the_host_has_memory_for():
    model, _ = tiny()
    for options in ({"slots": 10**9}, {"slots": None, "memory": 1 << 60}):
        with pytest.raises(ReplayError, match=r"do not fit into the \d+ free bytes of cpu; at most \d+ do"):
            engine(model, **options)
    engine(model).close()


@pytest.mark.parametrize(
    ("limit", "free"), [(None, 5 << 20), ("max\n", 5 << 20), (f"{3 << 20}\n", 3 << 20), (f"{9 << 20}\n", 5 << 20)]
)
def test_what_the_host_says(tmp_path, monkeypatch, limit, free):
    system, group = tmp_path / "meminfo", tmp_path / "memory.max"
    assert memory._on_host(system, group) is None
    system.write_text("MemTotal:  9999 kB\nMemFree: 1 kB\nMemAvailable:   5120 kB\nHugePages_Total:   0\n")
    if limit is not None:
        group.write_text(limit)
    assert memory._on_host(system, group) == free
    monkeypatch.setattr(memory, "_on_host", lambda: free)
    memory.expect_memory(2, free // 2, torch.device("cpu"))
    with pytest.raises(ReplayError, match=f"at most {free // (1 << 20)} do"):
        memory.expect_memory(6, 1 << 20, torch.device("cpu"))
