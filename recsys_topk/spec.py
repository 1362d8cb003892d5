"""Plain descriptions of objects: a class path and the arguments it was built with, as configs and checkpoints hold."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Collection, Mapping
from typing import Any


class Recorded:
    """Mixin that remembers the arguments an object was built with, so that `describe` can write them down."""

    _arguments: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create the object and record the arguments by name."""
        self = super().__new__(cls)
        bound = inspect.signature(cls.__init__).bind_partial(self, *args, **kwargs)
        arguments = dict(bound.arguments)
        arguments.pop(next(iter(inspect.signature(cls.__init__).parameters)))
        arguments.update(arguments.pop("kwargs", {}))
        object.__setattr__(self, "_arguments", arguments)
        return self


def describe(built: Recorded, leave_out: Collection[str] = ()) -> dict[str, Any]:
    """Return ``{"class_path": ..., "init_args": {...}}`` of an object, as `build` takes it.

    Args:
        built: The object.
        leave_out: Arguments that are not part of the description.

    Example:
        >>> from recsys_topk.losses import DFTopKLoss
        >>> describe(DFTopKLoss(tau=2.0, k=10))
        {'class_path': 'recsys_topk.losses.dftopk.DFTopKLoss', 'init_args': {'tau': 2.0, 'k': 10}}
    """
    cls = type(built)
    arguments = {name: value for name, value in built._arguments.items() if name not in leave_out}
    return {"class_path": f"{cls.__module__}.{cls.__qualname__}", "init_args": arguments}


def build(spec: Mapping[str, Any], *args: Any) -> Any:
    """Build what `describe` described; `args` are passed first."""
    module_name, _, class_name = str(spec["class_path"]).rpartition(".")
    cls = getattr(importlib.import_module(module_name), class_name)
    return cls(*args, **spec.get("init_args", {}))
