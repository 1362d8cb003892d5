"""Generated losses: for each operator, the cross-entropy of its membership, with the operator's name and options."""

from __future__ import annotations

import inspect
import re
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, get_type_hints

from recsys_topk.losses.topk import TopKLoss
from recsys_topk.operators.base import TopKOperator

LOSSES = "recsys_topk.losses"
OPERATORS = "recsys_topk.operators."


def loss_of(operator: type[TopKOperator]) -> type[TopKLoss]:
    """Return the loss class of an operator. The class is created at the first call.

    The class is called ``<operator class>Loss``, is registered under the operator's name, and accepts the arguments of
    the operator and of `TopKLoss`. Its class path is ``recsys_topk.losses.<file of the operator>.<class>`` for an
    operator of this package, and ``recsys_topk.losses.<class>`` for an operator of another package.

    Args:
        operator: The operator class, with a `name`.

    Example:
        >>> from recsys_topk.operators import LapSum
        >>> loss = loss_of(LapSum)(tau=2.0, k=10)
        >>> loss.name, loss.operator
        ('lapsum', LapSum(tau=2))
    """
    made = operator.__dict__.get("_loss")
    if made is None:
        made = _make(operator)
        operator._loss = made  # type: ignore[attr-defined]
    loss: type[TopKLoss] = made
    return loss


def _make(operator: type[TopKOperator]) -> type[TopKLoss]:
    own = _options(operator)
    shared = [one for one in _parameters(TopKLoss) if one.name != "operator"]
    own_names = [one.name for one in own]
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.Signature([this, *own, *shared], return_annotation=None)

    def __init__(self: TopKLoss, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        values = dict(given.arguments)
        del values["self"]
        built = operator(**{name: values.pop(name) for name in own_names})
        TopKLoss.__init__(self, built, **values)

    name = f"{operator.__name__}Loss"
    module = LOSSES
    if operator.__module__.startswith(OPERATORS):
        module = f"{LOSSES}.{operator.__module__.removeprefix(OPERATORS)}"
    __init__.__signature__ = signature  # type: ignore[attr-defined]
    __init__.__annotations__ = {one.name: one.annotation for one in (*own, *shared)}
    __init__.__qualname__, __init__.__module__ = f"{name}.__init__", module
    body = {
        "__module__": module,
        "__qualname__": name,
        "__doc__": _documentation(operator, own_names),
        "__init__": __init__,
        "name": operator.name,
        "cost": operator.cost,
        "paper": operator.paper,
        "source_operator": operator,
    }
    made: type[TopKLoss] = type(name, (TopKLoss,), body)
    if module != LOSSES:
        _virtual_module(module).__dict__[name] = made
    return made


def _parameters(cls: type[Any]) -> list[inspect.Parameter]:
    """Return the parameters of a constructor without self, with string annotations resolved to types."""
    hints = get_type_hints(cls.__init__)
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    return [one.replace(annotation=hints.get(one.name, one.annotation)) for one in parameters]


def _options(operator: type[TopKOperator]) -> list[inspect.Parameter]:
    excluded = {*operator.loss_leaves_out, "validate"}
    options = [one for one in _parameters(operator) if one.name not in excluded]
    variadic = [one.name for one in options if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    if variadic:
        raise TypeError(
            f"the loss of operator {operator.name!r} needs named options, but {operator.__qualname__}.__init__ "
            f"has *{variadic[0]}; declare each option as a parameter"
        )
    defaults = operator.loss_defaults
    return [one.replace(default=defaults[one.name]) if one.name in defaults else one for one in options]


def _documentation(operator: type[TopKOperator], names: list[str]) -> str:
    """Return a docstring with the operator's description and the arguments of the operator and the loss."""
    text, shared = inspect.cleandoc(operator.__doc__ or ""), inspect.cleandoc(TopKLoss.__doc__ or "")
    what = re.split(r"^(?:Args|Example|Class attributes):$", text, maxsplit=1, flags=re.M)[0].strip()
    arguments = {**_arguments(shared), **{name: about for name, about in _arguments(text).items() if name in names}}
    arguments.pop("operator", None)
    ordered = [*names, *(name for name in arguments if name not in names)]
    listed = "\n".join(f"    {name}: {arguments[name]}" for name in ordered if name in arguments)
    title = f"Cross-entropy between the true top k and the membership of `{operator.__name__}`."
    return f"{title}\n\n{what}\n\nArgs:\n{listed}\n"


def _arguments(text: str) -> dict[str, str]:
    """Return the description of each argument in a docstring."""
    found = re.search(r"^Args:\n(.*?)(?:^\S|\Z)", text, flags=re.M | re.S)
    entries = re.findall(r"^    (\w+): (.*?)(?=^    \w|\Z)", found.group(1) if found else "", flags=re.M | re.S)
    return {name: " ".join(about.split()) for name, about in entries}


def _virtual_module(name: str) -> ModuleType:
    """Return the module `name`, which has no file. It makes class paths and pickles of a generated loss work."""
    module = sys.modules.get(name)
    if module is None:
        module = ModuleType(name, f"The loss of the operator {name.rpartition('.')[2]!r}.")
        module.__spec__ = ModuleSpec(name, None)
        sys.modules[name] = module
    return module
