"""Every loss as one function: ``functional.dftopk(scores, labels, k=10)``. Needs torch and numpy only.

There is one function for each registered loss, under its registry name; `dir` lists them. A function accepts the
arguments of the loss call (scores, labels, mask, k, weights, item_weights, list_ids, lengths) and, as keywords, those
of the constructor (tau, reduction, ...). `help` and `inspect.signature` show types and defaults. Each call creates a
loss object, which takes about 0.1 ms. For many small batches, create the object once instead.

Example:
    >>> import torch
    >>> from recsys_topk.losses import functional
    >>> scores, labels = torch.tensor([[3.0, 1.0, 2.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0, 1.0]])
    >>> functional.lapsum(scores, labels, k=2, tau=1.0)
    tensor(0.9665)
    >>> functional.softmax(scores[0], labels[0], lengths=torch.tensor([2, 2]), reduction="none")
    tensor([0.1269, 2.1269])
    >>> "lambdarank" in dir(functional)
    True
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, get_type_hints

from torch import Tensor

from recsys_topk.losses.base import RankingLoss, registry

LossFunction = Callable[..., Tensor]

# Arguments of the loss call. k is an argument of both the call and the constructor.
_CALL = ("scores", "labels", "mask", "weights", "item_weights", "list_ids", "lengths")


def __getattr__(name: str) -> LossFunction:
    """Return the function of the loss that is registered as `name`."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    cls = registry.classes().get(name)
    if cls is None:
        raise AttributeError(f"module {__name__!r} has no function {name!r}: {registry.unknown(name)}")
    return _function(cls)


def __dir__() -> list[str]:
    """Return the names of all losses."""
    return [*registry.available(), "LossFunction"]


@cache
def _function(cls: type[RankingLoss]) -> LossFunction:
    signature = _signature(cls)

    def function(
        scores: Tensor,
        labels: Tensor,
        mask: Tensor | None = None,
        *,
        k: int | Literal["positives"] | Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        if k is not None and not isinstance(k, Tensor):
            options["k"], k = k, None
        call = {name: options.pop(name) for name in _CALL if name in options}
        value: Tensor = cls(**options)(scores, labels, mask, k=k, **call)
        return value

    function.__name__ = function.__qualname__ = cls.name
    function.__module__ = __name__
    function.__doc__ = _documentation(cls)
    function.__signature__ = signature  # type: ignore[attr-defined]
    function.__annotations__ = {one.name: one.annotation for one in signature.parameters.values()} | {"return": Tensor}
    return function


def _signature(cls: type[RankingLoss]) -> inspect.Signature:
    call, hints = inspect.signature(RankingLoss.forward).parameters, get_type_hints(RankingLoss.forward)
    typed = {name: call[name].replace(annotation=hints[name]) for name in (*_CALL, "k")}
    options = inspect.signature(cls.__init__, eval_str=True).parameters
    own = {name: one.replace(kind=one.KEYWORD_ONLY) for name, one in list(options.items())[1:]}
    if "k" in own:
        own["k"] = own["k"].replace(annotation=own["k"].annotation | Tensor)
    return inspect.Signature([*({**typed, **own}[name] for name in _order(typed, own))], return_annotation=Tensor)


def _order(call: dict[str, Any], own: dict[str, Any]) -> list[str]:
    """Return the argument order: scores, labels, mask, k, constructor options, remaining call arguments."""
    first = ["scores", "labels", "mask", "k"]
    return [*first, *(name for name in own if name not in first), *(name for name in call if name not in first)]


def _documentation(cls: type[RankingLoss]) -> str:
    """Return the docstring of the class, with the call arguments listed before the constructor arguments."""
    text, call = inspect.cleandoc(cls.__doc__ or ""), inspect.cleandoc(RankingLoss.forward.__doc__ or "")
    of_call = call.partition("Args:\n")[2].partition("\n\n")[0]
    of_call = "\n".join(line for line in of_call.splitlines() if not line.startswith("    k: "))
    about, _, rest = text.partition("Args:\n")
    return f"{about.rstrip()}\n\nArgs:\n{of_call}\n{rest.partition('Example:')[0].rstrip()}\n"
