"""What Triton's interpreter needs to run these kernels. Import it before anything is interpreted."""

from __future__ import annotations

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
