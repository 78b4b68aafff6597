"""``torch.compile(fullgraph=True)``: the same bits as eager calls, verbs in their order."""

from __future__ import annotations

import pytest
import torch

from replayssm import Conv, ReplayCache, Rows, conv_step, step
from replayssm.inputs import Inputs
from support.makers import generator, layout_of, put, random_inputs, random_state
from support.poison import same


@pytest.mark.parametrize("name", ["mamba2", "mamba2-limited", "gdn-negative", "kda-bounded", "linear"])
def test_a_model_step_in_one_graph(name: str) -> None:
    device = "cpu"
    layout = layout_of(name, torch.float32, window=5, max_draft=2, head_dim=16, state_dim=16, conv=Conv(6))
    source = generator(3)
    state, tail = random_state(layout, 3, source).to(device), torch.zeros(3, 6, 3, device=device)
    caches = [ReplayCache.allocate(layout, 2, 3, device) for _ in range(2)]
    for cache in caches:
        for layer in range(2):
            cache.load(layer, [0, 1, 2], state)
            cache.load_conv(layer, [0, 1, 2], tail)
    taps = torch.randn(6, 4, generator=source).to(device)

    def model_step(
        cache: ReplayCache, inputs: list[Inputs], x: torch.Tensor, rows: Rows, taken: torch.Tensor
    ) -> list[torch.Tensor]:
        outs = []
        for layer in range(2):
            outs.append(conv_step(cache[layer], x, taps, None, rows))
            outs.append(step(cache[layer], inputs[layer], rows) * 2)
        cache.commit(rows, taken)
        return outs

    fast = torch.compile(model_step, fullgraph=True, backend="aot_eager")
    rows = Rows.draft(torch.tensor([2, 0], dtype=torch.int32, device=device), torch.tensor([2, 1], device=device))
    for _ in range(6):
        inputs = [put(random_inputs(name, layout, 3, source), device) for _ in range(2)]
        x, taken = torch.randn(3, 6, generator=source).to(device), torch.tensor([1, 1], device=device)
        eager, compiled = model_step(caches[0], inputs, x, rows, taken), fast(caches[1], inputs, x, rows, taken)
        assert all(same(a, b) for a, b in zip(eager, compiled, strict=True))
    assert caches[1].length.tolist() == caches[0].length.tolist()
    assert caches[1].folds.tolist() == caches[0].folds.tolist()
    assert same(caches[0].materialise(0, [0, 1, 2]), caches[1].materialise(0, [0, 1, 2]))
