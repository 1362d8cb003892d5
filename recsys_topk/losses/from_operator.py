"""Generated losses: for each operator, the cross-entropy of its membership, with the operator's name and options."""

from __future__ import annotations

import inspect
import re
from typing import Any

from recsys_topk.losses.topk import TopKLoss
from recsys_topk.operators.base import TopKOperator
from recsys_topk.options import arguments_of, options_of, set_signature, with_arguments

LOSSES = "recsys_topk.losses"


def loss_of(operator: type[TopKOperator]) -> type[TopKLoss]:
    """Return the loss class of an operator. The class is created at the first call.

    The class is called ``<operator class>Loss``, is registered under the operator's name, and accepts the arguments of
    the operator and of `TopKLoss`. Its class path is ``recsys_topk.losses.<class>``.

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
    shared = [one for one in options_of(TopKLoss).values() if one.name != "operator"]
    own_names = [one.name for one in own]
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD), *own, *shared]
    signature = inspect.Signature(parameters)

    def __init__(self: TopKLoss, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        values = dict(given.arguments)
        del values["self"]
        built = operator(**{name: values.pop(name) for name in own_names})
        TopKLoss.__init__(self, built, **values)

    set_signature(__init__, parameters)
    name = f"{operator.__name__}Loss"
    __init__.__qualname__, __init__.__module__ = f"{name}.__init__", LOSSES
    body = {
        "__module__": LOSSES,
        "__qualname__": name,
        "__doc__": _documentation(operator, own_names),
        "__init__": __init__,
        "name": operator.name,
        "cost": operator.cost,
        "paper": operator.paper,
        "takes_item_weights": operator.takes_item_weights,
        "source_operator": operator,
    }
    made: type[TopKLoss] = type(name, (TopKLoss,), body)
    return made


def _options(operator: type[TopKOperator]) -> list[inspect.Parameter]:
    excluded = {*operator.loss_leaves_out, "validate"}
    options = [one for one in options_of(operator).values() if one.name not in excluded]
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
    text = inspect.cleandoc(operator.__doc__ or "")
    what = re.split(r"^(?:Args|Example|Class attributes):$", text, maxsplit=1, flags=re.M)[0].strip()
    own, shared = arguments_of(text), arguments_of(TopKLoss.__doc__)
    shared.pop("operator", None)
    title = f"Cross-entropy between the true top k and the membership of `{operator.__name__}`."
    return with_arguments(f"{title}\n\n{what}", {**{name: own.get(name, "") for name in names}, **shared})
