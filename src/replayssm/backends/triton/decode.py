"""The step for one token a row: a reading of the state and little else.

Same arithmetic as ``step``, arranged for speed. What a program's heads share, and all that depends on the heads alone
(q and k, the scores and decays of the entries), is computed once; then only rows of the state and of the entries'
values go by. Sums over them are in ``reading``.
"""

# The language of kernels is no Python: a type checker sees constexpr records and tensors as other things.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from replayssm.backends.triton.formats import row_scales, store_written
from replayssm.backends.triton.gates import channel_gates, fall, gate_inputs, head_gates, load_or, unit_scales
from replayssm.backends.triton.reading import (
    factors_of,
    fetch_entries,
    fetch_tile,
    probes_of,
    scores_of,
    sums_of_entries,
    sums_of_state,
)
from replayssm.backends.triton.step import BAD_SLOT, admit, clear, report


@triton.jit
def scores_by_channel(
    key, past, inputs, strides, q, k, e, known, token, live, head, columns, low, high, S: tl.constexpr
):  # fmt: skip
    """Where each channel has its decay: raw scores of the entries' keys with q and k [BE] each, and q, k [KP] as probes
    of the checkpoint. The new token's decay is appended too.

    Entries are taken sixteen at once as far as there are any, and from the last one on, as the compiler adds up from
    the first one on.
    """
    wide = columns < S.K
    g = channel_gates(inputs, strides, token, wide & live, head, columns, low, high, S)
    tl.store(past + known * S.K + columns, g, mask=wide & live)
    near = fall(g, S)
    order = 15 - tl.arange(0, 16)
    score_q, score_k = e * 0.0, e * 0.0
    since = g * 0.0
    for back in tl.static_range(S.BE // 16):
        begin = S.BE - 16 - 16 * back
        # One block goes without being asked for: its loads are not to wait for the count of entries.
        if S.BE == 16 or begin < known:
            place = begin + order
            at = place[:, None] * S.K + columns[None, :]
            keys = tl.load(key + at, mask=(place < known)[:, None] & wide[None, :], other=0.0)
            later = tl.load(past + S.K + at, mask=(place + 1 < known)[:, None] & wide[None, :], other=0.0)
            decayed = keys.to(tl.float32) * fall(tl.cumsum(later, 0) + since[None, :], S)
            since += tl.sum(later, 0)
            found_q, found_k = tl.sum(decayed * (q * near)[None, :], 1), tl.sum(decayed * (k * near)[None, :], 1)
            here = e // 16 * 16 == begin
            score_q = tl.where(here, tl.gather(found_q, 15 - e % 16, 0), score_q)
            score_k = tl.where(here, tl.gather(found_k, 15 - e % 16, 0), score_k)
    far = fall(g + since + tl.load(past + columns, mask=wide & (known > 0), other=0.0), S)
    return score_q, score_k, q * far, k * far


@triton.jit
def decay_of_heads(decay, heads, e, known, S: tl.constexpr):
    """Exponents of the heads' scalar decays: entry -> now [N, BE], checkpoint -> now [N].

    Each is a sum over its own segment: the entries after e are loaded one place further and summed from the end.
    """
    if decay is None:
        return (heads[:, None] + e[None, :]) * 0.0, heads * 0.0
    else:
        at = decay + heads * S.W
        later = tl.load(at[:, None] + e[None, :] + 1, mask=(e + 1 < known)[None, :] & (heads >= 0)[:, None], other=0.0)
        first = tl.load(at, mask=(known > 0) & (heads >= 0), other=0.0)
        return tl.cumsum(later, 1, reverse=True), tl.sum(later, 1) + first


@triton.jit
def for_rows(x, S: tl.constexpr):
    """A number for each head [N] as one for each row of a tile [BP]."""
    return tl.reshape(tl.broadcast_to(x[:, None], [S.N, S.BP // S.N]), [S.BP])


@triton.jit
def fetch(layer, strides, where, v, values, lower, shared, block, known, S: tl.constexpr):
    """What a block needs from memory, loaded: the new token's values, scales, its rows of the state and the entries'
    values. All at once, so that one is not waited for before the other is asked for: the compiler moves the entries'
    values to shared memory as soon as they are there, and what is behind them would be asked for after that.
    """
    DEEP: tl.constexpr = S.BP // S.N
    r = tl.arange(0, S.BP)
    head, p = shared + r // DEEP, block * DEEP + r % DEEP
    inside = p < S.P
    now = tl.load(v + head * S.P + p, mask=inside, other=0.0)
    by_row = row_scales(layer, strides, where, head, head * S.P + p, inside, S)
    tile = fetch_tile(layer, strides, where, head * S.P + p, None if S.P % DEEP == 0 else inside, S)
    entries = fetch_entries(
        values + shared * S.W * S.P, None if lower is None else lower + shared * S.W * S.P, block, known, S
    )
    return tile, now, by_row, entries


@triton.jit(do_not_specialize=["rows", "tokens", "bound", "slots", "each"])
def decode_kernel(
    layer,
    strides,
    inputs,
    token_strides,
    batch,
    out,
    rows,
    tokens,
    bound,
    slots,
    low,
    high,
    each,
    S: tl.constexpr,
):
    """Grid: rows × sets of N heads with one key × chunks of ``each`` blocks of head_dim.

    A tile's BP rows are a block of BP / N rows of each of the N heads. ``each`` is no compile-time number: a result
    must not depend on it.
    """
    W: tl.constexpr = S.W
    T: tl.constexpr = S.T
    K: tl.constexpr = S.K
    N: tl.constexpr = S.N
    KP: tl.constexpr = S.KP
    DEEP: tl.constexpr = S.BP // S.N
    blocks: tl.constexpr = (S.P + DEEP - 1) // DEEP
    chunks = (blocks + each - 1) // each
    pid = tl.program_id(0)
    row = pid // (chunks * (S.H // N))
    shared = (pid // chunks) % (S.H // N) * N
    chunk = pid % chunks
    group = shared // (S.H // S.G)

    slot, start, count, length, code = admit(batch, row, slots, bound, W, T)
    live = (slot >= 0) & (slot < slots) & (code == 0) & (count > 0)
    where = tl.where(live, slot, 0).to(tl.int64)
    token = start.to(tl.int64)
    known = tl.where(live, length, 0)
    value = layer.value + where * strides.value
    written = None if layer.written is None else layer.written + where * strides.written
    lower = None if layer.written_low is None else layer.written_low + where * strides.written_low
    values = value if written is None else written
    from_v = inputs.v + token * token_strides.v
    r = tl.arange(0, S.BP)
    head = shared + r // DEEP
    begin = chunk * each
    end = tl.minimum(begin + each, blocks)
    # In fours, as the compiler sees it: sums over entries stay within a thread.
    columns = tl.arange(0, KP) // 4 * 4 + tl.arange(0, KP) % 4
    wide = columns < K
    at_q, at_k = inputs.q + token * token_strides.q + group * K, inputs.k + token * token_strides.k + group * K
    raw_q = tl.load(at_q + columns, mask=wide & live, other=0.0)
    raw_k = tl.load(at_k + columns, mask=wide & live, other=0.0)
    e = tl.arange(0, S.BE)
    old = e < known
    key = layer.key + where * strides.key + group * W * K
    key_scale = None if layer.key_scale is None else layer.key_scale + where * strides.key_scale + group * W
    channels = None if layer.channels is None else layer.channels + where * strides.channels + shared * W * K
    heads = shared + tl.arange(0, N)
    every = heads >= 0
    decay = None if layer.decay is None else layer.decay + where * strides.decay
    weight = layer.weight + where * strides.weight
    scales = None if layer.written_scale is None else layer.written_scale + where * strides.written_scale
    since, total = decay_of_heads(decay, heads, e, known, S)
    raw = gate_inputs(inputs, token_strides, token, live & every, heads)
    g, beta = head_gates(inputs, raw, live & every, low, high, S)

    q, k = raw_q.to(tl.float32), raw_k.to(tl.float32)
    first_of_chunk = live & (chunk == 0)
    first_of_group = first_of_chunk & (shared % (S.H // S.G) == 0)
    tl.store(key + length * K + columns, raw_k, mask=wide & first_of_group)
    q_scale, k_scale = unit_scales(tl.sum(q * q, 0), tl.sum(k * k, 0), S)
    own = tl.sum(q * k, 0) * q_scale * k_scale
    if layer.channels is None:
        score_q, score_k = scores_of(key, at_q, at_k, e, known, live, S)
        far_q, far_k = q, k
    else:
        score_q, score_k, far_q, far_k = scores_by_channel(
            key, channels, inputs, token_strides, q, k, e, known, token, live, shared, columns, low, high, S
        )
    old_scale = load_or(key_scale, e, old, 1.0)
    score_q, score_k = score_q * (old_scale * q_scale), score_k * (old_scale * k_scale)
    # What an entry's value, or written value, is multiplied by.
    entry = heads[:, None] * W + e[None, :]
    reach = tl.where(old[None, :], tl.exp(since + g[:, None]), 0.0)
    if written is None:
        reach *= tl.load(weight + entry, mask=old[None, :] & every[:, None], other=0.0)
    else:
        reach *= load_or(scales, entry, old[None, :] & every[:, None], 1.0)
    factors = factors_of(reach * score_q[None, :], reach * score_k[None, :], values.dtype.element_ty, S)
    probes, back_q, back_k = probes_of(far_q, far_k, S)
    far = tl.exp(total + g)
    far_q, far_k = for_rows(far * (q_scale * back_q), S), for_rows(far * (k_scale * back_k), S)
    beta_of_row = for_rows(beta, S)

    tl.store(weight + heads * W + length, beta, mask=first_of_chunk & every)
    if decay is not None:
        tl.store(decay + heads * W + length, g, mask=first_of_chunk & every)
    if key_scale is not None:
        tl.store(key_scale + length, k_scale, mask=first_of_group)
    if first_of_chunk & (shared == 0):
        tl.store(batch.drafts + slot, count)

    for block in tl.range(begin, tl.where(live, end, begin), num_stages=S.stages):
        tile, v, by_row, entries = fetch(layer, strides, where, from_v, values, lower, shared, block, known, S)
        p = block * DEEP + r % DEEP
        inside = p < S.P
        past_q, past_k = sums_of_entries(entries, factors, S)
        sums_q, sums_k = sums_of_state(tile, probes, S)
        result = sums_q * (far_q * by_row) + past_q
        u = v.to(tl.float32)
        if S.update == "delta":
            u -= sums_k * (far_k * by_row) + past_k
        u *= beta_of_row
        result += own * u
        tl.store(out + token * S.H * S.P + head * S.P + p, result.to(out.dtype.element_ty), mask=inside)
        now = (head * W + length) * S.P + p
        tl.store(value + now, v, mask=inside)
        if written is not None:
            scale_now = None if scales is None else scales + shared * W + length
            store_written(
                written, lower, scale_now, tl.full([1, 1], 0, tl.int32), now[None, :], u[None, :], inside[None, :], S
            )

    # Outputs that nobody computes are zero.
    if (live == 0) | (row == rows - 1):
        for block in range(begin, end):
            p = block * DEEP + r % DEEP
            if row == rows - 1:
                clear(out, tl.maximum(start + count, 0), tokens, head, p, S)
            if live == 0:
                clear(out, tl.maximum(start, 0), tl.minimum(start + count, tokens), head, p, S)
        if (code != 0) & (shared == 0) & (chunk == 0):
            report(batch.error, code, row, tl.where(code == BAD_SLOT, slot, count))
