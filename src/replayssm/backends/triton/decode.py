"""The step for one token a row, without tensor cores: a reading of the state and little else.

Same arithmetic as ``step``, arranged for speed: everything that needs no other load first is loaded at the start, the
state above all, in C tiles [BP, BK] whose products are added up in registers and summed across threads only once. On
an H200 the tiles of ``step`` with BT = 1 took 0.43 … 1.07 ms where this reads at the memory's speed (2026-11-29).
"""

# The language of kernels is no Python: a type checker sees constexpr records and tensors as other things.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from replayssm.backends.triton.formats import columns_of, planes, read_state, row_scales, store_written
from replayssm.backends.triton.gates import channel_gates, head_gates, load_or, unit_scales
from replayssm.backends.triton.step import BAD_SLOT, admit, clear, decay_of_entries, report
from replayssm.backends.triton.tile import write


@triton.jit
def load_entries(base, e, mask, width: tl.constexpr, S: tl.constexpr):
    """Rows of a [·, K] array as C tiles [BE, BK] of columns; ``width`` is K."""
    parts = ()
    C: tl.constexpr = S.C
    for part in tl.static_range(C):
        columns = columns_of(part, S)
        at = base + e[:, None] * width + columns[None, :]
        parts = parts + (tl.load(at, mask=mask[:, None] & (columns < width)[None, :], other=0.0),)
    return parts


@triton.jit
def channel_decay(
    past, later, inputs, strides, keys, q, k, length, token, live, head, columns, low, high, S: tl.constexpr
):
    """A tile of keys [BE, BK] decayed to now, and of q, k [1, BK] as probes of the checkpoint and of the entries.

    Where the decay is per channel, the new token's is appended too; ``later`` are the entries' decays, one place on.
    """
    if past is None:
        return keys, q, k, q, k
    else:
        wide = (columns < S.K)[None, :]
        first = tl.load(past + columns[None, :], mask=wide & (length > 0), other=0.0)
        g = channel_gates(inputs, strides, token, wide & live, head, columns[None, :], low, high, S)
        tl.store(past + length * S.K + columns[None, :], g, mask=wide & live)
        total = tl.sum(later, 0)[None, :] + first
        decayed = keys * tl.exp(tl.cumsum(later, 0, reverse=True))
        near, far = tl.exp(g), tl.exp(g + total)
        return decayed, q * far, k * far, q * near, k * near


