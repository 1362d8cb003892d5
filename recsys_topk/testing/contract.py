"""Functions that check losses, operators, objectives, stages and data modules against the contract of this package.

Each function raises one AssertionError that names every broken rule, the class, and the input that breaks it. Neither
pytest nor hypothesis is needed: the test of a plug-in is one line.
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
    from recsys_topk.cascades.features import FeatureEmbedding
    from recsys_topk.cascades.stage import Stage
    from recsys_topk.datamodules.base import CascadeDataModule
    from recsys_topk.tabular.schema import Schema

Subject = TypeVar("Subject")


def check_loss(
    target: type[RankingLoss] | Callable[[], RankingLoss] | RankingLoss,
    lists: Sequence[Lists] | None = None,
    *,
    rules: Collection[str] | None = None,
    device: str | None = None,
) -> None:
    """Check a loss against the rules for all losses.

    The rules:

    - masked items have no effect on value and gradient, whatever their values (including NaN and infinity);
    - the order of the items does not matter, and lists do not influence each other;
    - lists without a positive are skipped, and a batch of only such lists gives 0 with zero gradients;
    - k is one int or one int per list, including 0 and values above the number of items;
    - the same input gives the same loss, and equal items get equal gradients;
    - flat lists (`lengths`, `list_ids`) give the same result as rows;
    - inputs are not modified, and labels get no gradient;
    - an item of weight 2 (`item_weights`) equals two copies, one of weight 0 a masked item, or `takes_item_weights` is
      False and the call raises;
    - losses are finite and not negative, also for scores of 1e4 and 1e30;
    - half precision and autocast are computed in float32, and float64 stays float64;
    - weights and reductions are consistent, and validate=True raises on scores that are not finite;
    - the gradient matches finite differences, second derivatives (create_graph=True) are correct or raise, and
      torch.func and forward mode (jacfwd, hessian, torch.autograd.forward_ad) agree with autograd;
    - torch.compile(fullgraph=True) gives the same result;
    - on devices other than the CPU no values are read on the host;
    - pickle and state_dict restore the loss.

    A loss with an operator is exempt from the rules that its operator does not declare (`equivariant`, `tie_fair`,
    `deterministic`, `exact_gradient`, `transformable`). A loss whose gradient intentionally differs from the derivative
    of its value sets ``exact_gradient: ClassVar[bool] = False``.

    Args:
        target: The class, a function without arguments that returns an instance, or an instance.
        lists: Batches to use instead of the built-in ones. Only the rules for arbitrary batches are then checked.
        rules: Names of the rules to check, as in the error message; None = all.
        device: Device of the tensors, for example ``"cuda"``; None = torch's default.

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
    """Check an operator against the rules for all operators, and against its declarations.

    The rules:

    - masked items have no effect and get p = 0, log q = 0 and no gradient;
    - lists do not influence each other;
    - p is in [0, 1] and agrees with both logarithms;
    - k = 0 and k >= the number of valid items give exact results without a gradient;
    - k is one int or one int per list, or a float if `fractional_k` is declared;
    - inputs are not modified;
    - half precision and autocast are computed in float32, and float64 stays float64;
    - validate=True raises on scores that are not finite;
    - second derivatives (create_graph=True) are correct or raise, and torch.func and forward mode agree with autograd;
    - torch.compile(fullgraph=True) gives the same result;
    - on devices other than the CPU no values are read on the host;
    - pickle and state_dict restore the operator;
    - scores of 1e4 and 1e30, empty batches and empty lists give finite results;
    - an item of weight 2 (`item_weights`) equals two copies, or `takes_item_weights` is False and the call raises;
    - with tau="auto", scores c x give the membership of x, unless `scales_with_tau` is False.

    If declared: the order of the items does not matter (`equivariant`), equal scores get equal membership and gradient
    (`tie_fair`), the membership sums to k (`sums_to_k`), the same input gives the same output (`deterministic`), and
    the gradient matches finite differences (`exact_gradient`).

    The arguments are those of `check_loss`.
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
    """Check a cascade objective against the rules for all objectives.

    The rules:

    - the total is a finite scalar with named terms, and every stage gets a finite gradient;
    - masked items have no effect, and the order of the items does not matter;
    - lists without a valid item are skipped;
    - inputs are not modified, and labels get no gradient;
    - half precision and autocast are computed in float32;
    - scores of 1e4 give finite results;
    - on devices other than the CPU no values are read on the host;
    - pickle restores the objective.

    Args:
        make: A function without arguments that returns the objective. The objective is called as
            ``objective(scores, labels, mask, groups=..., quotas=..., k=...)``.
        stages: Number of stages of the objective, at most 4.
        lists: Batches to use instead of the built-in ones. Only the rules for arbitrary batches are then checked.
        rules: Names of the rules to check, as in the error message; None = all.
        groups: Number of sample groups that the objective expects.
        deterministic: Whether the same input gives the same output. If not, results are not compared.
        device: Device of the tensors, for example ``"cuda"``; None = torch's default.
    """
    with _default_device(device):
        subject = objective_rules.ObjectiveSubject(make, stages, groups, deterministic)
        batches = [build() for build in objective_rules.LISTS] if lists is None else lists
        once = () if lists else objective_rules.ONCE
        _run(f"objective {subject.name}", subject, objective_rules.ON_LISTS, batches, once, rules)


def check_stage(
    make: Callable[[FeatureEmbedding], Stage], schema: Schema | None = None, *, rules: Collection[str] | None = None
) -> None:
    """Check a stage against the rules for all stages. Needs TorchRec.

    The rules:

    - scores are (B, N), and finite for real candidates, also with an empty history;
    - masked candidates and padding of histories have no effect;
    - the order of the candidates and of the pool does not matter, and lists do not influence each other in evaluation;
    - every trained parameter gets a finite gradient;
    - the dot products of the vectors of a stage with towers are its scores;
    - a prefix of a history is encoded like a history of that length (`HistoryEncoder`);
    - on devices other than the CPU no values are read on the host;
    - pickle and state_dict restore the stage.

    Args:
        make: A function of the embedding that returns the stage, or its class.
        schema: The features; None = every kind of feature, with and without ages of the views.
        rules: Names of the rules to check, as in the error message; None = all.

    Example:
        >>> from recsys_topk.cascades.stages import TwoTower
        >>> check_stage(lambda embedding: TwoTower(embedding, hidden=[8, 4], history="recency"))
    """
    from recsys_topk.testing import stage_rules
    from recsys_topk.testing.batches import mixed_schema

    for one in (mixed_schema(), mixed_schema(ages=True)) if schema is None else (schema,):
        subject = stage_rules.StageSubject(make, one)
        _run(f"stage {subject.name}", subject, (), (), stage_rules.RULES, rules)


def check_data_module(make: Callable[[], CascadeDataModule], *, rules: Collection[str] | None = None) -> None:
    """Check a data module against the rules for all data modules. Needs Lightning.

    The rules:

    - the outline of the schema is known before the data are prepared;
    - batches have the columns of the schema, ids that are rows of their tables, finite values, and padding ids after
      the end of a history;
    - pool items are distinct, and padding has label 0 and group -1;
    - labels are grades or places, as declared;
    - the same seed gives the same batches;
    - an evaluated list does not depend on the batch size, the number of processes or the pass;
    - no request is lost or repeated;
    - training resumes at the exact batch;
    - hyper-parameters are plain values and restore the data module;
    - sampled negatives are distinct and never items of the list;
    - the catalogue contains every item of the lists;
    - `list_length` is correct;
    - shards can be sent to worker processes.

    Args:
        make: A function without arguments that returns the data module, or its class. It is called often and all
            batches are read, so use a small data set. Each split needs at least 3 requests.
        rules: Names of the rules to check, as in the error message; None = all.
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
        raise ValueError(f"unknown rules {sorted(set(chosen) - known)}; the rules are {sorted(known)}")
    run_rules(name, [(rule, check) for rule, check in rules if chosen is None or rule in chosen])
