"""Every registered operator keeps the contract: on the suite's own lists, and on lists drawn by hypothesis."""

import pytest
from hypothesis import given, settings

from recsys_topk.operators import registry
from recsys_topk.ops import backend
from recsys_topk.testing import check_operator, operator_rules
from recsys_topk.testing.comparison import title
from tests.conftest import long_except
from tests.strategies import lists

CLASSES = registry.classes()
BY_BACKEND = [*map(title, operator_rules.ON_LISTS), "large scores give finite results"]


RULES = [title(rule) for rule in (*operator_rules.ON_LISTS, *operator_rules.ONCE)]
COMPILED = [rule for rule in RULES if "compiled" in rule]


@pytest.mark.parametrize("name", CLASSES)
def test_every_operator_keeps_the_contract(name):
    check_operator(CLASSES[name], rules=[rule for rule in RULES if rule not in COMPILED])


@pytest.mark.parametrize("name", long_except(CLASSES, "dftopk", "neuralsort"))
def test_every_operator_compiles(name):
    assert len(COMPILED) == 1
    check_operator(CLASSES[name], rules=COMPILED)


@pytest.mark.parametrize("name", CLASSES)
def test_every_operator_keeps_the_contract_on_the_torch_backend(name):
    """Only the torch implementations, only the rules about values and gradients; the other tests run on "auto"."""
    with backend("torch"):
        check_operator(CLASSES[name], rules=BY_BACKEND)


@pytest.mark.parametrize("tau", [0.05, 20.0])
@pytest.mark.parametrize("name", CLASSES)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(drawn=lists())
def test_every_operator_keeps_the_contract_on_drawn_lists(name, tau, drawn):
    check_operator(lambda: CLASSES[name](tau=tau), [drawn])
