"""One row's attention against a plain loop: chains, trees, windows, shared key heads."""

import pytest
import torch

from replayssm import ReplayError
from replayssm.engine.attention import KeyValues, Span, attend


def naive(query, keys, values, span, window, scaling):
    """Token by token: which tokens it sees, softmax, sum."""
    heads, count = query.shape[1], span.count
    parents = span.parents or list(range(-1, count - 1))
    out = torch.zeros(1, heads, count, values.shape[3])
    for token in range(count):
        path, at = [], token
        while at >= 0:
            path.append(span.length + at)
            at = parents[at]
        seen = [*range(span.length), *reversed(path)]
        seen = seen[-window:] if window else seen
        for head in range(heads):
            group = head // (heads // keys.shape[1])
            weights = (keys[0, group, seen] @ query[0, head, token] * scaling).softmax(0)
            out[0, head, token] = weights @ values[0, group, seen]
    return out


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("length", [0, 7])
@pytest.mark.parametrize("parents", [[-1], None, [-1, 0, 0, 1, 1, 3]])
def test_attention(parents, length, window):
    torch.manual_seed(0)
    count = 5 if parents is None else len(parents)
    query, keys = torch.randn(1, 6, count, 8), torch.randn(1, 2, length + count, 8)
    values, span = torch.randn(1, 2, length + count, 4), Span(0, 0, count, length, parents)
    got = attend(query, keys, values, span, scaling=0.3, sliding_window=window)
    torch.testing.assert_close(got, naive(query, keys, values, span, window, 0.3))


def test_options_that_change_the_scores_are_refused():
    one = torch.zeros(1, 1, 1, 2)
    with pytest.raises(ReplayError, match="softcap is not supported"):
        attend(one, one, one, Span(0, 0, 1, 0), softcap=30.0, dropout=0.0)


def test_keys_and_values_of_slots():
    store = KeyValues({3: (2, 4, 5)}, frozenset(), 3, 8, torch.float32, torch.device("cpu"))
    assert store.bytes == 3 * 8 * 2 * (4 + 5) * 4
    for tensor in store.layers[3]:
        tensor.fill_(torch.nan)
    spans = [Span(2, 0, 2, 0), Span(0, 2, 5, 1, [-1, 0, 0])]
    keys, values = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 5)
    store.write(3, keys, values, spans)
    assert torch.equal(store.of(3, spans[0])[0], keys[:, :, :2])
    assert torch.equal(store.layers[3][1][0, :, 1:4], values[0, :, 2:])
    store.keep(spans[1], [0, 2])
    assert torch.equal(store.layers[3][0][0, :, 1:3], keys[0, :, [2, 4]])
    store.copy(2, 1, 2)
    assert torch.equal(store.layers[3][1][1, :, :2], values[0, :, :2])
    assert store.layers[3][0][1, :, 2:].isnan().all()
    assert store.gather(3, [spans[0], Span(1, 0, 1, 1)])[0].shape == (1, 2, 4, 4)
    assert spans[1].depths() == [0, 1, 1]
