"""The parts of a figure on the CPU at tiny sizes, and what is kept of it."""

import json
from typing import Any

import pytest
import torch

from replayssm import GDN, Rows, step
from replayssm.bench import kernel, peers
from replayssm.bench.accuracy import errors
from replayssm.bench.cases import make_case, random_inputs, take
from replayssm.bench.compile import Compiler, Job
from replayssm.bench.conventional import make_step
from replayssm.bench.page import BEGIN, END, rewrite, table
from replayssm.bench.replay import Replay, moved
from replayssm.bench.rows import append, read
from replayssm.bench.run import Run
from replayssm.bench.timing import Setup
from replayssm.cache import ReplayCache
from replayssm.checks import ReplayError

TINY = ("mamba2-4x8x16g2", "gdn-2x16x16g1", "kda-2x16x16g2")
SETUP = Setup("cpu", megabytes=1, budget_ms=1)


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)


def test_layers():
    assert Setup("cuda").layers(1 << 30) == 1
    assert Setup("cuda", least=8).layers(1 << 30) == 8
    assert Setup("cuda", 400, least=8).layers(4 << 20) == 100


@pytest.mark.parametrize("draft", [1, 4])
def test_folds_are_spread_over_the_cycle(draft):
    case = make_case("gdn-2x16x16g1", 12, draft, window=12)
    replay = Replay(case, Setup("cpu", 1, least=2))
    replay.cycle()  # rows fold when they are full from here on
    before, counts = replay.cache.folds.clone(), []
    for _ in range(replay.period):
        folds = replay.cache.folds.clone()
        replay.model_step()
        counts.append(int((replay.cache.folds - folds).sum()))
    assert sum(counts) == case.batch
    assert max(counts) - min(counts) <= 1 + (case.batch % replay.period > 0)
    assert torch.equal(replay.cache.folds - before, torch.ones(12, dtype=before.dtype))
    replay.align()
    counts = []
    for _ in range(replay.period):
        folds = replay.cache.folds.clone()
        replay.model_step()
        counts.append(int((replay.cache.folds - folds).sum()))
    assert counts == [0] * (replay.period - 1) + [case.batch]


