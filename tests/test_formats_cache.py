"""Caches whose checkpoint, read copy or written values have scales: export, import, errors of reads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from replayssm import Precision, ReplayCache, Rows, step
from replayssm.precision import encode
from support.caches import decode, started
from support.makers import CORNERS, generator, layout_of, random_inputs
from support.poison import same

ERRORS = {"bf16": 0.01, "fp16": 0.002, "int8": 0.03, "fp8": 0.1, "fp8_e5m2": 0.2, "nvfp4": 0.4, "int4": 0.5}
PRESETS = ["int8+nvfp4", "nvfp4sr", "fp8+int4", "fp16sr+fp8", "int4"]


@pytest.mark.parametrize("preset", PRESETS)
def test_export_and_import_to_the_bit(preset: str) -> None:
    policy = replace(Precision.preset(preset), buffer="fp16_scaled")
    layout = layout_of("gdn", torch.float32, precision=policy)
    here, there = started(layout), ReplayCache.allocate(layout, 1, 4)
    decode(here, "gdn", 4)
    data = here.export(range(4))
    assert not any("read_copy" in name for name in data)
    there.import_(range(4), data)
    for cache in (here, there):
        decode(cache, "gdn", 9, seed=8)
        cache.fold(range(4))
    for name, part in here.views()[0].items():
        if not layout.tensors[name].entries:
            assert same(part, there.views()[0][name]), name


@pytest.mark.parametrize("preset", PRESETS)
def test_import_from_float32_encodes(preset: str) -> None:
    layout = layout_of("kda", torch.float32, precision=Precision.preset(preset))
    source = started(replace(layout, precision=Precision()))
    decode(source, "kda", 3)
    cache = ReplayCache.allocate(layout, 1, 4)
    cache.import_(range(4), source.export(range(4)))
    got, want = cache.materialise(0, range(4)), source.materialise(0, range(4))
    assert (got - want).norm() < 0.15 * want.norm()
    views = cache.views()[0]
    assert all(same(part, views[name]) for name, part in encode(views, layout.precision, layout.state_dim).items())


@pytest.mark.parametrize("name", CORNERS)
@pytest.mark.parametrize("copy", ERRORS)
@pytest.mark.parametrize("backend", ["c", "torch"])
def test_reads_of_a_copy_are_off_by_its_error_and_no_more(
    name: str, copy: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over many windows: the error of a read stays that of one encoding, because it never enters the recurrence."""
    monkeypatch.setenv("REPLAYSSM_CPU", "torch" if backend == "torch" else "")
    layout = layout_of(name, torch.float32, head_dim=16, state_dim=64, window=6, max_draft=1)
    exact, lossy = (
        started(replace(layout, precision=policy), slots=2) for policy in (Precision(), Precision(read_copy=copy))
    )
    rows, source = Rows.decode([0, 1]), generator(3)
    for _ in range(25):
        inputs = random_inputs(name, layout, 2, source, decay=0.02)
        outs = [step(cache[0], inputs, rows) for cache in (exact, lossy)]
        for cache in (exact, lossy):
            cache.commit(rows, [1, 1])
        assert (outs[1] - outs[0]).norm() < ERRORS[copy] * outs[0].norm()
    assert exact.folds.tolist() == [4, 4]
