"""Every registered objective keeps the rules of the public contract suite."""

from __future__ import annotations

import pytest

from recsys_topk.cascades.objectives.base import CascadeObjective, registry
from recsys_topk.losses import registry as losses
from recsys_topk.ops import backend
from recsys_topk.testing.contract import check_objective


def make(name: str, stages: int) -> CascadeObjective:
    cls = registry.resolve(name)
    return cls(losses.get("sigmoid" if cls.needs_sum else "dftopk"), stages)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("name", sorted(registry.available()))
def test_objective_keeps_the_rules(name: str, stages: int) -> None:
    check_objective(lambda: make(name, stages), stages)


@pytest.mark.parametrize("name", sorted(registry.available()))
def test_objective_keeps_the_rules_on_the_torch_backend(name: str) -> None:
    with backend("torch"):
        check_objective(lambda: make(name, 2), 2)


def does_not_depend_on_item_order(name: str) -> bool:
    operator = losses.get(name).operator
    return operator is not None and operator.equivariant and operator.tie_fair and operator.deterministic


OPERATORS = [name for name in losses.available() if does_not_depend_on_item_order(name)]


@pytest.mark.parametrize("name", OPERATORS)
def test_joint_keeps_the_rules_with_every_operator(name: str) -> None:
    check_objective(lambda: registry.resolve("joint")(losses.get(name), 2), 2)


@pytest.mark.parametrize(
    "name", [name for name in OPERATORS if losses.get(name).takes_item_weights and losses.get(name).operator.sums_to_k]
)
def test_quota_keeps_the_rules_with_every_operator_that_sums_to_k(name: str) -> None:
    check_objective(lambda: registry.resolve("quota")(losses.get(name), 2), 2)
