"""Every operator has a loss of the same name, without a second file."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from recsys_topk import losses, operators
from recsys_topk.losses import LapSumLoss, TopKLoss, operator_losses
from recsys_topk.losses.base import RankingLoss
from recsys_topk.losses.base import registry as loss_registry
from recsys_topk.losses.from_operator import loss_of
from recsys_topk.operators.base import SoftSelection, TopKOperator
from recsys_topk.operators.base import registry as operator_registry
from recsys_topk.operators.score_scale import Tau
from recsys_topk.spec import build, describe

SCORES, LABELS = torch.tensor([[3.0, 1.0, 2.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0, 1.0]])

# Values of version 0.1.0, in which each of these losses was a class in its own file.
VALUES_OF_0_1: dict[str, tuple[dict[str, Any], float]] = {
    "DFTopKLoss": ({}, 0.8377),
    "DiffSortLoss": ({}, 0.8084),
    "HardTopKLoss": ({}, 6.9078),
    "LapSumLoss": ({}, 0.9665),
    "NeuralSortLoss": ({}, 1.5747),
    "PerturbedTopKLoss": ({"seed": 0}, 1.1609),
    "SigmoidTopKLoss": ({}, 0.8377),
    "SinkhornTopKLoss": ({}, 0.6956),
    "SoftSortLoss": ({}, 0.9866),
    "SparseTopKLoss": ({"tau": 2.0}, 3.8724),
}


@pytest.mark.parametrize("name", VALUES_OF_0_1)
def test_value_is_unchanged_and_old_class_path_loads(name: str) -> None:
    options, value = VALUES_OF_0_1[name]
    cls = getattr(losses, name)
    assert float(cls(k=2, **options)(SCORES, LABELS)) == pytest.approx(value, abs=6e-5)
    old = {"class_path": f"recsys_topk.losses.{cls.name}.{name}", "init_args": {"tau": 3.0}}
    loss = build(old, base=RankingLoss)
    assert (type(loss), loss.operator.tau) == (cls, 3.0)
    assert losses.registry.resolve(old["class_path"], trust=()) is cls


@pytest.mark.parametrize("name", operators.available())
def test_class_path_can_be_imported_in_a_new_module(name: str) -> None:
    cls = losses.registry.resolve(name)
    path = describe(cls())["class_path"]
    module, _, attribute = path.rpartition(".")
    assert importlib.util.find_spec(module).origin
    assert getattr(importlib.import_module(module), attribute) is cls
    assert path == f"recsys_topk.losses.{cls.__name__}"


def test_every_operator_has_a_loss() -> None:
    assert set(operators.available()) <= set(losses.available())
    for name in operators.available():
        assert type(losses.get(name).operator) is operators.registry.resolve(name)


def declared_arguments() -> dict[str, dict[str, str | None]]:
    """Return the arguments that type checkers see: for each class, name to default."""
    found = {}
    for node in ast.walk(ast.parse(Path(inspect.getfile(operator_losses)).read_text())):
        if isinstance(node, ast.ClassDef) and node.name.endswith("Loss"):
            (init,) = [one for one in node.body if isinstance(one, ast.FunctionDef)]
            names = [argument.arg for argument in init.args.args[1:]]
            found[node.name] = dict(zip(names, map(ast.literal_eval, init.args.defaults), strict=True))
    return found


def test_type_checkers_see_the_actual_arguments() -> None:
    seen = declared_arguments()
    assert seen.keys() == VALUES_OF_0_1.keys() | {"SmoothTopKLoss"}
    for name, arguments in seen.items():
        real = list(inspect.signature(getattr(losses, name)).parameters.values())
        assert {one.name: one.default for one in real if one.kind is not one.KEYWORD_ONLY} == arguments
        assert [one.name for one in real[len(arguments) :]] == ["k", "positive_above", "reduction", "validate"]


def test_arguments_have_types_and_descriptions() -> None:
    signature = inspect.signature(losses.registry.resolve("perturbed"))
    assert signature.parameters["tau"].annotation == Tau
    assert signature.parameters["seed"].annotation == (int | None)
    text = losses.registry.resolve("perturbed").__doc__ or ""
    assert "samples: Number of noise samples." in text
    assert "k: How many items to select" in text
    assert "Berthet et al. 2020" in text
    with pytest.raises(TypeError, match="LapSumLoss has no option 'taus'; did you mean 'tau'"):
        losses.get("lapsum", taus=1.0)


class Steep(TopKOperator):
    """Logistic membership around the mean.

    Args:
        tau: Temperature.
        power: Steepness.
    """

    cost: ClassVar[str] = "n"
    sums_to_k: ClassVar[bool] = False

    def __init__(self, tau: float = 1.0, power: int = 2, *, validate: bool = False) -> None:
        super().__init__(tau, validate=validate)
        self.power = power

    def select(self, scores: Tensor, k: int | Tensor, mask: Tensor) -> SoftSelection:
        z = (scores - scores.mean(1, keepdim=True)) * self.power / self.tau
        return SoftSelection(nn.functional.logsigmoid(z), nn.functional.logsigmoid(-z), mask)


@pytest.fixture
def steep() -> Iterator[type[TopKOperator]]:
    """An operator of another package, registered for one test."""
    Steep.name = "steep"
    operator_registry.register("steep", Steep)
    yield Steep
    operator_registry._classes.pop("steep")
    loss_registry._classes.pop("steep", None)


def test_operator_of_another_package_has_a_loss(steep: type[TopKOperator]) -> None:
    loss = losses.get("steep", power=3, k=2)
    assert (type(loss).__name__, type(loss).__module__) == ("SteepLoss", "recsys_topk.losses")
    assert isinstance(loss.operator, Steep)
    assert loss.operator.power == 3
    copy = pickle.loads(pickle.dumps(loss))
    rebuilt = build(describe(loss), base=RankingLoss)
    for other in (copy, rebuilt):
        assert torch.equal(other(SCORES, LABELS), loss(SCORES, LABELS))
    assert "power: Steepness." in (type(loss).__doc__ or "")


def test_hand_written_loss_replaces_the_generated_one(steep: type[TopKOperator]) -> None:
    made = losses.registry.resolve("steep")

    class Written(TopKLoss):
        name: ClassVar[str] = "steep"
        cost: ClassVar[str] = "n"

        def __init__(self) -> None:
            super().__init__(Steep(), k=2)

    assert losses.registry.resolve("steep") is Written is not made


def test_operator_with_variadic_options_raises() -> None:
    class Vague(TopKOperator):
        cost: ClassVar[str] = "n"

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)

        def select(self, scores: Tensor, k: int | Tensor, mask: Tensor) -> SoftSelection:
            raise NotImplementedError

    Vague.name = "vague"
    with pytest.raises(TypeError, match=r"has \*options; declare each option as a parameter"):
        loss_of(Vague)


def test_description_of_loss_with_operator_object_has_plain_values() -> None:
    """Regression: the hyper-parameters contained the operator object."""
    loss = TopKLoss(operators.LapSum(tau=3.0), k=2)
    plain = describe(loss)
    assert plain["init_args"] == {
        "operator": {"class_path": "recsys_topk.operators.lapsum.LapSum", "init_args": {"tau": 3.0}},
        "k": 2,
    }
    again = build(plain, base=RankingLoss)
    assert float(again(SCORES, LABELS)) == float(LapSumLoss(3.0, k=2)(SCORES, LABELS))
    assert describe(again) == plain


@pytest.mark.parametrize("operator", [{"tau": 1.0}, {"class_path": "lapsum", "tau": 1.0}])
def test_invalid_operator_description_raises(operator: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="the description of an operator must have a class_path"):
        TopKLoss(operator)
