"""The training forms against the stock functions and the oracle, forward and backward."""

import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[2] / "training"))

from transformers.models.kimi_linear import modeling_kimi_linear  # noqa: E402
from transformers.models.nemotron_h import modeling_nemotron_h  # noqa: E402
from transformers.models.qwen3_5 import modeling_qwen3_5  # noqa: E402

import fast_paths  # noqa: E402
from replayssm import GDN, KDA, MAMBA2, Layout, LinearInputs, Mamba2Inputs, reference  # noqa: E402

LENGTH = 200  # three chunks and a part of one


def differentiate(function, tensors, dtype=torch.float32):
    """Output and all gradients of a weighted sum of it."""
    inputs = [t.detach().to(dtype, copy=True).requires_grad_() for t in tensors]
    out = function(*inputs)
    generator = torch.Generator().manual_seed(1)
    (out * torch.randn(out.shape, generator=generator)).sum().backward()
    return [out.detach(), *(t.grad for t in inputs)]


def assert_same(found, expected, tolerance):
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= tolerance * other.abs().max()


def delta_inputs(channels, strength, groups=2, heads=4):
    """q, k, v, g, β of two texts; many equal keys, which are the hard case for the inverse."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, LENGTH, n, w) for n, w in ((groups, 16), (groups, 16), (heads, 32)))
    k[:, 5:90] = k[:, 5:6]
    g = -strength * torch.rand(2, LENGTH, heads, *channels) ** 4
    return [q, k, v, g, torch.rand(2, LENGTH, heads)]


def gdn(function):
    def call(q, k, v, g, beta):
        q, k = (x.repeat_interleave(2, dim=2) for x in (q, k))  # what every stock version accepts
        return function(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]

    return call


def kda(function):
    return lambda q, k, v, g, beta: function(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]


def mamba2(function):
    options = {"dt_softplus": True, "dt_limit": (0.01, float("inf")), "chunk_size": 32}
    return lambda x, dt, A, B, C, D, bias: function(x, dt, A, B, C, D=D, dt_bias=bias, **options)


def mamba2_inputs():
    torch.manual_seed(0)
    x, dt = torch.randn(2, LENGTH, 6, 16), torch.randn(2, LENGTH, 6) - 1
    B, C = torch.randn(2, 2, LENGTH, 2, 32)
    return [x, dt, -torch.arange(1.0, 7.0), B, C, torch.randn(6), torch.randn(6)]


def oracle(recurrence, tokens, **options):
    """A function of the batch, row by row through the token loop in float64."""

    def call(*inputs):
        outs = []
        for row in range(2):
            one = tokens(*(t[row] if t.ndim > 2 else t for t in inputs))
            layout = Layout(recurrence, dtype=torch.float32, **options)
            state = torch.zeros(layout.state_shape, dtype=torch.float64)
            outs.append(reference.token_loop(layout, one, state)[0])
        return torch.stack(outs)

    return call


def exact_delta(recurrence):
    sizes = {"heads": 4, "groups": 4, "head_dim": 32, "state_dim": 16}
    return oracle(recurrence, lambda *tokens: LinearInputs(*tokens, unit=True), **sizes)


def test_gated_delta_rule():
    tensors, ours = delta_inputs((), 0.1), gdn(fast_paths.chunk_gated_delta_rule)
    expected = differentiate(gdn(modeling_qwen3_5.torch_chunk_gated_delta_rule), tensors)
    assert_same(differentiate(ours, tensors), expected, 1e-4)
    truth = exact_delta(GDN)
    exact = differentiate(gdn(lambda q, k, v, g, beta, **_: (truth(q, k, v, g, beta),)), tensors, torch.float64)
    assert_same(differentiate(ours, tensors, torch.float64), exact, 1e-9)


# Within a chunk the strongest decay is exp(-4000): factors of exp(total) and exp(-total) would be 0 · ∞
@pytest.mark.parametrize("strength", [0.1, 2.0, 300.0])
def test_kimi_delta_attention(strength):
    tensors = delta_inputs((16,), strength, groups=4)
    expected = differentiate(kda(modeling_kimi_linear.chunk_kimi_delta_attention), tensors)
    found = differentiate(kda(fast_paths.chunk_kimi_delta_attention), tensors)
    assert_same(found, expected, 1e-4)
    exact = differentiate(exact_delta(KDA), tensors, torch.float64)
    assert_same(found, exact, 1e-4)
    assert_same(differentiate(kda(fast_paths.chunk_kimi_delta_attention), tensors, torch.float64), exact, 1e-9)


def test_mamba2():
    tensors = mamba2_inputs()
    expected = differentiate(mamba2(modeling_nemotron_h.mamba2_chunk_scan), tensors)
    found = differentiate(mamba2(fast_paths.mamba2_chunk_scan), tensors)
    assert_same(found, expected, 1e-4)
    limit, sizes = (0.01, float("inf")), {"heads": 6, "groups": 2, "head_dim": 16, "state_dim": 32}
    scan = oracle(MAMBA2, lambda x, dt, A, B, C, bias: Mamba2Inputs(x, dt, B, C, A, bias, limit), **sizes)

    def whole(x, dt, A, B, C, D, bias):
        return scan(x, dt, A, B, C, bias) + D[:, None] * x

    exact = differentiate(whole, tensors, torch.float64)
    assert_same(differentiate(mamba2(fast_paths.mamba2_chunk_scan), tensors, torch.float64), exact, 1e-9)


def test_states_are_refused():
    q, k, v, g, beta = delta_inputs((16,), 1.0, groups=4)
    with pytest.raises(ValueError, match="take and return no state"):
        fast_paths.chunk_kimi_delta_attention(q, k, v, g, beta, output_final_state=True)
    x, dt, A, B, C, *_ = mamba2_inputs()
    with pytest.raises(ValueError, match="take and return no state"):
        fast_paths.mamba2_chunk_scan(x, dt, A, B, C, initial_states=torch.zeros(2, 6, 16, 32))


def test_installed_for_a_while():
    stock = modeling_kimi_linear.chunk_kimi_delta_attention
    model = modeling_kimi_linear.KimiLinearModel.__new__(modeling_kimi_linear.KimiLinearModel)
    with fast_paths.installed(model) as names:
        assert names == ["causal_conv1d_fn", "chunk_kimi_delta_attention"]
        assert modeling_kimi_linear.chunk_kimi_delta_attention is fast_paths.chunk_kimi_delta_attention
    assert modeling_kimi_linear.chunk_kimi_delta_attention is stock


def test_shifted_convolution_is_the_stock_convolution():
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 6, 11), torch.randn(6, 4), torch.randn(6)
    for activation in ("silu", None):
        expected = modeling_qwen3_5.causal_conv1d_fn(x, weight, bias, activation=activation)
        torch.testing.assert_close(fast_paths.causal_conv1d(x, weight, bias, activation), expected)
