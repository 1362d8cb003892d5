"""Plain descriptions of objects: a class path and the arguments it was built with, as configs and checkpoints hold."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from recsys_topk.registry import suggest
from recsys_topk.trust import inspect_names, load_class, reading


class Recorded:
    """Mixin that remembers the arguments an object was built with, so that `describe` can write them down."""

    _arguments: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create the object and record the arguments by name."""
        self = super().__new__(cls)
        signature = inspect.signature(cls.__init__)
        own, *options = signature.parameters
        if not any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values()):
            unknown = next((name for name in kwargs if name not in options), None)
            if unknown is not None:
                hint = suggest(unknown, options)
                raise TypeError(f"{cls.__name__} has no option {unknown!r}; {hint}it has: {', '.join(options)}")
        arguments = dict(signature.bind_partial(self, *args, **kwargs).arguments)
        arguments.pop(own)
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

    An argument that can be described itself, such as the operator of a `TopKLoss`, is described the same way.
    """
    cls = type(built)
    arguments = {
        name: describe(value) if isinstance(value, Recorded) else value
        for name, value in built._arguments.items()
        if name not in leave_out
    }
    return {"class_path": f"{cls.__module__}.{cls.__qualname__}", "init_args": arguments}


def build(spec: Mapping[str, Any], *args: Any, base: type[Any], trust: Iterable[str] = ()) -> Any:
    """Build what `describe` described. A description is what files hold, so its names are checked first.

    Args:
        spec: ``{"class_path": ..., "init_args": {...}}``.
        args: Arguments that are passed first.
        base: What the class must be a subclass of.
        trust: Packages or class paths that the description may name besides those of `recsys_topk.trust`.

    Example:
        >>> from recsys_topk.losses import RankingLoss
        >>> build({"class_path": "recsys_topk.losses.DFTopKLoss", "init_args": {"tau": 2.0}}, base=RankingLoss).name
        'dftopk'
        >>> build({"class_path": "timeit.Timer", "init_args": {"setup": "print(1)"}}, base=RankingLoss)
        Traceback (most recent call last):
        ...
        recsys_topk.trust.UntrustedError: a description (class_path) names 'timeit.Timer', which is not a class of ...
    """
    inspect_names(spec, "a description", tuple(trust))
    with reading(trust):
        cls = load_class(str(spec["class_path"]), base)
        return cls(*args, **spec.get("init_args", {}))
