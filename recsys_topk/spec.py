"""Descriptions of objects as configs and checkpoints store them: a class path and the constructor arguments."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from recsys_topk.options import inherit_options, options_of
from recsys_topk.registry import suggest
from recsys_topk.trust import inspect_names, load_class, reading


class Recorded:
    """Mixin that records the constructor arguments of an object for `describe`.

    A constructor may take options of its base class as ``**options: Unpack[Options]`` (`recsys_topk.options`).
    """

    _arguments: dict[str, Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        inherit_options(cls)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create the object and record the arguments by name."""
        self = super().__new__(cls)
        options = options_of(cls)
        if not any(one.kind is one.VAR_KEYWORD for one in options.values()):
            unknown = next((name for name in kwargs if name not in options), None)
            if unknown is not None:
                hint = suggest(unknown, options)
                raise TypeError(f"{cls.__name__} has no option {unknown!r}; {hint}it has: {', '.join(options)}")
        signature = inspect.signature(cls.__init__)
        own, *others = signature.parameters
        arguments = dict(signature.bind_partial(self, *args, **kwargs).arguments)
        arguments.pop(own)
        if others and signature.parameters[others[-1]].kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(arguments.pop(others[-1], {}))
        object.__setattr__(self, "_arguments", arguments)
        return self


def describe(built: Recorded, exclude: Collection[str] = ()) -> dict[str, Any]:
    """Return the description of an object for `build`: ``{"class_path": ..., "init_args": {...}}``, without `exclude`.

    An argument that can itself be described, such as the operator of a `TopKLoss`, is described in the same way.

    Example:
        >>> from recsys_topk.losses import DFTopKLoss
        >>> describe(DFTopKLoss(tau=2.0, k=10))
        {'class_path': 'recsys_topk.losses.DFTopKLoss', 'init_args': {'tau': 2.0, 'k': 10}}
    """
    cls = type(built)
    arguments = {
        name: describe(value) if isinstance(value, Recorded) else value
        for name, value in built._arguments.items()
        if name not in exclude
    }
    return {"class_path": f"{cls.__module__}.{cls.__qualname__}", "init_args": arguments}


def build(spec: Mapping[str, Any], *args: Any, base: type[Any], trust: Iterable[str] = ()) -> Any:
    """Build an object from its description. The class path is checked first, since descriptions come from files.

    Positional arguments are passed before ``init_args``. `trust` adds packages or class paths to those of
    `recsys_topk.trust`.

    Example:
        >>> from recsys_topk.losses import RankingLoss
        >>> build({"class_path": "recsys_topk.losses.DFTopKLoss", "init_args": {"tau": 2.0}}, base=RankingLoss).name
        'dftopk'
        >>> build({"class_path": "timeit.Timer", "init_args": {"setup": "print(1)"}}, base=RankingLoss)
        Traceback (most recent call last):
        ...
        recsys_topk.trust.source.UntrustedError: a description (class_path) names 'timeit.Timer', which is not ...
    """
    inspect_names(spec, "a description", tuple(trust))
    with reading(trust):
        cls = load_class(str(spec["class_path"]), base)
        return cls(*args, **spec.get("init_args", {}))
