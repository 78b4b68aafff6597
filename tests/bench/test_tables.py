"""Which tile the library takes: a user's table over the packaged one, over the heuristic."""

import json

import pytest
import torch

from replayssm import GDN, MAMBA2, Layout, Precision, ReplayError

launch = pytest.importorskip("replayssm.backends.triton.launch", reason="needs triton")
DEVICE = torch.device("cuda")
GPU = "NVIDIA H200"
LAYOUT = Layout(MAMBA2, 128, 8, 64, 128)


@pytest.fixture
def gpu(monkeypatch):
    """A machine that says it is an H200; tables are read anew."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: GPU)
    monkeypatch.delenv("REPLAYSSM_TILES", raising=False)
    launch.tile_table.cache_clear()
    yield
    launch.tile_table.cache_clear()


def user_table(folder, monkeypatch, content):
    folder.mkdir(exist_ok=True)
    (folder / "nvidia_h200.json").write_text(content if isinstance(content, str) else json.dumps(content))
    monkeypatch.setenv("REPLAYSSM_TILES", str(folder))
    launch.tile_table.cache_clear()


def test_packaged_tiles(gpu):
    packaged = launch.read_table(launch.table_file(launch.Path(launch.__file__).parent / "tiles", GPU))
    for kernel in ("step", "fold"):
        assert launch.choose_tile(kernel, LAYOUT, DEVICE) == launch.Tile(*packaged[launch.tile_key(kernel, LAYOUT)])


def test_a_users_tile_wins_and_the_others_stay(gpu, monkeypatch, tmp_path):
    fold = launch.choose_tile("fold", LAYOUT, DEVICE)
    user_table(tmp_path, monkeypatch, {"tiles": {launch.tile_key("step", LAYOUT): [32, 16, 2, 5, 7, 1]}})
    assert launch.choose_tile("step", LAYOUT, DEVICE) == launch.Tile(32, 16, 2, 5, 7, 1)
    assert launch.choose_tile("fold", LAYOUT, DEVICE) == fold


def test_a_layout_without_a_tile_falls_back_to_the_heuristic(gpu, monkeypatch, tmp_path):
    other = Layout(GDN, 4, 2, 32, 64, precision=Precision("bf16"))
    guess = launch.choose_tile("step", other, torch.device("cpu"))
    assert launch.choose_tile("step", other, DEVICE) == guess
    user_table(tmp_path, monkeypatch, {"tiles": {launch.tile_key("step", other): [16, 16, 1]}})
    assert launch.choose_tile("step", other, DEVICE) == launch.Tile(16, 16, 1) != guess


def test_a_folder_without_this_gpu_is_fine(gpu, monkeypatch, tmp_path):
    expected = launch.tile_table(GPU)
    monkeypatch.setenv("REPLAYSSM_TILES", str(tmp_path))
    launch.tile_table.cache_clear()
    assert launch.tile_table(GPU) == expected


@pytest.mark.parametrize("content", ["{", "[]", '{"tiles": {"a": [1, 2]}}', '{"tiles": {"a": [1, 2, 3.5]}}', "{}"])
def test_a_broken_table_is_named(gpu, monkeypatch, tmp_path, content):
    user_table(tmp_path, monkeypatch, content)
    with pytest.raises(ReplayError, match=r"nvidia_h200\.json: expected"):
        launch.choose_tile("step", LAYOUT, DEVICE)


def test_a_missing_folder_is_named(gpu, monkeypatch, tmp_path):
    monkeypatch.setenv("REPLAYSSM_TILES", str(tmp_path / "nowhere"))
    launch.tile_table.cache_clear()
    with pytest.raises(ReplayError, match=r"REPLAYSSM_TILES: .*nowhere is no folder"):
        launch.choose_tile("step", LAYOUT, DEVICE)
