"""Slots as plain tensors: export and import, through safetensors files or a wire.

A packed dict holds, for each layer, the tensors of ``Layout.tensors`` for R slots (the convolution as its tail, the
read copy left out because it follows from the checkpoint), and a header in JSON that describes them. Entries at or past
a slot's length are zeroed: they may be another sequence's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from replayssm import checks, precision
from replayssm.checks import ReplayError
from replayssm.layout import Conv, Layout, Precision, Recurrence

if TYPE_CHECKING:
    from replayssm.cache import ReplayCache

HEADER = "replayssm.header"
FORMAT = {"format": "replayssm.slots", "version": 1}


def pack(cache: ReplayCache, slots: Sequence[int]) -> dict[str, Tensor]:
    """See ``ReplayCache.export``."""
    index = torch.tensor(slots, dtype=torch.int64, device=cache.device)
    books = {name: tensor[index].tolist() for name, tensor in _books(cache).items()}
    header = {**FORMAT, "layers": cache.layers, "layout": _describe(cache.layout), **books}
    length = cache.length[index]
    data = {HEADER: torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)}
    for layer, tensors in enumerate(cache.views()):
        for name, spec in cache.layout.tensors.items():
            if name == "conv":
                data[f"{layer}.conv"] = cache.conv_tail(layer, slots).cpu()
            elif not precision.is_copy(name):
                part = tensors[name][index]
                if spec.entries:
                    live = torch.arange(cache.layout.window, device=cache.device) < length[:, None]
                    part = torch.where(live.view(len(slots), 1, cache.layout.window, *(1,) * (part.ndim - 3)), part, 0)
                data[f"{layer}.{name}"] = part.contiguous().cpu()
    return data


def unpack(cache: ReplayCache, slots: Sequence[int], data: Mapping[str, Tensor]) -> None:
    """See ``ReplayCache.import_``."""
    header = _header(data)
    source = _layout(header)
    _expect_compatible(cache, source, header["layers"])
    rows = len(header["length"])
    if len(slots) != rows:
        raise ReplayError(f"slots: the data hold {rows} sequences, got {len(slots)} slots")
    _expect_tensors(source, header, data)
    index = torch.tensor(slots, dtype=torch.int64, device=cache.device)
    if _same_storage(source, cache.layout) and max(header["length"], default=0) <= cache.layout.room:
        _copy(cache, index, source, header, data)
    else:
        _replay(cache, slots, source, header, data)
    if cache.layout.conv is not None:
        for layer in range(cache.layers):
            cache.load_conv(layer, slots, data[f"{layer}.conv"].to(cache.device))


def _books(cache: ReplayCache) -> dict[str, Tensor]:
    """The per-slot counters that travel."""
    return {"length": cache.length, "folds": cache.folds, "limit": cache._limit}


def _copy(
    cache: ReplayCache, index: Tensor, source: Layout, header: dict[str, Any], data: Mapping[str, Tensor]
) -> None:
    """Take checkpoints and entries as they are."""
    entries = min(source.window, cache.layout.window)
    for layer, tensors in enumerate(cache.views()):
        for name, spec in cache.layout.tensors.items():
            if name == "conv" or precision.is_copy(name):
                continue
            part = data[f"{layer}.{name}"].to(cache.device)
            if spec.entries:
                tensors[name][index, :, :entries] = part[:, :, :entries]
            else:
                tensors[name][index] = part
        kept = {name: tensors[name][index] for name in tensors if name.startswith("checkpoint")}
        for name, encoded in precision.encode(kept, cache.layout.precision, cache.layout.state_dim).items():
            tensors[name][index] = encoded
    same_window = (source.window, source.max_draft) == (cache.layout.window, cache.layout.max_draft)
    limit = header["limit"] if same_window else [cache.layout.room] * len(index)
    for tensor, values in ((cache.length, header["length"]), (cache.folds, header["folds"]), (cache._limit, limit)):
        tensor[index] = torch.tensor(values, dtype=torch.int32, device=cache.device)
    cache._drafts[:, :, index] = 0


def _replay(
    cache: ReplayCache, slots: Sequence[int], source: Layout, header: dict[str, Any], data: Mapping[str, Tensor]
) -> None:
    """Advance the checkpoints by their entries and load the states: for another window or precision."""
    rows = len(slots)
    plain = replace(source, conv=None, precision=replace(source.precision, read_copy=None))
    views = [{name: data[f"{layer}.{name}"] for name in plain.tensors} for layer in range(cache.layers)]
    staging = type(cache).over(plain, views)
    staging.length[:] = torch.tensor(header["length"], dtype=torch.int32)
    for layer in range(cache.layers):
        cache.load(layer, slots, staging.materialise(layer, range(rows)).to(cache.device))


def _describe(layout: Layout) -> dict[str, Any]:
    formats = {name: getattr(layout.precision, name) for name in ("checkpoint", "buffer")}
    return {
        "recurrence": [layout.recurrence.name, layout.recurrence.decay, layout.recurrence.update],
        "sizes": [layout.heads, layout.groups, layout.head_dim, layout.state_dim, layout.window, layout.max_draft],
        "dtype": checks.dtype_name(layout.dtype),
        "precision": {
            name: checks.dtype_name(form) if isinstance(form, torch.dtype) else form for name, form in formats.items()
        },
        "conv": None if layout.conv is None else [layout.conv.channels, layout.conv.width],
    }


def _layout(header: dict[str, Any]) -> Layout:
    """The layout that a header describes."""
    try:
        found = header["layout"]
        layout = Layout(
            Recurrence(*found["recurrence"]),
            *found["sizes"],
            dtype=getattr(torch, found["dtype"]),
            precision=Precision(**found["precision"]),
            conv=None if found["conv"] is None else Conv(*found["conv"]),
        )
        books = [header[name] for name in ("length", "folds", "limit")]
        layers = header["layers"]
    except (KeyError, TypeError, AttributeError, ValueError) as problem:
        raise ReplayError(f"data: the header is damaged ({problem})") from None
    if not _counters_fit(books, layers, layout):
        raise ReplayError("data: the header is damaged (its counters do not fit its layout)")
    return layout


def _counters_fit(books: list[Any], layers: object, layout: Layout) -> bool:
    """Whether length, folds and limit are lists of one size that such a cache can have."""

    def whole(n: object, most: int) -> bool:
        return isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= most

    for book, most in zip(books, (layout.room, 2**31 - 1, layout.room), strict=True):
        if not isinstance(book, list) or len(book) != len(books[0]) or not all(whole(n, most) for n in book):
            return False
    return whole(layers, 2**31 - 1)


def _header(data: Mapping[str, Tensor]) -> dict[str, Any]:
    raw = data.get(HEADER) if isinstance(data, Mapping) else None
    if not isinstance(raw, Tensor) or raw.dtype != torch.uint8 or raw.ndim != 1:
        raise ReplayError(f"data: no tensor {HEADER!r}; expected what cache.export returned")
    try:
        header = json.loads(bytes(raw.tolist()))
    except ValueError:
        raise ReplayError("data: the header is damaged (no JSON)") from None
    if not isinstance(header, dict) or {k: header.get(k) for k in FORMAT} != FORMAT:
        raise ReplayError(f"data: expected {FORMAT}, got another format or version")
    return header


def _expect_compatible(cache: ReplayCache, source: Layout, layers: int) -> None:
    layout = cache.layout
    for name in ("heads", "groups", "head_dim", "state_dim", "dtype", "conv"):
        theirs, ours = getattr(source, name), getattr(layout, name)
        if theirs != ours:
            raise ReplayError(f"data: {name} is {theirs}, this cache has {ours}")
    if (source.recurrence.decay, source.recurrence.update) != (layout.recurrence.decay, layout.recurrence.update):
        raise ReplayError(f"data: recurrence is {source.recurrence.title}, this cache has {layout.recurrence.title}")
    if layers != cache.layers:
        raise ReplayError(f"data: {layers} layers, this cache has {cache.layers}")


def _expect_tensors(source: Layout, header: dict[str, Any], data: Mapping[str, Tensor]) -> None:
    rows = len(header["length"])
    for layer in range(header["layers"]):
        for name, spec in source.tensors.items():
            if precision.is_copy(name):
                continue
            label, shape = f"{layer}.{name}", (rows, *spec.shape)
            if name == "conv":
                assert source.conv is not None
                shape = (rows, source.conv.channels, source.conv.width - 1)
            tensor = data.get(label)
            if not isinstance(tensor, Tensor):
                raise ReplayError(f"data: no tensor {label!r}; the data are truncated")
            if tuple(tensor.shape) != shape or tensor.dtype != spec.dtype:
                raise ReplayError(
                    f"data: tensor {label!r} is {checks.dtype_name(tensor.dtype)} {list(tensor.shape)}, "
                    f"expected {checks.dtype_name(spec.dtype)} {list(shape)}"
                )


def _same_storage(source: Layout, target: Layout) -> bool:
    """Whether checkpoints and entries have the same dtypes; window and read copy may differ."""
    other = replace(source, window=target.window, max_draft=target.max_draft, precision=source.precision)
    theirs, ours = (
        {name: spec for name, spec in layout.tensors.items() if name != "conv" and not precision.is_copy(name)}
        for layout in (other, target)
    )
    return theirs == ours
