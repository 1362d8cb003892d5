"""Every registered loss keeps the contract: on the suite's own lists, and on lists drawn by hypothesis."""

import pytest
from hypothesis import given, settings

from recsys_topk import operators
from recsys_topk.losses import ApproxNDCGLoss, LambdaLoss, ListNetLoss, RankNetLoss, SoftmaxLoss, registry
from recsys_topk.ops import backend
from recsys_topk.testing import check_loss, loss_rules
from recsys_topk.testing.comparison import title
from recsys_topk.testing.lists import ordinary, ragged, tied
from tests.conftest import long_except
from tests.strategies import lists

CLASSES = registry.classes()
VARIANTS = {
    "approx_ndcg linear": lambda: ApproxNDCGLoss(tau=0.3, gain="linear"),
    "lambdaloss ndcg1": lambda: LambdaLoss("ndcg1", pairs="mean", log_base="e"),
    "lambdaloss ndcg2": lambda: LambdaLoss("ndcg2", sigma=0.5, gain="linear"),
    "listnet normalised": lambda: ListNetLoss(target="normalised", tau=0.5),
    "ranknet by label": lambda: RankNetLoss(sigma=2.0, weighting="squared_label_difference", pairs="sum"),
    "softmax against negatives": lambda: SoftmaxLoss(tau=0.7, against="negatives"),
    "softmax with k = positives": lambda: SoftmaxLoss(k="positives"),
}


# Compilation takes most of the time. The operators' losses are compiled by name in test_topk_losses.
RULES = [title(rule) for rule in (*loss_rules.ON_LISTS, *loss_rules.ONCE)]
COMPILED = [rule for rule in RULES if "compiled" in rule]
NOT_COMPILED = [rule for rule in RULES if "compiled" not in rule]
BY_BACKEND = [*map(title, loss_rules.ON_LISTS), "large scores give finite results"]


@pytest.mark.parametrize("name", CLASSES)
def test_every_loss_keeps_the_contract(name):
    check_loss(CLASSES[name], rules=NOT_COMPILED)


@pytest.mark.parametrize(
    "name", long_except([name for name in CLASSES if name not in operators.available()], "lambdaloss", "softmax")
)
def test_every_loss_compiles(name):
    assert len(COMPILED) == 1
    check_loss(CLASSES[name], rules=COMPILED)


@pytest.mark.parametrize("name", VARIANTS)
def test_loss_options_keep_the_contract(name):
    check_loss(VARIANTS[name], [ordinary(), ragged(), tied()])
    check_loss(VARIANTS[name], rules=["gradient matches finite differences"])


@pytest.mark.parametrize("name", CLASSES)
def test_every_loss_keeps_the_contract_on_the_torch_backend(name):
    """Only the torch implementations, only the rules about values and gradients; the other tests run on "auto"."""
    with backend("torch"):
        check_loss(CLASSES[name], rules=BY_BACKEND)


@pytest.mark.parametrize("name", CLASSES)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(drawn=lists())
def test_every_loss_keeps_the_contract_on_drawn_lists(name, drawn):
    check_loss(CLASSES[name], [drawn])


def test_registered_names_are_lower_case_python_names():
    for name in (*CLASSES, *operators.available()):
        assert name.isidentifier(), f"{name!r} must be a Python name; use underscores"
        assert name == name.lower(), f"{name!r} must be lower case"
