"""Published kernels beside the conventional step, where their packages are importable.

One decode token a row on a float32 state, through the packages' documented functions. Gates that a function does not
compute itself are computed beforehand and not timed, which favours the peer; its output is compared first.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from replayssm.bench.cases import Case, random_inputs
from replayssm.bench.conventional import make_step, plain
from replayssm.bench.timing import Setup, free, prepare
from replayssm.inputs import GdnInputs, Inputs, KdaInputs, Mamba2Inputs
from replayssm.layout import GDN, KDA, MAMBA2, Layout, Recurrence

# Largest relative error of a peer's output against ours: bfloat16 outputs, fast exponentials.
TOLERANCE = 2e-2


@dataclass(frozen=True)
class Peer:
    """A published kernel.

    Attributes:
        name: what tables call it.
        recurrence: that it computes.
        module: where it is imported from.
        build: from the module, a layer's state [R, H, P, K], inputs and layout, makes the step: returns [R, H, P].
    """

    name: str
    recurrence: Recurrence
    module: str
    build: Callable[[Any, Tensor, Any, Layout], Callable[[], Tensor]]


def _delta(function: Callable[..., Any], state: Tensor, inputs: Inputs, layout: Layout) -> Callable[[], Tensor]:
    """One of fla's delta rules: states [R, H, K, P] out of place, one token of [R, 1, …], decay and β given."""
    low = inputs.lower(layout)
    assert isinstance(inputs, GdnInputs | KdaInputs)
    assert low.g is not None
    first = state.transpose(-1, -2).contiguous()
    q, k, v = (t[:, None].contiguous() for t in (inputs.q, inputs.k, inputs.v))
    g, beta = low.g[:, None].contiguous(), low.beta[:, None].contiguous()
    options = {"initial_state": first, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return lambda: function(q, k, v, g=g, beta=beta, **options)[0][:, 0]


def _gdn(module: Any, state: Tensor, inputs: GdnInputs, layout: Layout) -> Callable[[], Tensor]:
    return _delta(module.fused_recurrent_gated_delta_rule, state, inputs, layout)


def _kda(module: Any, state: Tensor, inputs: KdaInputs, layout: Layout) -> Callable[[], Tensor]:
    return _delta(module.fused_recurrent_kda, state, inputs, layout)


def _mamba2(module: Any, state: Tensor, inputs: Mamba2Inputs, layout: Layout) -> Callable[[], Tensor]:
    """FlashInfer's update in place, with numbers per head widened without a copy, as it takes them for Mamba-2."""
    heads, width, columns = layout.state_shape
    assert inputs.dt_bias is not None
    A = inputs.A.float()[:, None, None].expand(heads, width, columns)
    bias = inputs.dt_bias.to(layout.dtype)[:, None].expand(heads, width)
    dt = inputs.dt.to(layout.dtype)[:, :, None].expand(-1, heads, width)
    D = torch.zeros(heads, dtype=layout.dtype, device=state.device)[:, None].expand(heads, width)
    slots = torch.arange(len(state), dtype=torch.int32, device=state.device)
    options = {"dt_bias": bias, "dt_softplus": True, "state_batch_indices": slots}
    return lambda: module.selective_state_update(state, inputs.x, dt, A, inputs.B, inputs.C, D, **options)


PEERS = (
    Peer("fla fused_recurrent_gated_delta_rule", GDN, "fla.ops.gated_delta_rule", _gdn),
    Peer("fla fused_recurrent_kda", KDA, "fla.ops.kda", _kda),
    Peer("FlashInfer selective_state_update", MAMBA2, "flashinfer.mamba", _mamba2),
)


def missing() -> dict[str, str]:
    """Peers that cannot be imported here, with the reason."""
    found = {}
    for peer in PEERS:
        try:
            importlib.import_module(peer.module)
        except Exception as problem:  # packages fail in many ways where a driver or a compiler is missing
            found[peer.name] = f"{type(problem).__name__}: {problem}"
    return found


def measure(case: Case, setup: Setup, note: Callable[[str], None]) -> dict[str, float]:
    """Milliseconds a layer of each importable peer of a case's recurrence; plain decode only.

    A peer that fails, or whose output is not ours, is noted and left out.
    """
    found: dict[str, float] = {}
    absent = missing()
    for peer in PEERS:
        if case.draft > 1 or peer.recurrence != case.layout.recurrence or peer.name in absent:
            continue
        try:
            found[peer.name] = _time(peer, case, setup)
        except Exception as problem:
            note(f"{peer.name}: {type(problem).__name__} {str(problem)[:200]}")
        free()
    return found


def _time(peer: Peer, case: Case, setup: Setup) -> float:
    layout, module = plain(case.layout), importlib.import_module(peer.module)
    inputs: Any = random_inputs(layout, case.batch, setup.device)
    layers = setup.layers(layout.tensors["checkpoint"].nbytes * case.batch)
    states = torch.randn((layers, case.batch, *layout.state_shape), device=setup.device)
    error = difference(peer, module, states[0].clone(), inputs, layout)
    if not error < TOLERANCE:
        raise ValueError(f"its output differs from the recurrence by {error:.1e}")
    steps = [peer.build(module, state, inputs, layout) for state in states]
    times = prepare(lambda: [step() for step in steps], setup.device)
    return statistics.median(times(setup.repetitions(times(1)[0]))) / layers


def difference(peer: Peer, module: Any, state: Tensor, inputs: Any, layout: Layout) -> float:
    """Relative error of a peer's output against the conventional step's in float64."""
    want = make_step(layout, len(state), state.device.type, torch.float64)(state.double(), inputs)
    got = peer.build(module, state, inputs, layout)().double()
    return float((got.reshape(want.shape) - want).norm() / want.norm())