@pytest.mark.parametrize("shape", TINY)
def test_the_conventional_step_is_the_recurrence(shape):
    layout = make_case(shape, 3).layout
    cache, rows = ReplayCache.allocate(layout, 1, 3), Rows.decode(range(3))
    state, run = torch.zeros((3, *layout.state_shape)), make_step(layout, 3, "cpu")
    for number in range(4):
        inputs = random_inputs(layout, 3, "cpu", number)
        torch.testing.assert_close(run(state, inputs), step(cache[0], inputs, rows), rtol=2e-2, atol=2e-2)
        cache.commit(rows, [1] * 3)
    torch.testing.assert_close(state, cache.materialise(0, range(3)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", TINY)
@pytest.mark.parametrize(("draft", "precision", "bound"), [(1, "fp32", 1e-6), (4, "fp32", 1e-6), (1, "fp32+fp8", 1e-6)])
def test_errors(shape, draft, precision, bound):
    found = errors(make_case(shape, 2, draft, window=8, precision=precision), "cpu", windows=2)
    assert 0 < found["error"] < bound  # a read copy does not reach the state
    assert 0 < found["error_conventional"] < 1e-6
    assert 0 < found["error_output_conventional"] < 5e-3
    assert found["error_output"] < 5e-3 if precision == "fp32" else 5e-3 < found["error_output"] < 0.1


def test_a_figure():
    case = make_case("gdn-2x16x16g1", 64, window=8)
    row = kernel.figure(case, SETUP, {"read_tb_s": 0.5, "copy_tb_s": 0.4}, (16, 2), {})
    assert row["period"] == case.period == len(row["by_step"]) == len(row["aligned"]) == 8
    assert row["bytes"] == round(moved(case).total)
    assert row["ratio"] == pytest.approx(row["ms_conventional"] / row["ms"])
    assert row["read_share"] == pytest.approx(row["bytes"] / (row["ms"] * 1e-3) / 0.5e12)
    assert row["layers"] == (1 << 20) // (2 * 16 * 16 * 4 * 64)
    copied = 2 * 64 * 2 * 16 * 16 * 4 / 0.4e12
    assert row["fold_over_copy"] == pytest.approx(row["ms_fold"] * 1e-3 / copied)


def test_a_fold_is_timed_on_full_rows():
    replay = Replay(make_case("gdn-2x16x16g1", 4, 4, window=12), Setup("cpu", 1, least=2))
    replay.align()
    folded = []
    cache, fold = replay.cache, replay.cache.fold
    cache.fold = lambda slots: (folded.append(cache.length.tolist()), fold(slots))  # pyright: ignore[reportAttributeAccessIssue]
    assert kernel._fold(replay, SETUP) > 0
    assert folded
    assert all(lengths == [3 * (replay.period - 1)] * 4 for lengths in folded)
    assert cache.length.tolist() == [0] * 4


def test_bytes_are_those_of_the_state_and_the_fold():
    big, half = make_case("gdn-64x128x128", 256), make_case("gdn-64x128x128", 256, precision="fp16sr")
    state = 256 * 64 * 128 * 128 * 4
    assert state * (1 + 2 / 32) < moved(big).total < state * (1 + 2 / 32) * 1.2
    saved = moved(big).total - moved(half).total
    assert saved == pytest.approx(state / 2 * (1 + 2 / 32), rel=1e-3)


def test_a_run_writes_rows_as_they_come_and_goes_on_after_a_failure(monkeypatch):
    cases = [make_case(shape, 32, window=8) for shape in TINY]
    written, notes, seen = [], [], []
    figure = kernel.figure

    def failing(case, *rest):
        assert written[0].keys() == {"copy_tb_s", "read_tb_s"}
        assert len(written) == 1 + sum(row is not None for _, row in seen)
        if case == cases[1]:
            raise RuntimeError("out of memory")
        return figure(case, *rest)

    monkeypatch.setattr(kernel, "figure", failing)
    rows = Run(SETUP, written.append, notes.append).cases(cases, lambda case, row: seen.append((case, row)))
    assert rows == written[1:] == [row for _, row in seen if row]
    assert [row["shape"] for row in rows] == [TINY[0], TINY[2]]
    assert notes == ["gdn-2x16x16g1/b32/t1/w8/fp32: RuntimeError out of memory"]
    assert [case for case, _ in seen] == cases


def test_out_of_time():
    notes = []
    case = make_case(TINY[0], 2)
    assert Run(SETUP, lambda row: None, notes.append, seconds=0).cases([case], lambda case, row: None) == []
    assert notes == [f"out of time before {case.name}"]


def test_jobs_are_run_elsewhere_once_and_not_for_ever():
    notes = []
    small, bad = make_case("gdn-2x16x16g1", 512, window=8), Job(make_case("gdn-2x16x16g1", 4), tiles={"step": None})  # pyright: ignore[reportArgumentType]
    with Compiler(SETUP, 1, notes.append) as compiler:
        compiler([Job(small), Job(make_case("gdn-2x16x16g1", 1, window=8)), bad])
        assert len(notes) == 2  # batches share their kernels
        assert notes[0].startswith(f"{bad.case.name} {{'step': None}}: ") or notes[0].startswith("compiled 2 of 2")
        assert notes[-1].startswith("compiled 2 of 2")
        compiler([Job(small)], seconds=0)
    assert notes[2:] == ["compiled 0 of 1, the others when they are timed"]
    Compiler(SETUP, 0, notes.append)([bad])  # no processes: nothing to do
    assert len(notes) == 3


def test_the_newest_row_of_a_case_counts(tmp_path, rows):
    path, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for row in [{"read_tb_s": 4.0}, *rows, {**rows[0], "sweep": "step"}, {**rows[0], "gpu": "other"}]:
        append(path, row)
    append(other, {**rows[0], "ms": 9.0})
    found = read([path, other])
    assert found == [*rows[1:], {**rows[0], "gpu": "other"}, {**rows[0], "ms": 9.0}]
    # With another window on a later day: that day's windows alone.
    append(other, {**rows[1], "window": 3, "date": "2026-01-03"})
    assert read([path, other]) == [
        *rows[2:],
        {**rows[0], "gpu": "other"},
        {**rows[0], "ms": 9.0},
        {**rows[1], "window": 3, "date": "2026-01-03"},
    ]
    other.write_text('{"a": 1}\n{"b"\n')
    with pytest.raises(ReplayError, match=r"b\.jsonl:2: no JSON"):
        read([other])


def test_a_page(tmp_path, rows):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    rewrite(page, rows)
    assert page.read_text() == f"before\n{BEGIN}\n\n{table(rows)}\n{END}\nafter\n"
    rewrite(page, rows)
    lines = page.read_text().splitlines()
    assert lines[3] == "GPU 9; 2026-01-02, torch 2.0, triton 3.0:"
    body = [line for line in lines if line.startswith("| ") and "shape" not in line]
    # Mamba-2 first, then by tokens a step, precision and batch.
    assert [line.split(" | ")[:4] for line in body] == [
        ["| mamba2-4x8x16g2", "64", "32", "1"],
        ["| gdn-2x16x16g1", "256", "32", "1"],
        ["| gdn-2x16x16g1", "64", "32", "1"],
        ["| gdn-2x16x16g1, fp32+fp8", "64", "32", "1"],
        ["| gdn-2x16x16g1", "64", "32", "3 of 4"],
    ]
    assert body[1] == (
        "| gdn-2x16x16g1 | 256 | 32 | 1 | 0.300 | 0.280 | 0.540 | 1.80 | 80% | 1.02 | 1.25 | 1.0e-07 (2.0e-07) | abc |"
    )
    (tmp_path / "kernel-cycle.png").touch()
    rewrite(page, rows)
    assert page.read_text().endswith(f"\n\n![A model step through a cycle](kernel-cycle.png)\n\n{END}\nafter\n")
    page.write_text("nothing\n")
    with pytest.raises(ReplayError, match=r"page\.md: expected a line <!-- figures -->"):
        rewrite(page, rows)


class Fla:
    """A stand-in of fla's function: the recurrence token by token on [R, 1, H, K], states [R, H, K, P]."""

    factor = 1.0

    def fused_recurrent_gated_delta_rule(self, q, k, v, g, beta, initial_state, output_final_state, **options):
        assert output_final_state
        assert options == {"use_qk_l2norm_in_kernel": True}
        repeat = v.shape[2] // q.shape[2]
        q, k = (t[:, 0].float().repeat_interleave(repeat, 1) for t in (q, k))
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
        state = initial_state * g[:, 0].exp()[..., None, None]
        u = beta[:, 0, :, None] * (v[:, 0].float() - (state * k[..., None]).sum(-2))
        state = state + k[..., None] * u[..., None, :]
        o = (state * q[..., None]).sum(-2) * q.shape[-1] ** -0.5
        return self.factor * o[:, None], state


def test_peers_are_compared_before_they_are_timed(monkeypatch):
    module, notes = Fla(), []
    monkeypatch.setattr(
        peers.importlib,
        "import_module",
        lambda name: module if name == "fla.ops.gated_delta_rule" else (_ for _ in ()).throw(ImportError(name)),
    )
    assert set(peers.missing()) == {peer.name for peer in peers.PEERS if peer.recurrence != GDN}
    case = make_case("gdn-4x16x32g2", 3)
    assert peers.measure(case, SETUP, notes.append)["fla fused_recurrent_gated_delta_rule"] > 0
    assert peers.measure(make_case("kda-2x16x16g2", 3), SETUP, notes.append) == {}
    assert peers.measure(make_case("gdn-4x16x32g2", 3, 4), SETUP, notes.append) == {}
    assert notes == []
    module.factor = 1.1
    assert peers.measure(case, SETUP, notes.append) == {}
    assert "differs from the recurrence by 1.0e-01" in notes[0]


def test_take_keeps_the_weights_whole():
    layout = make_case("kda-2x16x16g2", 4).layout
    inputs: Any = random_inputs(layout, 4, "cpu")
    picked: Any = take(inputs, torch.tensor([2, 0]))
    assert torch.equal(picked.v, inputs.v[[2, 0]])
    assert picked.A_log is inputs.A_log


def test_rows_are_json():
    case = make_case("gdn-2x16x16g1", 64, window=8)
    assert (
        json.loads(json.dumps(kernel.figure(case, SETUP, {"read_tb_s": 0.5, "copy_tb_s": 0.4}, (16, 2), {})))["shape"]
        == case.shape
    )
