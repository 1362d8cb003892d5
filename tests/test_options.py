"""Options that a family of classes shares are declared once, and shown in full by every class of the family."""

from __future__ import annotations

import inspect
import pickle
from typing import Any, TypedDict

import pytest
from typing_extensions import Unpack

from recsys_topk.cascades.stage import Stage, StageOptions
from recsys_topk.cascades.stage import registry as stages
from recsys_topk.losses.base import LossOptions, RankingLoss
from recsys_topk.losses.base import registry as losses
from recsys_topk.operators.base import OperatorOptions, TopKOperator
from recsys_topk.operators.base import registry as operators
from recsys_topk.options import arguments_of, inherit_options, options_of
from recsys_topk.spec import Recorded, describe

FAMILIES: list[tuple[Any, Any, Any]] = [
    (RankingLoss, LossOptions, losses),
    (TopKOperator, OperatorOptions, operators),
    (Stage, StageOptions, stages),
]


@pytest.mark.parametrize(("base", "typed", "registry"), FAMILIES, ids=lambda part: getattr(part, "__name__", ""))
def test_every_class_shows_the_options_of_its_family(base: Any, typed: Any, registry: Any) -> None:
    shared = {name: one for name, one in options_of(base).items() if one.kind is one.KEYWORD_ONLY}
    assert list(shared) == list(typed.__annotations__)
    for cls in registry.classes().values():
        options = options_of(cls)
        assert not any(one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL) for one in options.values()), cls
        for name, one in shared.items():
            assert (options[name].default, options[name].annotation) == (one.default, one.annotation), (cls, name)
        assert options.keys() == arguments_of(cls.__doc__).keys(), cls


class Base(Recorded):
    """A base class.

    Args:
        seed: Seed of the
            generator.
        size: Number of items.
    """

    def __init__(self, seed: int = 42, *, size: int = 1, hidden: int = 0) -> None:
        self.seed, self.size = seed, size


class Seeds(TypedDict, total=False):
    seed: int
    size: int


class Child(Base):
    """A child.

    Args:
        root: A folder.
        size: Another description.
        options: See `Base`.

    Example:
        an example
    """

    def __init__(self, root: str, **options: Unpack[Seeds]) -> None:
        super().__init__(hidden=1, **options)
        self.root = root


class Grandchild(Child):
    """A grandchild.

    Args:
        options: See `Child`.
    """


def test_signature_and_docstring_are_written_out() -> None:
    assert str(inspect.signature(Child)) == "(root: str, *, seed: int = 42, size: int = 1) -> None"
    assert arguments_of(Child.__doc__) == {
        "root": "A folder.",
        "seed": "Seed of the generator.",
        "size": "Another description.",
    }
    assert (Child.__doc__ or "").startswith("A child.\n\nArgs:\n    root: A folder.\n")
    assert (Child.__doc__ or "").endswith("\n\nExample:\n    an example\n")
    assert arguments_of(Grandchild.__doc__) == arguments_of(Child.__doc__)


@pytest.mark.parametrize("cls", [Child, Grandchild])
def test_options_are_recorded_checked_and_pickled(cls: type[Child]) -> None:
    child = cls("a", seed=3)
    assert describe(child)["init_args"] == {"root": "a", "seed": 3}
    assert pickle.loads(pickle.dumps(child)).seed == 3
    with pytest.raises(TypeError, match=rf"{cls.__name__} has no option 'sede'; did you mean 'seed'\? it has: root, "):
        cls("a", sede=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="has no option 'hidden'"):
        cls("a", hidden=3)  # type: ignore[call-arg]


def test_other_variadic_constructors_are_left_alone() -> None:
    class Open(Base):
        def __init__(self, **anything: Any) -> None:
            super().__init__(**anything)

    inherit_options(Open)
    assert list(options_of(Open)) == ["anything"]
    assert describe(Open(seed=1))["init_args"] == {"seed": 1}
