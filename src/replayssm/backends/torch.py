"""The closed form in torch, for the CPU and any device (docs: mathematics).

Everything works on R rows at once, ragged rows padded with inert tokens. Letters: R rows, H heads, G groups,
P head_dim, K state_dim, E buffer entries, T new tokens, n probes of the state.

Every exponent is a sum of log-decays over its own segment, never a difference of prefix sums: with strongly decaying
heads such differences lose most of their digits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from replayssm import precision
from replayssm.inputs import Inputs, Lowered
from replayssm.layout import Layout

# Rows are folded in pieces of about this many bytes, which stay in a core's cache between reading and writing.
_PIECE_BYTES = 512 << 10
# Entries that the fold takes at once: its pairwise terms grow with the square, its passes over the state fall linearly.
_BLOCK = 16
name = "torch"


class Batch(NamedTuple):
    """The rows of one step that bring tokens.

    Attributes:
        slots: [R] int64.
        length: [R] int64, committed entries.
        tokens: [R, T] int64, each token's place among the inputs; padding repeats place 0.
        valid: [R, T] bool, False for padding; None where every row brings T tokens.
        parents: [R, T] int64, row-local, −1 the root; None for chains.
        entries: as many as are read, at least the largest of ``length``.
    """

    slots: Tensor
    length: Tensor
    tokens: Tensor
    valid: Tensor | None
    parents: Tensor | None
    entries: int


class Entries(NamedTuple):
    """Tokens in the letters of the recurrence, head-major and wide: buffer entries, or new tokens.

    Attributes:
        k: [R, G, E, K] with the key's scale applied.
        v: [R, H, E, P].
        g: [R, H, E] or [R, H, E, K].
        beta: [R, H, E].
    """

    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def step(layer: dict[str, Tensor], layout: Layout, inputs: Inputs, batch: Batch) -> Tensor:
    """Outputs of the batch's tokens; appends them to the buffer as uncommitted entries.

    Args:
        layer: the layer's tensors, as ``Layout.tensors`` names them.
        layout: of the cache.
        inputs: N tokens, checked.
        batch: which rows bring which of them.

    Returns:
        [N, H, P] in the activation dtype; zero where no row brings the token.
    """
    lowered = inputs.lower(layout)
    out, u = _outputs(layout, layer, lowered, batch)
    _append(layer, layout, lowered, batch, u)
    result = out.new_zeros((lowered.v.shape[0], layout.heads, layout.head_dim), dtype=layout.dtype)
    flat = out.transpose(1, 2).to(layout.dtype)
    if batch.valid is None:
        result[batch.tokens.flatten()] = flat.flatten(0, 1)
    else:
        result[batch.tokens[batch.valid]] = flat[batch.valid]
    return result


def advance(layer: dict[str, Tensor], layout: Layout, slots: Tensor, length: Tensor) -> Tensor:
    """The states after the committed entries, recomputed from the checkpoints and the raw inputs.

    Args:
        layer: the layer's tensors.
        layout: of the cache.
        slots: [R] int64.
        length: [R] int64 committed entries.

    Returns:
        A new tensor [R, H, P, K], wide.
    """
    out = torch.empty((len(slots), *layout.state_shape), dtype=layout.wide, device=slots.device)
    for rows, heads in _pieces(layout, len(slots)):
        out[rows, heads] = _advanced(layer, layout, slots[rows], length[rows], heads)
    return out


def folds_in_place(layout: Layout) -> bool:
    """Whether ``fold_in_place`` covers a layout: here, a wide checkpoint without a read copy."""
    return layout.precision.checkpoint == layout.wide and layout.precision.read_copy is None


def fold_in_place(
    layer: dict[str, Tensor], layout: Layout, slots: Tensor, length: Tensor, keys: Tensor | None = None
) -> None:
    """Write the states after the committed entries into the checkpoints. Arguments as ``advance``."""
    for rows, heads in _pieces(layout, len(slots)):
        state = _advanced(layer, layout, slots[rows], length[rows], heads)
        if len(state) == 1:  # a slice is written faster than an index
            layer["checkpoint"][int(slots[rows][0]), heads] = state[0]
        else:
            layer["checkpoint"][slots[rows], heads] = state


def _advanced(layer: dict[str, Tensor], layout: Layout, slots: Tensor, length: Tensor, heads: slice) -> Tensor:
    """``advance`` for a slice of heads, from the first of a group on to the last of one."""
    state = _state("checkpoint", layer, layout, slots, heads)
    if layout.precision.checkpoint == layout.wide:
        state = state.clone()  # maybe a view; other formats are decoded into new memory
    longest = int(length.max()) if len(length) else 0
    whole = _gather_entries(layer, layout, slots, length, longest, heads)
    for start in range(0, longest, _BLOCK):
        block = Entries(*(x[:, :, start : start + _BLOCK] for x in whole))
        _advance_block(state, layout, block)
    return state


def _pieces(layout: Layout, rows: int) -> list[tuple[slice, slice]]:
    """Cut R rows of H heads into slices of rows and of heads whose states stay in a core's cache."""
    head_bytes = layout.head_dim * layout.state_dim * layout.wide.itemsize
    repeat = layout.heads // layout.groups
    together = max(1, _PIECE_BYTES // (head_bytes * layout.heads))
    heads = min(layout.heads, max(1, _PIECE_BYTES // (head_bytes * repeat)) * repeat)
    return [
        (slice(row, min(row + together, rows)), slice(head, min(head + heads, layout.heads)))
        for row in range(0, rows, together)
        for head in range(0, layout.heads, heads)
    ]


def _part(tensor: Tensor, slots: Tensor, heads: slice) -> Tensor:
    """``tensor[slots, heads]``; of a single slot a view, which spares a copy."""
    return tensor[int(slots[0]), heads][None] if len(slots) == 1 else tensor[slots, heads]


def _state(name: str, layer: dict[str, Tensor], layout: Layout, slots: Tensor, heads: slice) -> Tensor:
    """The states [R, heads, P, K] that a layer holds as "checkpoint" or "read_copy", wide."""
    found = {part: _part(t, slots, heads) for part, t in layer.items() if part.startswith(name)}
    return precision.decode(name, found, layout)


def _outputs(layout: Layout, layer: dict[str, Tensor], lowered: Lowered, batch: Batch) -> tuple[Tensor, Tensor]:
    """Outputs [R, H, T, P] and written values u [R, H, T, P] of the new tokens."""
    delta = layout.recurrence.update == "delta"
    q, new = _gather_tokens(lowered, layout, batch)
    past = _gather_entries(layer, layout, batch.slots, batch.length, batch.entries, slice(0, layout.heads))
    tokens = q.shape[2]
    if delta:
        form = layout.written_format
        parts = {s: layer["written" + s][batch.slots, :, : batch.entries] for s in form.specs(1, 1, 1)}
        u_past = _select(form.decode(parts, layout.head_dim, layout.wide), batch.length, 2)
    else:
        u_past = past.beta[..., None] * past.v
    since = _sums_after(past.g)
    along = _path_sums(new.g, batch.parents)
    probes = torch.cat([q, new.k], 2) if delta else q
    along_n = torch.cat([along, along], 2) if delta else along

    exponent = past.g.sum(2)[:, :, None] + along_n
    seen = _read(layer, layout, batch.slots, probes, exponent)
    seen += _scores(past.k, probes, layout, since, along_n) @ u_past

    u = new.beta[..., None] * (new.v - seen[:, :, tokens:]) if delta else new.beta[..., None] * new.v
    if tokens == 1:
        own = _per_head((q * new.k).sum(-1), layout)
        return seen[:, :, :1] + own[..., None] * u, u
    between, earlier = _pair_sums(new.g, batch.parents)
    if delta:
        among = _pairs(new.k, new.k, layout, between, earlier)
        u = _solve(among * new.beta[..., None], u)
    own = torch.eye(tokens, dtype=torch.bool, device=q.device)
    return seen[:, :, :tokens] + _pairs(q, new.k, layout, between, earlier | own) @ u, u


def _advance_block(state: Tensor, layout: Layout, block: Entries) -> None:
    """Fold up to ``_BLOCK`` entries into a state [R, H, P, K], in place."""
    after = _sums_after(block.g)
    total = block.g.sum(2)
    u = block.beta[..., None] * block.v
    if layout.recurrence.update == "delta":
        until = block.g.cumsum(2)
        seen = _read_dense(state, layout, block.k, until)
        between, earlier = _pair_sums(block.g, None)
        among = _pairs(block.k, block.k, layout, between, earlier)
        u = _solve(among * block.beta[..., None], u - block.beta[..., None] * seen)
    keys = _per_head(block.k, layout)
    if layout.recurrence.decay == "channel":
        keys = keys * after.exp()
        state *= total.exp()[:, :, None, :]
    else:
        keys = keys * after.exp()[..., None]
        state *= total.exp()[..., None, None]
    state.flatten(0, 1).baddbmm_(u.transpose(-1, -2).flatten(0, 1), keys.flatten(0, 1))


def _read(layer: dict[str, Tensor], layout: Layout, slots: Tensor, probes: Tensor, exponent: Tensor) -> Tensor:
    """S (x ⊙ e^exponent) for each probe of ``probes`` [R, G, n, K]: [R, H, n, P]. S is read by slot, in pieces."""
    name = "read_copy" if "read_copy" in layer else "checkpoint"
    seen = exponent.new_empty((*probes.shape[:1], layout.heads, probes.shape[2], layout.head_dim))
    for rows, heads in _pieces(layout, len(slots)):
        dense = _state(name, layer, layout, slots[rows], heads)
        seen[rows, heads] = _read_dense(dense, layout, probes[rows, _groups_of(layout, heads)], exponent[rows, heads])
    return seen


def _read_dense(state: Tensor, layout: Layout, probes: Tensor, exponent: Tensor) -> Tensor:
    """S (x ⊙ e^exponent) for a gathered state [R, H, P, K]."""
    if layout.recurrence.decay == "channel":
        return (_per_head(probes, layout) * exponent.exp()) @ state.transpose(-1, -2)
    rows, groups = probes.shape[:2]
    _, heads, p, k = state.shape
    seen = probes @ state.reshape(rows, groups, heads // groups * p, k).transpose(-1, -2)
    seen = seen.unflatten(-1, (heads // groups, p)).transpose(2, 3).flatten(1, 2)
    return seen * exponent.exp()[..., None]


def _scores(keys: Tensor, probes: Tensor, layout: Layout, since: Tensor, along: Tensor) -> Tensor:
    """⟨k_j ⊙ e^{c_i−c_j}, x_i⟩ of probes i and past entries j: [R, H, n, E]. The exponent is since_j + along_i."""
    if layout.recurrence.decay == "channel":
        decayed = _per_head(keys, layout) * since.exp()
        return (_per_head(probes, layout) * along.exp()) @ decayed.transpose(-1, -2)
    return _per_head(probes @ keys.transpose(-1, -2), layout) * (since[:, :, None] + along[..., None]).exp()


def _pairs(probes: Tensor, keys: Tensor, layout: Layout, between: Tensor, mask: Tensor) -> Tensor:
    """⟨k_j ⊙ e^{between_ij}, x_i⟩ where ``mask`` [.., i, j] holds, else 0: [R, H, T, T]."""
    if layout.recurrence.decay == "channel":
        left = _per_head(probes, layout)[:, :, :, None] * between.exp()
        scores = (left * _per_head(keys, layout)[:, :, None]).sum(-1)
    else:
        scores = _per_head(probes @ keys.transpose(-1, -2), layout) * between.exp()
    return torch.where(mask, scores, 0.0)


def _solve(strict_lower: Tensor, right: Tensor) -> Tensor:
    """(I + A)⁻¹ right, A strictly lower triangular (an ancestor comes before its descendants)."""
    return torch.linalg.solve_triangular(strict_lower, right, upper=False, unitriangular=True)


def _sums_after(g: Tensor) -> Tensor:
    """Σ_{m>j} g_m along dimension 2, summed from the end: what decays entry j until the last entry."""
    shifted = torch.cat([g[:, :, 1:], torch.zeros_like(g[:, :, :1])], 2)
    return shifted.flip(2).cumsum(2).flip(2)


def _path_sums(g: Tensor, parents: Tensor | None) -> Tensor:
    """Σ g over a token's path from the root, itself included: like g."""
    if parents is None:
        return g.cumsum(2)
    sums = torch.empty_like(g)
    rows = torch.arange(len(g), device=g.device)
    for i in range(g.shape[2]):
        parent = parents[:, i]
        before = sums[rows, :, parent.clamp(min=0)]
        keep = (parent >= 0).view(-1, *(1,) * (before.ndim - 1))
        sums[:, :, i] = torch.where(keep, before, 0.0) + g[:, :, i]
    return sums


def _pair_sums(g: Tensor, parents: Tensor | None) -> tuple[Tensor, Tensor]:
    """For tokens i and j: Σ g over the path from j (excluded) to i, and whether j is a proper ancestor of i.

    Returns [R, H, T, T] (or [R, H, T, T, K]) with zeros where j is no ancestor, and a mask [R or 1, 1, T, T].
    """
    rows, heads, tokens = g.shape[:3]
    if parents is None:
        earlier = torch.ones(tokens, tokens, dtype=torch.bool, device=g.device).tril(-1)
        spread = g[:, :, :, None].expand(rows, heads, tokens, tokens, *g.shape[3:])
        mask = earlier.view(tokens, tokens, *(1,) * (g.ndim - 3))
        return torch.where(mask, spread, 0.0).cumsum(2).where(mask, 0.0), earlier[None, None]
    between = g.new_zeros((rows, heads, tokens, tokens, *g.shape[3:]))
    earlier = torch.zeros(rows, tokens, tokens, dtype=torch.bool, device=g.device)
    index = torch.arange(rows, device=g.device)
    for i in range(tokens):
        parent = parents[:, i]
        above = parent.clamp(min=0)
        line = earlier[index, above].clone()
        line[index, above] = True
        line &= (parent >= 0)[:, None]
        earlier[:, i] = line
        mask = line.view(rows, 1, tokens, *(1,) * (g.ndim - 3))
        between[:, :, i] = torch.where(mask, between[index, :, above] + g[:, :, i, None], 0.0)
    return between, earlier[:, None]


def _per_head(x: Tensor, layout: Layout) -> Tensor:
    """[R, G, …] -> [R, H, …]: head h uses group h // (H/G)."""
    repeat = layout.heads // layout.groups
    return x if repeat == 1 else x.repeat_interleave(repeat, 1)


def _select(x: Tensor, length: Tensor, dim: int) -> Tensor:
    """Zero the entries at or past each row's length, by selection: they may hold anything, NaN included."""
    live = torch.arange(x.shape[dim], device=x.device) < length[:, None]
    return torch.where(live.view(len(length), *(1,) * (dim - 1), -1, *(1,) * (x.ndim - dim - 1)), x, 0.0)


def _groups_of(layout: Layout, heads: slice) -> slice:
    """The groups of a slice of heads."""
    repeat = layout.heads // layout.groups
    return slice(heads.start // repeat, heads.stop // repeat)


def _gather_entries(
    layer: dict[str, Tensor], layout: Layout, slots: Tensor, length: Tensor, longest: int, heads: slice
) -> Entries:
    """The committed entries of the rows, padded to ``longest`` with inert ones (k = v = g = β = 0)."""
    groups = _groups_of(layout, heads)

    def take(name: str, which: slice) -> Tensor:
        return _select(_part(layer[name][:, :, :longest], slots, which).to(layout.wide), length, 2)

    k, v, beta = take("key", groups), take("value", heads), take("weight", heads)
    if "key_scale" in layer:
        k = k * take("key_scale", groups)[..., None]
    return Entries(k, v, take("decay", heads) if "decay" in layer else torch.zeros_like(beta), beta)


def _gather_tokens(lowered: Lowered, layout: Layout, batch: Batch) -> tuple[Tensor, Entries]:
    """Queries [R, G, T, K] and the rest of the new tokens, padded with inert ones."""

    def take(x: Tensor) -> Tensor:
        x = x[batch.tokens].to(layout.wide)
        if batch.valid is not None:
            x = torch.where(batch.valid.view(*batch.valid.shape, *(1,) * (x.ndim - 2)), x, 0.0)
        return x.transpose(1, 2)

    k, beta = take(lowered.k), take(lowered.beta)
    if lowered.key_scale is not None:
        k = k * take(lowered.key_scale)[..., None]
    g = torch.zeros_like(beta) if lowered.g is None else take(lowered.g)
    return take(lowered.q), Entries(k, take(lowered.v), g, beta)


def _append(layer: dict[str, Tensor], layout: Layout, lowered: Lowered, batch: Batch, u: Tensor) -> None:
    """Write the raw inputs of the new tokens, and u for the delta rule, at length, length + 1, …"""
    tokens = batch.tokens.shape[1]
    place = batch.length[:, None] + torch.arange(tokens, device=batch.slots.device)
    slot = batch.slots[:, None].expand_as(place)
    raw = {"key": lowered.k, "value": lowered.v, "weight": lowered.beta, "decay": lowered.g}
    raw["key_scale"] = lowered.key_scale
    entries = {name: x[batch.tokens] for name, x in raw.items() if x is not None and name in layer}
    if "written" in layer:
        entries |= {"written" + s: part for s, part in layout.written_format.encode(u.transpose(1, 2)).items()}
    for name, x in entries.items():
        if batch.valid is None:
            layer[name][slot, :, place] = x
        else:
            layer[name][slot[batch.valid], :, place[batch.valid]] = x[batch.valid]
