"""The rules that losses, operators and objectives share, and the base class of what is under test."""

from __future__ import annotations

import copy
import math
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from recsys_topk.testing.comparison import (
    LOOSE,
    TIGHT,
    gradient_of,
    require,
    require_finite,
    require_refused_second_derivative,
    require_refused_transform,
    require_same,
    require_second_derivative,
    require_transforms,
)  # fmt: skip
from recsys_topk.testing.host_reads import DEVICE, no_host_reads
from recsys_topk.testing.lists import Lists, distinct, extreme, ordinary, ragged, short, short_ragged


@dataclass(frozen=True)
class Result:
    """The values of a subject by name, of the batch (), of each list (B,) or of each item (B, N), and the gradients."""

    values: dict[str, Tensor]
    gradients: list[Tensor]

    def row(self, row: int) -> Result:
        """Return the result of one list."""
        here = slice(row, row + 1)
        return Result({name: x[here] for name, x in self.values.items()}, [x[here] for x in self.gradients])

    def columns(self, order: Tensor) -> Result:
        """Return the result with the items in the given order."""
        values = {name: x[:, order] if x.dim() == 2 else x for name, x in self.values.items()}
        return Result(values, [x[:, order] for x in self.gradients])

    def require_same(self, expected: Result, change: str, given: object, tolerance: float = TIGHT) -> None:
        """Raise unless values and gradients agree with those of another result. `change` begins the message."""
        for name, value in self.values.items():
            require_same(value, expected.values[name], f"{change} the {name}", given, tolerance)
        for number, (one, other) in enumerate(zip(self.gradients, expected.gradients, strict=True)):
            require_same(one, other, f"{change} the gradient of score tensor {number}", given, tolerance)


class Subject(ABC):
    """A loss, an operator or an objective under test. Rules use copies of it."""

    deterministic = equivariant = tie_fair = exact_gradient = transformable = True
    sizes: Sequence[float] = (1e4, 1e30)  # of the large scores
    measured: dict[str, Any] = {}  # noqa: RUF012  # attributes for `measure`

    def __init__(self, template: Any) -> None:
        self.template, self.name = template, type(template).__name__

    def build(self, **attributes: Any) -> Any:
        """Return a copy of the template with the given attributes."""
        built = copy.deepcopy(self.template)
        for name, value in attributes.items():
            setattr(built, name, value)
        return built

    def cuts(self, lists: Lists) -> list[int | None]:
        """Return the values of k to test."""
        return [lists.k]

    def forms(self, lists: Lists) -> list[tuple[bool, int | Tensor | None, dict[str, Any]]]:
        """Return the calls that must not read values: whether there is a mask, k, and attributes of the copy."""
        return [(False, lists.k, {}), (True, lists.k, {})]

    def inputs(self, lists: Lists) -> list[Tensor]:
        """Return the tensors of scores, (B, N)."""
        return [lists.scores.clone().requires_grad_()]

    @abstractmethod
    def values(
        self, built: Any, scores: Sequence[Tensor], lists: Lists, mask: Tensor | None, k: int | Tensor | None
    ) -> dict[str, Tensor]:
        """Call a copy; return its values by name. Gradients are those of the first one."""

    def measure(self, lists: Lists, k: int | Tensor | None, built: Any = None) -> Result:
        """Return the values for a batch and their gradients. Values of items are weighted by a function of labels."""
        scores = self.inputs(lists)
        built = self.build(**self.measured) if built is None else built
        return self.differentiate(self.values(built, scores, lists, lists.mask, k), scores, lists)

    def differentiate(self, values: dict[str, Tensor], scores: Sequence[Tensor], lists: Lists) -> Result:
        """Return values with their gradients."""
        total = next(iter(values.values()))
        if total.dim() == 2:  # the weights move with the items
            total = total * (torch.cos(1.0 + lists.labels) * lists.mask).to(total.dtype)
        return Result({name: x.detach() for name, x in values.items()}, gradient_of(total, *scores))

    def check(self, result: Result, given: object) -> None:
        """Raise unless values and gradients are finite."""
        for name, value in result.values.items():
            require_finite(value, f"the {name}", given)
        for gradient in result.gradients:
            require_finite(gradient, "the gradient", given)


