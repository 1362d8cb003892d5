"""One call that checks a loss, an operator, an objective or a data module against everything that users rely on.

Each function raises one AssertionError that names every rule broken, the class, and the input that shows it. Neither
pytest nor hypothesis is needed: a plug-in's test is one line.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from recsys_topk.losses.base import RankingLoss
from recsys_topk.operators.base import TopKOperator
from recsys_topk.testing import data_rules, loss_rules, objective_rules, operator_rules
from recsys_topk.testing.comparison import run_rules, title
from recsys_topk.testing.lists import Lists

if TYPE_CHECKING:
    from recsys_topk.datamodules.base import CascadeDataModule

Subject = TypeVar("Subject")


def check_loss(
    target: type[RankingLoss] | Callable[[], RankingLoss] | RankingLoss,
    lists: Sequence[Lists] | None = None,
    *,
    rules: Collection[str] | None = None,
    device: str | None = None,
) -> None:
    """Check a loss against the rules that hold for every loss.

    The rules: masked items are inert in value and gradient whatever they hold (NaN and infinity included); the
    order of the items does not matter; lists do not influence each other; lists without a positive leave the mean,
    and a batch of only such lists gives 0 with zero gradients; k is an int or one int per list, 0 and more than
    there are items included; the same input gives the same loss, and equal items equal gradients; flat lists
    (`lengths`, `list_ids`) give what rows give; inputs are not written to; losses are finite and not negative, for
    scores of 1e4 and 1e30 too; half precision and autocast are computed in float32 and float64 stays; weights and
    reductions agree; validate=True names scores that are not finite; the gradient is that of the value; second
    derivatives (create_graph=True) are right or refused; torch.func.grad, vmap and jacrev give what autograd gives;
    torch.compile(fullgraph=True) changes nothing; off the CPU nothing is read on the host; pickle and state_dict bring
    the loss back.

    A loss with an operator is excused from what its operator does not declare (`equivariant`, `tie_fair`,
    `deterministic`, `exact_gradient`, `transformable`); a loss whose gradient is on purpose not that of its value sets
    ``exact_gradient: ClassVar[bool] = False`` itself.

    Args:
        target: The class, a function without arguments that builds an instance, or an instance.
        lists: Batches to try instead of the built-in ones; only the rules that apply to any batch are then checked.
        rules: Names of the rules to check, as they stand in the error message; None = all.
        device: Where the suite makes its tensors, for example ``"cuda"``; None = torch's default.

    Example:
        >>> from recsys_topk.losses import ListNetLoss
        >>> check_loss(lambda: ListNetLoss(target="normalised"))
    """
    with _default_device(device):
        subject = loss_rules.LossSubject(target)
        batches = [make() for make in loss_rules.LISTS] if lists is None else lists
        _run(f"loss {subject.name}", subject, loss_rules.ON_LISTS, batches, () if lists else loss_rules.ONCE, rules)


def check_operator(
    target: type[TopKOperator] | Callable[[], TopKOperator] | TopKOperator,
    lists: Sequence[Lists] | None = None,
    *,
    rules: Collection[str] | None = None,
    device: str | None = None,
) -> None:
    """Check an operator against the rules that hold for every operator, and against what it declares.

    The rules: masked items are inert and get p = 0, log q = 0 and no gradient; lists do not influence each other; p
    is in [0, 1] and agrees with both logs; k = 0 and k >= the number of valid items are answered exactly, without a
    gradient; k is an int or one per list, and a fraction where `fractional_k` says so; inputs are not written to;
    half precision and autocast are computed in float32 and float64 stays; validate=True names scores that are not
    finite; second derivatives (create_graph=True) are right or refused; torch.func.grad, vmap and jacrev give what
    autograd gives; torch.compile(fullgraph=True) changes nothing; off the CPU nothing is read on the host; pickle and
    state_dict bring the operator back; scores of 1e4 and 1e30, empty batches and empty lists are digested. Where
    declared: the order of the items does not matter (`equivariant`), equal scores get equal membership and gradient
    (`tie_fair`), the membership sums to k (`sums_to_k`), the same input gives the same output (`deterministic`), the
    gradient is that of the value (`exact_gradient`).

    Args:
        target: The class, a function without arguments that builds an instance, or an instance.
        lists: Batches to try instead of the built-in ones; only the rules that apply to any batch are then checked.
        rules: Names of the rules to check, as they stand in the error message; None = all.
        device: Where the suite makes its tensors, for example ``"cuda"``; None = torch's default.
    """
    with _default_device(device):
        subject = operator_rules.OperatorSubject(target)
        batches = [make() for make in operator_rules.LISTS] if lists is None else lists
        once = () if lists else operator_rules.ONCE
        _run(f"operator {subject.name}", subject, operator_rules.ON_LISTS, batches, once, rules)


def check_objective(
    make: Callable[[], objective_rules.Objective],
    stages: int,
    lists: Sequence[Lists] | None = None,
    *,
    rules: Collection[str] | None = None,
    groups: int = 4,
    deterministic: bool = True,
    device: str | None = None,
) -> None:
    """Check a cascade objective against the rules that hold for every objective.

    The rules: the total is a finite scalar with named terms, and every stage gets a finite gradient; masked items
    are inert; the order of the items does not matter; lists without a valid item change nothing; inputs are not
    written to; half precision and autocast are computed in float32; scores of 1e4 are digested; off the CPU nothing
    is read on the host; pickle brings the objective back.

    Args:
        make: A function without arguments that builds the objective, called as
            ``objective(scores, labels, mask, groups=..., quotas=..., k=...)``.
        stages: Number of stages it is built for, at most 4.
        lists: Batches to try instead of the built-in ones; only the rules that apply to any batch are then checked.
        rules: Names of the rules to check, as they stand in the error message; None = all.
        groups: Number of sample groups that the objective expects.
        deterministic: Whether the same input gives the same output; comparisons are left out if not.
        device: Where the suite makes its tensors, for example ``"cuda"``; None = torch's default.
    """
    with _default_device(device):
        subject = objective_rules.ObjectiveSubject(make, stages, groups, deterministic)
        batches = [build() for build in objective_rules.LISTS] if lists is None else lists
        once = () if lists else objective_rules.ONCE
        _run(f"objective {subject.name}", subject, objective_rules.ON_LISTS, batches, once, rules)


def check_data_module(make: Callable[[], CascadeDataModule], *, rules: Collection[str] | None = None) -> None:
    """Check a data module against the rules that hold for every data module. Needs Lightning.

    The rules: the schema is known before data are prepared; batches have its columns, ids that are rows of their
    tables, finite values, and padding ids where there is nothing; pool items are distinct; padding has label 0 and
    group -1; labels are grades or places, as declared; the same seed gives the same batches; an evaluated list does
    not depend on the batch size, the number of processes or the pass; no request is lost or repeated; training
    resumes at the exact batch; hyper-parameters are plain and restore the data module; sampled negatives are never
    an item of the list and never repeated; the catalogue holds every listed item; `list_length` is right; shards
    can be sent to worker processes.

    Args:
        make: A function without arguments that builds the data module, or its class. It is called often and all
            batches are read, so use a small data set; each split needs at least 3 requests.
        rules: Names of the rules to check, as they stand in the error message; None = all.
    """
    subject = data_rules.DataSubject(make)
    _run(f"data module {subject.name}", subject, (), (), data_rules.RULES, rules)


def _default_device(device: str | None) -> AbstractContextManager[object]:
    return nullcontext() if device is None else torch.device(device)


def _run(
    name: str,
    subject: Subject,
    on_lists: Sequence[Callable[[Subject, Lists], None]],
    batches: Sequence[Lists],
    once: Sequence[Callable[[Subject], None]],
    chosen: Collection[str] | None,
) -> None:
    rules = [(title(rule), partial(rule, subject, batch)) for rule in on_lists for batch in batches]
    rules += [(title(rule), partial(rule, subject)) for rule in once]
    known = {rule for rule, _ in rules}
    if chosen is not None and not set(chosen) <= known:
        raise ValueError(f"no rule is called {sorted(set(chosen) - known)}; the rules are {sorted(known)}")
    run_rules(name, [(rule, check) for rule, check in rules if chosen is None or rule in chosen])
