"""Which implementation of an operation serves a call."""

from __future__ import annotations

import torch
from torch import Tensor


def is_plain(x: Tensor) -> bool:
    """Return whether `x` is real memory outside of compilation and tracing (not fake, not otherwise wrapped)."""
    return type(x) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling()


def may_read(tensor: Tensor) -> bool:
    """Return whether reading `tensor` is free: real memory on the CPU, outside compilation and tracing."""
    return tensor.is_cpu and is_plain(tensor)