class FunctionSubject(Subject):
    """A loss or an operator: a function of one tensor of scores."""

    compiles_unmasked = True

    def function(self, lists: Lists, k: int | None) -> Callable[..., Tensor]:
        """Return the first value as a function of the scores, (B, N), and a mask (by default that of `lists`)."""
        built = self.build(**self.measured)

        def value(scores: Tensor, mask: Tensor = lists.mask) -> Tensor:
            return next(iter(self.values(built, [scores], lists, mask, k).values()))

        return value


def masked_items_have_no_effect(subject: Subject, lists: Lists) -> None:
    """Masked items of any value change neither values nor gradients, and get no gradient."""
    wide, where = lists.with_junk()
    for k in subject.cuts(lists):
        plain, padded = subject.measure(lists, k), subject.measure(wide, k)
        for given, result in ((lists, plain), (wide, padded)):
            for gradient in result.gradients:
                require(bool((gradient[~given.mask] == 0).all()), "a masked item got a gradient", given)
        if subject.deterministic:
            padded.columns(where).require_same(plain, "masked items changed", wide)


def order_of_items_does_not_matter(subject: Subject, lists: Lists) -> None:
    """Permuting the items of a list permutes values of items and gradients, and changes no other value."""
    if not (subject.deterministic and subject.equivariant and (subject.tie_fair or distinct(lists))):
        return
    other, order = lists.shuffled()
    for k in subject.cuts(lists):
        expected = subject.measure(lists, k).columns(order)
        subject.measure(other, k).require_same(expected, "permuting the items changed", lists)


def lists_do_not_influence_each_other(subject: FunctionSubject, lists: Lists) -> None:
    """Each list has the same values and gradient alone as in the batch."""
    for k in subject.cuts(lists) if subject.deterministic else ():
        together = subject.measure(lists, k)
        for row in range(len(lists.scores)):
            alone = subject.measure(lists.rows(torch.tensor([row])), k)
            alone.require_same(together.row(row), f"for list {row}, being alone changed", lists)


def inputs_are_not_modified(subject: Subject, lists: Lists) -> None:
    """Neither the forward nor the backward pass modifies its inputs, with and without a mask."""
    clean = lists.with_scores(torch.where(lists.mask, lists.scores, 0.0))
    for k in subject.cuts(lists):
        for masked in (True, False):
            given = replace(clean, labels=clean.labels.clone(), mask=clean.mask.clone())
            scores = subject.inputs(given)
            values = subject.values(subject.build(), scores, given, given.mask if masked else None, k)
            gradient_of(next(iter(values.values())), *scores)
            same = torch.equal(given.labels, lists.labels) and torch.equal(given.mask, lists.mask)
            same = same and all(map(torch.equal, scores, subject.inputs(clean)))
            require(same, "the call changed its input", lists)


def half_precision_is_computed_in_float32(subject: Subject) -> None:
    """float16, bfloat16 and autocast give the float32 result in float32; float64 stays float64."""
    lists = ragged()
    for k in subject.cuts(lists):
        for value in subject.measure(lists, k).values.values():
            require(value.dtype == torch.float64, f"float64 scores gave {value.dtype}", lists)
        for dtype in (torch.float16, torch.bfloat16):
            half = lists.to(dtype)
            plain, exact = subject.measure(half, k), subject.measure(half.to(torch.float32), k)
            with torch.autocast(half.scores.device.type, dtype=torch.bfloat16):
                cast = subject.measure(half, k)
            for gradient in plain.gradients:
                require_finite(gradient, "the gradient", half)
            for how, result in ((f"{dtype} scores", plain), ("autocast", cast)):
                for name, value in result.values.items():
                    require(value.dtype == torch.float32, f"{how} gave {value.dtype}", half)
                    if subject.deterministic:
                        require_same(value, exact.values[name], f"{how} changed the {name}", half, LOOSE)


