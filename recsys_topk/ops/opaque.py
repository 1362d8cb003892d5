"""Functions that the compiler takes as one opaque step: data-dependent loops and numpy code."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from recsys_topk.ops.dispatch import is_plain

F = TypeVar("F", bound=Callable[..., Any])


def opaque(fake: Callable[..., Any]) -> Callable[[F], F]:
    """Register a function of tensors as a `torch.library` operator, called as such only where it must be.

    In eager mode the function is called directly: going through the dispatcher costs some ten microseconds, as much
    as the selection of a short list. Under `torch.compile`, and for fake and meta tensors, the registered operator
    stands in for it, so that loops that stop on the data, and numpy, do not break the graph. The operator has no
    gradient of its own; a `torch.autograd.Function` around it does.

    Args:
        fake: Same arguments; returns empty tensors of the right shape, dtype and device.
    """

    def decorate(function: F) -> F:
        registered = torch.library.custom_op(f"recsys_topk::{function.__name__}", function, mutates_args=())
        registered.register_fake(fake)

        @wraps(function)
        def call(x: Tensor, *arguments: Any) -> Any:
            direct = is_plain(x) and x.device.type != "meta"
            return function(x, *arguments) if direct else registered(x, *arguments)

        return call  # type: ignore[return-value]

    return decorate