@triton.jit
def read_entries(values, low, weights_q, weights_k, e, old, p, inside, S: tl.constexpr):
    """Σ_j weight_j u_j over the entries, for both weights [BE]: [BP] each.

    The orientation of the tile decides how many lanes a sum crosses; which is best depends on the width of u. ``low``
    is the second tensor of split values.
    """
    if values.dtype.element_ty.primitive_bitwidth == 16:
        mask = old[:, None] & inside[None, :]
        u = tl.load(values + e[:, None] * S.P + p[None, :], mask=mask, other=0.0).to(tl.float32)
        if low is not None:
            u += tl.load(low + e[:, None] * S.P + p[None, :], mask=mask, other=0.0).to(tl.float32)
        return tl.sum(weights_q[:, None] * u, 0), tl.sum(weights_k[:, None] * u, 0)
    else:
        mask = old[None, :] & inside[:, None]
        u = tl.load(values + e[None, :] * S.P + p[:, None], mask=mask, other=0.0)
        return tl.sum(weights_q[None, :] * u, 1), tl.sum(weights_k[None, :] * u, 1)


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
    """Grid: rows × sets of heads with one key and one decay of it × chunks of ``each`` tiles of head_dim.

    What a set shares (q, k, the scores of the entries' keys) is computed once; then its tiles go by, the next one's
    state on its way while this one's is summed. ``each`` is no compile-time number: a result must not depend on it.
    """
    W: tl.constexpr = S.W
    T: tl.constexpr = S.T
    K: tl.constexpr = S.K
    C: tl.constexpr = S.C
    BK: tl.constexpr = S.BK
    PLANES: tl.constexpr = planes(S.read)
    tiles: tl.constexpr = (S.P + S.BP - 1) // S.BP
    chunks = (S.share * tiles + each - 1) // each
    pid = tl.program_id(0)
    row = pid // (chunks * (S.H // S.share))
    shared = (pid // chunks) % (S.H // S.share) * S.share
    chunk = pid % chunks
    group = shared // (S.H // S.G)

    slot, start, count, length, code = admit(batch, row, slots, bound, W, T)
    live = (slot >= 0) & (slot < slots) & (code == 0) & (count > 0)
    where = slot.to(tl.int64)
    token = start.to(tl.int64)
    known = tl.where(live, length, 0)
    mine = tl.full([1], 0, tl.int32)
    raw_q = load_entries(inputs.q + token * token_strides.q + group * S.K, mine, (mine == 0) & live, K, S)
    raw_k = load_entries(inputs.k + token * token_strides.k + group * S.K, mine, (mine == 0) & live, K, S)
    e = tl.arange(0, S.BE)
    old = e < known
    key = layer.key + where * strides.key + group * S.W * S.K
    channels = None if layer.channels is None else layer.channels + where * strides.channels + shared * S.W * S.K
    key_scale = None if layer.key_scale is None else layer.key_scale + where * strides.key_scale + group * S.W
    keys = load_entries(key, e, old, K, S)
    if channels is not None:
        later = load_entries(channels + S.K, e, e + 1 < known, K, S)
    else:
        later = keys
    near_q, near_k = tl.full([S.BE, S.BK], 0.0, tl.float32), tl.full([S.BE, S.BK], 0.0, tl.float32)
    qq = tl.full([1, S.BK], 0.0, tl.float32)
    kk, qk = qq, qq
    probes_q, probes_k = (), ()
    for part in tl.static_range(C):
        columns = columns_of(part, S)
        q, k = raw_q[part].to(tl.float32), raw_k[part].to(tl.float32)
        qq += q * q
        kk += k * k
        qk += q * k
        keys_now, far_q, far_k, probe_q, probe_k = channel_decay(
            channels, later[part], inputs, token_strides, keys[part].to(tl.float32), q, k, known, token, live, shared,
            columns, low, high, S,
        )  # fmt: skip
        near_q += keys_now * probe_q
        near_k += keys_now * probe_k
        probes_q = probes_q + (far_q,)
        probes_k = probes_k + (far_k,)
        first_of_group = live & (chunk == 0) & (shared % (S.H // S.G) == 0)
        tl.store(key + length * S.K + columns[None, :], raw_k[part], mask=(columns < S.K)[None, :] & first_of_group)
    q_scale, k_scale = unit_scales(tl.sum(tl.sum(qq, 1), 0), tl.sum(tl.sum(kk, 1), 0), S)
    own = tl.sum(tl.sum(qk, 1), 0) * q_scale * k_scale
    old_scale = load_or(key_scale, e, old, 1.0)
    score_q = tl.sum(near_q, 1) * old_scale
    score_k = tl.sum(near_k, 1) * old_scale
    if key_scale is not None:
        tl.store(key_scale + length, k_scale, mask=first_of_group)

    # The gates of all the set's heads at once: in the loop they would be waited for.
    heads = shared + tl.arange(0, S.lanes)
    gates_g, gates_beta = head_gates(
        inputs, token_strides, token, live & (heads < shared + S.share), heads, low, high, S
    )
    for item in tl.range(chunk * each, tl.minimum(chunk * each + each, S.share * tiles), num_stages=S.stages):
        head = shared + item // tiles
        tile = item % tiles
        p = tile * S.BP + tl.arange(0, S.BP)
        inside = p < S.P
        first = head * S.P + tile * S.BP
        entries = head * S.W
        value = layer.value + where * strides.value + entries * S.P
        weight = layer.weight + where * strides.weight + entries
        decay = None if layer.decay is None else layer.decay + where * strides.decay + entries
        written = None if layer.written is None else layer.written + where * strides.written + entries * S.P
        lower = None if layer.written_low is None else layer.written_low + where * strides.written_low + entries * S.P
        scales = None if layer.written_scale is None else layer.written_scale + where * strides.written_scale + entries
        by_row = row_scales(layer, strides, where, head, first, inside & live, S)
        v = tl.load(inputs.v + token * token_strides.v + head * S.P + p, mask=inside & live, other=0.0)
        g = tl.sum(tl.where(heads == head, gates_g, 0.0), 0)
        beta = tl.sum(tl.where(heads == head, gates_beta, 0.0), 0)
        since, total = decay_of_entries(decay, e, known)
        reach = tl.where(old, tl.exp(since + g), 0.0)
        if written is None:
            reach *= tl.load(weight + e, mask=old, other=0.0)
            past_q, past_k = read_entries(value, None, score_q * reach, score_k * reach, e, old, p, inside, S)
        else:
            reach *= load_or(scales, e, old, 1.0)
            past_q, past_k = read_entries(written, lower, score_q * reach, score_k * reach, e, old, p, inside, S)
        # Loaded ahead by the pipeline; taken where they are needed, so that few registers hold them.
        sums_q, sums_k = tl.full([S.BP, S.BK], 0.0, tl.float32), tl.full([S.BP, S.BK], 0.0, tl.float32)
        for part in tl.static_range(C // PLANES):
            found = read_state(layer, strides, where, first, inside & live, part, BK, S)
            for plane in tl.static_range(PLANES):
                s = found[plane].to(tl.float32)
                sums_q += s * probes_q[part + plane * (C // PLANES)]
                sums_k += s * probes_k[part + plane * (C // PLANES)]
        far = tl.exp(total + g) * by_row
        seen_q = (tl.sum(sums_q, 1) * far + past_q) * q_scale
        seen_k = (tl.sum(sums_k, 1) * far + past_k) * k_scale
        nothing = tl.full([1, 1], 0.0, tl.float32)
        weights = tl.full([1], 1.0, tl.float32) * beta
        u = tl.reshape(write(v.to(tl.float32)[None, :], weights, seen_k[None, :], nothing, T, S), [S.BP])
        result = seen_q + own * u
        tl.store(out + (token * S.H + head) * S.P + p, result.to(out.dtype.element_ty), mask=inside & live)
        tl.store(value + length * S.P + p, v, mask=inside & live)
        if written is not None:
            here = (inside & live)[None, :]
            store_written(written, lower, scales, length + mine[:, None], p[None, :], u[None, :], here, S)
        tl.store(weight + length, beta, mask=live & (tile == 0))
        if decay is not None:
            tl.store(decay + length, g, mask=live & (tile == 0))

    if live & (shared == 0) & (chunk == 0):
        tl.store(batch.drafts + slot, count)
    # Outputs that nobody computes are zero.
    if (live == 0) | (row == rows - 1):
        for item in range(chunk * each, tl.minimum(chunk * each + each, S.share * tiles)):
            head = shared + item // tiles
            p = item % tiles * S.BP + tl.arange(0, S.BP)
            if row == rows - 1:
                clear(out, tl.maximum(start + count, 0), tokens, head, p, S)
            if live == 0:
                clear(out, tl.maximum(start, 0), tl.minimum(start + count, tokens), head, p, S)
        if (code != 0) & (shared == 0) & (chunk == 0):
            report(batch.error, code, row, tl.where(code == BAD_SLOT, slot, count))