def validate_raises_on_non_finite_scores(subject: FunctionSubject) -> None:
    """validate=True raises a ValueError for NaN or infinity among valid scores, but not for padding."""
    lists = ragged()
    for k in subject.cuts(lists):
        for bad in (math.nan, math.inf, -math.inf):
            built = subject.build(validate=True)
            subject.values(built, [torch.where(lists.mask, lists.scores, bad)], lists, lists.mask, k)
            spoilt = lists.with_scores(lists.scores.masked_fill(torch.arange(7) == 4, bad))
            try:
                subject.values(subject.build(validate=True), [spoilt.scores], spoilt, spoilt.mask, k)
            except ValueError:
                continue
            require(False, f"validate=True did not raise a ValueError for a valid score of {bad}", spoilt)


def gradient_matches_finite_differences(subject: FunctionSubject) -> None:
    """The gradient matches finite differences in float64, away from ties, unless exact_gradient = False is declared."""
    for lists in (ordinary(), ragged()) if subject.exact_gradient and subject.deterministic else ():
        for k in subject.cuts(lists):
            scores = lists.scores.clone().requires_grad_()
            same = torch.autograd.gradcheck(subject.function(lists, k), (scores,), raise_exception=False)
            require(same, f"the gradient (k = {k}) differs from finite differences", lists)


def second_derivatives_are_correct_or_raise(subject: FunctionSubject) -> None:
    """The derivative of a gradient with create_graph=True is correct or raises. It is never silently 0."""
    for lists in (ordinary(), ragged()):
        for k in subject.cuts(lists):
            function = subject.function(lists, k)
            if subject.deterministic:
                require_second_derivative(function, lists.scores, subject.exact_gradient, lists)
            else:
                require_refused_second_derivative(function, lists.scores, lists)


def torch_func_transforms_agree(subject: FunctionSubject) -> None:
    """torch.func and forward mode work. An operator that declares transformable = False raises a clear error."""
    check = require_transforms if subject.transformable else require_refused_transform
    for lists in (ordinary(), ragged()):
        for k in subject.cuts(lists):
            check(subject.function(lists, k), lists.scores, lists.mask, lists)


def compiled_results_are_equal(subject: FunctionSubject) -> None:
    """torch.compile(fullgraph=True) gives the same values and gradient. Losses of operators are compiled masked."""
    unmasked = [(short(), None, subject.cuts(short())[0])] if subject.compiles_unmasked else []
    for lists, mask, k in (*unmasked, (short_ragged(), short_ragged().mask, short_ragged().k)):
        torch.compiler.reset()
        scores = subject.inputs(lists)
        compiled = torch.compile(subject.build(**subject.measured), fullgraph=True, backend="aot_eager")
        found = subject.differentiate(subject.values(compiled, scores, lists, mask, k), scores, lists)
        if subject.deterministic:
            found.require_same(subject.measure(lists, k), "compiling changed", lists)
    torch.compiler.reset()


def large_scores_give_finite_results(subject: Subject) -> None:
    """float32 scores of 1e4 and more, far from 0 or very close together, give finite values and gradients."""
    for lists in extreme(subject.sizes):
        for k in subject.cuts(lists):
            subject.check(subject.measure(lists, k), lists)


def no_values_are_read_on_the_host(subject: Subject) -> None:
    """On devices other than the CPU neither pass waits for the device, with and without a mask, for every form of k."""
    lists = ordinary()
    there = Lists(lists.scores.float().to(DEVICE), lists.labels.float().to(DEVICE), lists.mask.to(DEVICE), lists.k)
    for masked, k, attributes in subject.forms(there):
        built, scores = subject.build(**attributes), subject.inputs(there)
        if isinstance(built, nn.Module):
            built.to(DEVICE)
        with no_host_reads():
            values = subject.values(built, scores, there, there.mask if masked else None, k)
            gradient_of(torch.stack([x.sum() for x in values.values()]), *scores)


def require_stored(subject: Subject) -> None:
    """Raise unless pickle and state_dict restore a subject that gives the same values."""
    lists, built, loaded = ordinary(), subject.build(), subject.build()
    copies = {"pickled": pickle.loads(pickle.dumps(built))}
    if isinstance(loaded, nn.Module):
        loaded.load_state_dict(built.state_dict())
        copies["state_dict"] = loaded
    for k in subject.cuts(lists):
        expected = subject.measure(lists, k, built)
        for kind, other in copies.items():
            found = subject.measure(lists, k, other)
            if subject.deterministic:
                found.require_same(expected, f"the {kind} copy changes", lists)
