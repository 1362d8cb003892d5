"""Every registered cascade objective keeps the contract, for two and three stages."""

import pytest

from recsys_topk import losses
from recsys_topk.cascades.objectives.base import registry
from recsys_topk.testing import check_objective

CLASSES = registry.classes()


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize(
    ("name", "loss"),
    [
        (name, loss)
        for name, cls in CLASSES.items()
        for loss in (["lapsum"] if cls.needs_sum else ["dftopk", "neuralsort"])
    ],
)
def test_every_objective_keeps_the_contract(name, loss, stages):
    check_objective(lambda: CLASSES[name](losses.get(loss), stages), stages, groups=stages + 2)
