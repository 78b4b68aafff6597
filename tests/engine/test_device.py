"""Runs ``interpreted.py`` where Triton interprets its kernels; tables on the CPU."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from replayssm import ReplayError
from replayssm.engine.device import Block, Captured, best_of
from replayssm.engine.packed import Row
from support.interpreter import run_interpreted


@pytest.mark.parametrize("select", ["qwen3_next", pytest.param("not qwen3_next", marks=pytest.mark.slow)])
def test_the_way_of_a_gpu_on_the_cpu(select: str) -> None:
    pytest.importorskip("triton")
    run_interpreted(Path(__file__).with_name("interpreted.py"), select=select)


def test_a_block_holds_rows_trees_and_padding() -> None:
    block = Block(4, 4, True, torch.device("cpu"))
    block.fill([Row(5, [7, 8, 9], [-1, 0, 0]), Row(1, [3])], [10, 2])
    on = {name: tensor.tolist() for name, tensor in block.tokens.on.items()}
    assert on["slots"] == [5, 1, -1, -1]
    assert on["offsets"] == [0, 3, 4, 4, 4]
    assert on["lengths"] == [10, 2, 0, 0]
    assert on["ids"][:5] == [7, 8, 9, 3, 0]
    assert on["homes"] == [5, 5, 5, 1, *[-1] * 12]
    assert on["places"][:4] == [10, 11, 12, 2]
    assert on["positions"][:4] == [10, 11, 11, 2]
    assert on["lines"][:4] == [1, 3, 5, 1]
    assert on["parents"][:5] == [-1, 0, 0, -1, -1]
    addresses = {name: tensor.data_ptr() for name, tensor in block.tokens.on.items()}
    assert all(address % 16 == 0 for address in addresses.values())
    block.fill([Row(2, [4])], [0])
    assert block.tokens.on["slots"].tolist() == [2, -1, -1, -1]
    assert block.table.slots.tolist() == [2, -1, -1, -1]
    assert {name: tensor.data_ptr() for name, tensor in block.tokens.on.items()} == addresses
    block.accept([1], [[0]])
    assert block.taken.on["accepted"].tolist() == [1, 0, 0, 0]
    assert block.taken.on["path"][:5].tolist() == [0, -1, -1, -1, -1]


def test_a_decode_block_is_filled_as_any_other() -> None:
    rows, lengths = [Row(3, [9]), Row(0, [4])], [6, 1]
    fast, slow = Block(4, 1, False, torch.device("cpu")), Block(4, 2, False, torch.device("cpu"))
    fast.fill(rows, lengths)
    slow.fill(rows, lengths)
    for name, tensor in fast.tokens.on.items():
        assert tensor.tolist() == slow.tokens.on[name][: len(tensor)].tolist(), name


def test_the_best_token_is_none_where_logits_are_no_numbers() -> None:
    logits = torch.zeros(4, 5)
    logits[0, 3] = 1
    logits[1, 2] = torch.nan
    logits[2] = -torch.inf
    logits[3, 1:] = -torch.inf
    assert best_of(logits).tolist() == [3, -1, -1, 0]


@pytest.mark.parametrize("problem", [RuntimeError("operation not permitted\nwhen stream is capturing"), "memory"])
def test_what_a_capture_says(monkeypatch: pytest.MonkeyPatch, problem: RuntimeError | str) -> None:
    """A layer that cannot be captured is told the way out; too little memory is what it is."""
    error = torch.OutOfMemoryError("CUDA out of memory") if isinstance(problem, str) else problem
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool: nullcontext())
    captured = Captured(lambda: 1)
    assert captured.run("pool") == 1

    def fails() -> None:
        raise error

    captured.work = fails
    if isinstance(problem, str):
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            captured.run("pool")
    else:
        with pytest.raises(ReplayError, match=r"\(operation not permitted\); pass graphs=False"):
            captured.run("pool")


def test_norms_as_kernels() -> None:
    pytest.importorskip("triton")
    run_interpreted(Path(__file__).with_name("interpreted_fuse.py"))
