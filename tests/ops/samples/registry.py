"""The functions that are compared on all backends, with generators of their arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

Samples = Callable[[torch.Generator], Iterable[tuple[Any, ...]]]
S = TypeVar("S", bound=Samples)

samples: dict[str, tuple[Callable[..., Any], Samples]] = {}  # by dotted name


def sampled(function: Callable[..., Any]) -> Callable[[S], S]:
    """Return a decorator that registers a generator of arguments of a function.

    The function is an operation, or calls operations. The gradients of arguments that require one are compared too.
    """

    def decorate(arguments: S) -> S:
        samples[f"{function.__module__}.{function.__qualname__}"] = (function, arguments)
        return arguments

    return decorate
