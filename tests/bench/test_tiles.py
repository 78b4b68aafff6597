"""The search for tiles with a stopwatch that is a formula, and the table that it writes."""

import json

import pytest
import torch

from replayssm import GDN, Layout
from replayssm.bench.cases import SHAPES, make_case

tiles = pytest.importorskip("replayssm.bench.tiles", reason="needs triton")
launch = pytest.importorskip("replayssm.backends.triton.launch", reason="needs triton")
Tile, CPU = tiles.Tile, torch.device("cpu")  # on the CPU the tile in use is the heuristic's


def distance(best):
    """A measure that is fastest at ``best`` and gets slower with every step along a ladder."""
    seen = []

    def measure(case, chosen):
        (kernel, tile) = list(chosen.items())[-1]
        seen.append((kernel, tile))
        away = sum(
            abs(ladder.index(getattr(tile, knob)) - ladder.index(getattr(best, knob)))
            for knob, ladder in tiles.LADDERS.items()
            if getattr(tile, knob) in ladder
        )
        return {"ms_step": 1.0 + away, "ms": 2.0 + away}

    return measure, seen


def test_the_search_walks_to_the_best_tile():
    case, best = make_case("gdn-64x128x128", 256), Tile(128, 64, 8, 8, 232, 4, 2)
    measure, seen = distance(best)
    compiled = []
    search = tiles.Search(measure, compiled.extend, rounds=20)
    assert search.best(case, "step", CPU, {}) == best
    assert len(seen) == len(set(seen)) == len(compiled)  # nothing is timed or compiled twice


def test_without_rounds_the_best_candidate_is_taken():
    case = make_case("gdn-64x128x128", 256)
    listed = tiles.candidates("step", case.layout, CPU)
    measure, seen = distance(listed[3])
    assert tiles.Search(measure).best(case, "step", CPU, {}) == listed[3]
    assert [tile for _, tile in seen] == listed


def test_the_fold_is_timed_with_the_best_step_and_by_the_cycle():
    case, given = make_case("mamba2-128x64x128", 64), []

    def measure(case, chosen):
        given.append(dict(chosen))
        fast = chosen.get("fold", Tile(1, 1, 1)).warps == 2 and chosen.get("fold", Tile(1, 1, 1)).registers == 168
        return {"ms_step": 1.0 / chosen["step"].warps, "ms": 0.5 if fast else 1.0}

    best = tiles.Search(measure).sweep(case, CPU)
    assert best["step"].warps == max(tile["step"].warps for tile in given)
    assert best["fold"].registers == 168
    assert all(tile["step"] == best["step"] for tile in given if "fold" in tile)


def test_drafts_take_the_fold_of_plain_decode():
    case, known = make_case("gdn-64x128x128", 64, 4), Tile(32, 128, 4, 2)
    best = tiles.Search(lambda case, chosen: {"ms_step": 1.0, "ms": 1.0}).sweep(case, CPU, {"fold": known})
    assert best["fold"] == known
    assert best["step"] == tiles.candidates("step", case.layout, CPU)[0]


def test_a_tile_that_does_not_run_is_noted_and_not_chosen():
    case, notes, rows = make_case("gdn-64x128x128", 64), [], []

    def measure(case, chosen):
        if chosen["step"].registers == 128:
            raise RuntimeError("out of resources: shared memory")
        return {"ms_step": 1.0, "ms": 1.0}

    best = tiles.Search(measure, note=notes.append, write=rows.append).best(case, "step", CPU, {})
    assert best.registers == 168
    assert notes
    assert all("out of resources" in note for note in notes)
    assert all(row["tile"][4] != 128 and row["sweep"] == "step" and row["shape"] == case.shape for row in rows)

    def nothing(case, chosen):
        raise RuntimeError("no device")

    assert tiles.Search(nothing).best(case, "step", CPU, {}) == tiles.candidates("step", case.layout, CPU)[0]


@pytest.mark.parametrize("draft", [1, 4])
def test_neighbours_are_legal(draft):
    layout = Layout(GDN, 4, 2, 80, 96, max_draft=draft)
    for kernel in ("step", "fold"):
        near = tiles.neighbours(Tile(64, 128, 4, 16, 128, 2, 1), layout, kernel)
        assert {tile.p for tile in near} == {32, 64, 128}
        decode = kernel == "step" and draft == 1
        assert {tile.k for tile in near} == ({64, 128} if decode else {128})
        assert {tile.heads for tile in near} == ({1, 2} if decode else {1})
        assert all(
            sum(a != b for a, b in zip(vars(tile).values(), (64, 128, 4, 16, 128, 2, 1), strict=True)) == 1
            for tile in near
        )
    assert tiles.neighbours(Tile(128, 128, 8, 64, 232, 4, 2), layout, "step") == [
        *[Tile(64, 128, 8, 64, 232, 4, 2)],
        *([Tile(128, 64, 8, 64, 232, 4, 2)] if draft == 1 else []),
        *[Tile(128, 128, 4, 64, 232, 4, 2), Tile(128, 128, 8, 32, 232, 4, 2)],
        *[Tile(128, 128, 8, 64, 168, 4, 2), Tile(128, 128, 8, 64, 232, 3, 2)],
        *([Tile(128, 128, 8, 64, 232, 4, 1)] if draft == 1 else []),
    ]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("precision", ["fp32", "fp32+fp8", "fp16sr+nvfp4"])
@pytest.mark.parametrize("draft", [1, 4])
def test_candidates_are_legal(shape, precision, draft):
    layout = make_case(shape, 256, draft, precision=precision).layout
    for kernel in ("step", "fold"):
        rows = launch.least_rows(kernel, layout)
        found = tiles.candidates(kernel, layout, CPU)
        assert found[0] == launch.choose_tile(kernel, layout, CPU)
        assert len(found) == len(set(found))
        assert all(tile.p >= rows for tile in found)
        # As many heads as the launch makes of it: no tile is measured under two names.
        for tile in found:
            assert tile.heads == launch.make_shape(layout, tile, "linear", False, False, 1).N


def test_decode_of_the_h200_starts_from_what_its_table_has():
    table = launch.read_table(launch.Path(launch.__file__).parent / "tiles" / "nvidia_h200.json")
    for shape in ("mamba2-128x64x128", "gdn-64x128x128", "kda-64x128x128"):
        layout = make_case(shape, 256).layout
        for kernel in tiles.kernels(layout):
            assert Tile(*table[launch.tile_key(kernel, layout)]) in tiles.candidates(kernel, layout, CPU)


def test_tables_are_merged(tmp_path):
    folder = tmp_path / "tiles"
    tiles.merge(folder, "NVIDIA X 1", "2026-01-01", {"a": Tile(16, 16, 1), "b": Tile(32, 32, 2)})
    path = tiles.merge(folder, "NVIDIA X 1", "2026-01-02", {"b": Tile(64, 64, 4, 8, 168, 3, 4), "c": Tile(16, 32, 1)})
    assert path == folder / "nvidia_x_1.json"
    assert json.loads(path.read_text()) == {
        "gpu": "NVIDIA X 1",
        "date": "2026-01-02",
        "fields": ["p", "k", "warps", "programs", "registers", "stages", "heads"],
        "tiles": {"a": [16, 16, 1, 16, 0, 2, 1], "b": [64, 64, 4, 8, 168, 3, 4], "c": [16, 32, 1, 16, 0, 2, 1]},
    }
