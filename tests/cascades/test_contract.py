"""Every registered objective keeps the rules of the public contract suite."""

from __future__ import annotations

import pytest

from recsys_topk.cascades.objectives.base import registry
from recsys_topk.losses import registry as losses
from recsys_topk.ops import backend
from recsys_topk.testing.contract import check_objective


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("name", sorted(registry.available()))
def test_objective_keeps_the_rules(name: str, stages: int) -> None:
    check_objective(lambda: registry.resolve(name)(losses.get("dftopk"), stages), stages)


@pytest.mark.parametrize("name", sorted(registry.available()))
def test_objective_keeps_the_rules_on_the_torch_backend(name: str) -> None:
    with backend("torch"):
        check_objective(lambda: registry.resolve(name)(losses.get("dftopk"), 2), 2)


def does_not_depend_on_item_order(name: str) -> bool:
    operator = losses.get(name).operator
    return operator is not None and operator.equivariant and operator.tie_fair and operator.deterministic


@pytest.mark.parametrize("name", [name for name in losses.available() if does_not_depend_on_item_order(name)])
def test_joint_keeps_the_rules_with_every_operator(name: str) -> None:
    check_objective(lambda: registry.resolve("joint")(losses.get(name), 2), 2)
