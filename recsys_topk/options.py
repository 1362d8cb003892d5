"""Options that a family of classes shares, declared once.

The base class of the family declares its options as keyword-only parameters, and a `TypedDict` of the same names for
type checkers. A subclass accepts them as ``**options: Unpack[...]`` and passes them on::

    class LossOptions(TypedDict, total=False):
        reduction: Reduction

    class SoftmaxLoss(RankingLoss):
        def __init__(self, tau: float = 1.0, **options: Unpack[LossOptions]) -> None:
            super().__init__(**options)

`inherit_options`, called from ``__init_subclass__``, writes the signature and the docstring of the subclass out in
full, so that `help`, the command line, configs and error messages show every option.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, get_args

WIDTH = 112


def inherit_options(cls: type) -> None:
    """Add the options that a class passes on to its base class to its signature and docstring.

    Does nothing unless ``cls.__init__`` ends with ``**options: Unpack[...]``, or `cls` has no constructor of its own
    and a docstring with an argument `options`. A description in the docstring of `cls` replaces that of the base class.

    Example:
        >>> from recsys_topk.losses import SoftmaxLoss
        >>> list(options_of(SoftmaxLoss))
        ['tau', 'against', 'activation', 'tau_positives', 'k', 'positive_above', 'reduction', 'validate']
        >>> arguments_of(SoftmaxLoss.__doc__)["reduction"].partition(" (")[0]
        '``"mean"``'
    """
    init: Any = cls.__dict__.get("__init__")
    own = [] if init is None else list(inspect.signature(init).parameters.values())
    passed_on = _unpacked(init, own[-1]) if own else None
    described = arguments_of(cls.__doc__)
    if passed_on is None and (own or "options" not in described):
        return
    base = next(one for one in cls.__mro__[1:] if "__init__" in one.__dict__)
    options = options_of(base)
    if passed_on is not None:
        others = {name: options[name].replace(kind=inspect.Parameter.KEYWORD_ONLY) for name in passed_on}
        options = {one.name: one for one in _typed(init, own[1:-1])}
        options |= {name: one for name, one in others.items() if name not in options}
        set_signature(init, [own[0], *options.values()])
    about = {**arguments_of(base.__doc__), **described}
    cls.__doc__ = with_arguments(cls.__doc__ or "", {name: about.get(name, "") for name in options})


def options_of(cls: type[Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a constructor by name, without self. String annotations are resolved to types."""
    _, *parameters = inspect.signature(cls.__init__).parameters.values()
    return {one.name: one for one in _typed(cls.__init__, parameters)}


def set_signature(init: Any, parameters: Sequence[inspect.Parameter]) -> None:
    """Set the signature and the annotations of a constructor; `parameters` begin with self."""
    init.__signature__ = inspect.Signature(parameters, return_annotation=None)
    init.__annotations__ = {one.name: one.annotation for one in parameters[1:]} | {"return": None}


def _unpacked(init: Any, last: inspect.Parameter) -> list[str] | None:
    """Return the names in the TypedDict of ``**options: Unpack[...]``; None if `last` is another parameter."""
    if last.kind is not last.VAR_KEYWORD or "Unpack[" not in str(last.annotation):
        return None
    (typed,) = _typed(init, [last])
    return list(get_args(typed.annotation)[0].__annotations__)


def _typed(init: Any, parameters: Sequence[inspect.Parameter]) -> list[inspect.Parameter]:
    typed = []
    for one in parameters:
        if isinstance(one.annotation, str):
            with contextlib.suppress(NameError):  # a type that only type checkers import stays a string
                one = one.replace(annotation=eval(one.annotation, init.__globals__))
        typed.append(one)
    return typed


def arguments_of(text: str | None) -> dict[str, str]:
    """Return the description of each argument in a docstring.

    Example:
        >>> arguments_of(inherit_options.__doc__), list(arguments_of(with_arguments.__doc__))
        ({}, ['text', 'arguments'])
    """
    listed = re.search(r"^Args:\n(.*?)(?:^\S|\Z)", inspect.cleandoc(text or ""), flags=re.M | re.S)
    entries = re.findall(r"^    (\w+): (.*?)(?=^    \w|\Z)", listed.group(1) if listed else "", flags=re.M | re.S)
    return {name: " ".join(about.split()) for name, about in entries}


def with_arguments(text: str, arguments: Mapping[str, str]) -> str:
    """Return a docstring with other arguments in its section ``Args:``.

    Args:
        text: The docstring.
        arguments: Descriptions by name; an argument with an empty description is left out.
    """
    about, head, rest = inspect.cleandoc(text).partition("Args:\n")
    after = re.search(r"^\S", rest, flags=re.M) if head else None
    listed = [
        textwrap.fill(f"{name}: {what}", WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8)
        for name, what in arguments.items()
        if what
    ]
    parts = [about.rstrip(), "Args:\n" + "\n".join(listed)] + ([rest[after.start() :]] if after else [])
    return "\n\n".join(parts) + "\n"
