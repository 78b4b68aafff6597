"""What Triton's interpreter needs to run these kernels, and a check of what they touch.

Import it before anything is interpreted.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

_patch = interpreter._patch_lang_tensor
_convert = interpreter._convert_float


def _patched(tensor: object, scope: object) -> None:
    """Loop bounds that are tensors need this with numpy 2.4 and later, which does not turn [n] into n."""
    _patch(tensor, scope)
    tensor.__index__ = lambda self: int(self.handle.data.item())  # type: ignore[attr-defined]


def _converted(data: Any, source: Any, target: Any, mode: Any) -> Any:
    """float32 to and from bfloat16 with ties to even, carries and denormals, which the interpreter's own lacks."""
    flat = np.ascontiguousarray(data)
    if source == tl.float32 and target == tl.bfloat16:
        narrow = torch.from_numpy(flat.view(np.float32)).to(torch.bfloat16)
        return narrow.view(torch.int16).numpy().view(np.uint16).reshape(data.shape)
    if source == tl.bfloat16 and target == tl.float32:
        return (flat.view(np.uint16).astype(np.uint32) << 16).reshape(data.shape)
    return _convert(data, source, target, mode)


interpreter._patch_lang_tensor = _patched
interpreter._convert_float = _converted


# Every address that a kernel touches has to be in a tensor that it was given; where it was given a table of addresses,
# as folds are, in any tensor there is. A GPU would not notice most of the others.

_starts = _ends = np.zeros(0, np.uint64)
_launch = interpreter.GridExecutor.__call__
_builder = interpreter.InterpreterBuilder
_load, _store = _builder.create_masked_load, _builder.create_masked_store


def _tensors(values: Iterable[object]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


def _launched(self: Any, *args: object, **kwargs: object) -> None:
    global _starts, _ends
    given = list(_tensors([*args, *kwargs.values()]))
    if any(tensor.dtype == torch.int64 for tensor in given):
        given += [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in given]
    spans = sorted((storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages)
    _starts, _ends = (np.array(column, np.uint64) for column in zip(*spans, strict=True))
    _launch(self, *args, **kwargs)


def _touched(pointers: Any, mask: Any) -> None:
    size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    places = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)].astype(np.uint64)
    at = np.searchsorted(_starts, places, "right")
    if not np.all((at > 0) & (places + np.uint64(size) <= _ends[at - 1])):
        raise IndexError("the kernel touches memory outside of its tensors")


def _loaded(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
    _touched(ptrs, mask)
    return _load(self, ptrs, mask, *rest)


def _stored(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
    _touched(ptrs, mask)
    return _store(self, ptrs, value, mask, *rest)


interpreter.GridExecutor.__call__ = _launched
_builder.create_masked_load, _builder.create_masked_store = _loaded, _stored
