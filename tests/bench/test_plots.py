"""What the plots show: the lines' values, read back from the figures."""

import pytest

from replayssm.bench import plots


@pytest.fixture
def figures(monkeypatch, tmp_path):
    """Figures by file name, kept instead of written."""
    kept = {}
    monkeypatch.setattr(plots, "_save", lambda figure, path: kept.setdefault(path.name, figure) and path)
    return kept


def lines(axes):
    """Points by label; lines across the whole axes have none."""
    found = {line.get_label(): list(zip(*line.get_data(orig=True), strict=True)) for line in axes.lines}
    return {label: points for label, points in found.items() if not str(label).startswith("_")}


def test_speedup(rows, figures, tmp_path):
    plots.draw(rows, tmp_path)
    plain, drafts, other = figures["kernel-speedup.png"].axes
    assert lines(plain) == {
        "gdn-2x16x16g1, t1, w32": [(64, 1.8), (256, 1.8)],
        "mamba2-4x8x16g2, t1, w32": [(64, 1.8)],
    }
    # Tokens a second: three tokens a step are three conventional steps.
    assert lines(drafts) == {"gdn-2x16x16g1, t3of4, w32": [(64, pytest.approx(5.4))]}
    assert lines(other) == {"gdn-2x16x16g1, other precisions": [("fp32+fp8", 1.8)]}
    assert plain.get_ylim() == drafts.get_ylim() == (0, pytest.approx(1.5 * 5.4))
    assert "GPU 9, 2026-01-02, abc" in figures["kernel-speedup.png"].get_suptitle()


def test_cycle(rows, figures, tmp_path):
    rows[0] = {**rows[0], "by_step": [9.0, 9.0]}  # the largest batch of a shape is shown
    plots.draw(rows, tmp_path)
    gdn, mamba = figures["kernel-cycle.png"].axes
    assert lines(gdn)["folds staggered"] == [(0, 0.3), (1, 0.31)]
    assert lines(gdn)["all rows fold together"] == [(0, 0.28), (1, 0.32)]
    assert lines(mamba)["conventional"] == [(0, 0.54), (1, 0.54)]


def test_no_fold_of_a_cycle_is_cut_off(rows, figures, tmp_path):
    plots.draw([{**row, "aligned": [0.3, 5.0]} if "mamba2" in row["shape"] else row for row in rows], tmp_path)
    gdn, mamba = figures["kernel-cycle.png"].axes
    assert gdn.get_ylim() == mamba.get_ylim()
    assert mamba.get_ylim()[0] == 0
    assert mamba.get_ylim()[1] > 5


def test_roofline(rows, figures, tmp_path):
    plots.draw(rows, tmp_path)
    (axes,) = figures["kernel-roofline.png"].axes
    found = lines(axes)
    assert found["mamba2-4x8x16g2, plain"] == [(1000.0, pytest.approx(1e9 / 0.3e-3 / 1e12))]
    assert found["reading alone: 4.5 TB/s"] == [(0, 4.5), (1, 4.5)]


def test_old_rows_have_no_steps_of_a_cycle(rows, figures, tmp_path):
    old = [{k: v for k, v in row.items() if k not in ("by_step", "aligned")} for row in rows]
    assert [path.name for path in plots.draw(old, tmp_path)] == ["kernel-speedup.png", "kernel-roofline.png"]
