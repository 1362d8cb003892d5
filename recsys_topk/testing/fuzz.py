"""Random lists against every loss and operator: count results that are not finite, exceptions and broken sums.

The contract suite checks rules on a few chosen lists. The fuzzer draws many others: masks, ties, scores far from 0 and
far apart, half precision, and one k per list. Needs torch only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from recsys_topk.losses.base import RankingLoss
from recsys_topk.losses.base import registry as losses
from recsys_topk.numerics import SLACK
from recsys_topk.operators.base import TopKOperator
from recsys_topk.operators.base import registry as operators
from recsys_topk.testing.random_lists import RandomLists, random_lists

Kind = Literal["loss", "operator"]


@dataclass(frozen=True)
class Findings:
    """The findings for one loss or operator."""

    subject: str  # for example "loss dftopk"
    batches: int = 0  # number of batches tried, which is also the number of the next batch
    lists: int = 0  # number of lists tried
    not_finite: int = 0  # number of lists with a value or gradient that is not finite
    not_k: int = 0  # number of lists whose membership does not sum to k, for operators that declare `sums_to_k`
    exceptions: int = 0  # number of batches that raised
    first: str = field(default="", repr=False)  # the first fault and its input; empty if there was none

    @property
    def clean(self) -> bool:
        """Whether no fault was found."""
        return not (self.not_finite or self.not_k or self.exceptions)


def fuzz(names: Sequence[str] | None = None, lists: int = 100_000, seed: int = 0) -> list[Findings]:
    """Try random lists on losses and operators by name. Return one row of findings for each.

    Args:
        names: Names of losses and operators (a name of both selects both); None = all.
        lists: Lists per loss and operator.
        seed: Seed of the lists, and of operators that draw noise; equal seeds give equal findings.

    Example:
        >>> [(row.subject, row.clean) for row in fuzz(["dftopk"], lists=512)]
        [('loss dftopk', True), ('operator dftopk', True)]
    """
    return [fuzz_one(kind, name, lists, seed) for kind, name in fuzz_subjects(names)]


def fuzz_subjects(names: Sequence[str] | None = None) -> list[tuple[Kind, str]]:
    """Return the losses, then the operators, with these names; None = all."""
    chosen = sorted({*losses.available(), *operators.available()}) if names is None else names
    for name in chosen:
        if name not in losses.available() and name not in operators.available():
            raise losses.unknown(name)
    found: list[tuple[Kind, str]] = [("loss", name) for name in chosen if name in losses.available()]
    return found + [("operator", name) for name in chosen if name in operators.available()]


def fuzz_one(kind: Kind, name: str, lists: int = 100_000, seed: int = 0, **options: Any) -> Findings:
    """Try random lists on one loss or operator by name; the options are those of `fuzz_loss`."""
    if kind == "loss":
        return fuzz_loss(losses.resolve(name), lists, seed, **options)
    return fuzz_operator(operators.resolve(name), lists, seed, **options)


def fuzz_loss(
    cls: Callable[..., RankingLoss],
    lists: int = 100_000,
    seed: int = 0,
    *,
    device: str = "cpu",
    progress: Callable[[Findings], object] | None = None,
    resume: Findings | None = None,
) -> Findings:
    """Try random lists on a loss: its value and its gradient must be finite.

    Args:
        cls: The class; `tau` is set if the loss or its operator has one.
        lists: Number of lists.
        seed: Seed of the lists.
        device: Device of the tensors.
        progress: Called with the findings so far after each batch.
        resume: Findings of an interrupted run with the same lists, seed and device; the result equals that of one run.
    """

    def run(batch: RandomLists) -> dict[str, Tensor]:
        loss = _with_tau(cls, batch.tau)
        loss.reduction = "none"
        loss._skipped_batches = 1  # batches without a positive are drawn on purpose
        scores = batch.scores.clone().requires_grad_()
        given = batch.item_weights if loss.takes_item_weights else None
        value = loss(scores, batch.labels, batch.mask, k=batch.k, weights=batch.weights, item_weights=given)
        gradient = _gradient(value, scores)
        return {"not_finite": ~(torch.isfinite(value) & torch.isfinite(gradient).all(1))}

    start = resume or Findings(f"loss {getattr(cls, 'name', cls.__name__)}")
    return _collect(start, run, lists, seed, device, progress, getattr(cls, "cost", "n^2"))


def fuzz_operator(
    cls: Callable[..., TopKOperator],
    lists: int = 100_000,
    seed: int = 0,
    *,
    device: str = "cpu",
    progress: Callable[[Findings], object] | None = None,
    resume: Findings | None = None,
) -> Findings:
    """Try random lists on an operator: no NaN, finite gradients, and the declared sum. Arguments as in `fuzz_loss`."""

    def run(batch: RandomLists) -> dict[str, Tensor]:
        operator = _with_tau(cls, batch.tau)
        scores = batch.scores.clone().requires_grad_()
        given = batch.item_weights if operator.takes_item_weights else None
        selection = operator(scores, batch.k, batch.mask, item_weights=given)
        p, q = selection.p, selection.log_q.exp()
        gradient = _gradient(p * batch.labels + q * (1.0 - batch.labels), scores)
        bad = ~(torch.isfinite(p) & torch.isfinite(q) & torch.isfinite(gradient)).all(1)
        found = {"not_finite": bad}
        if operator.sums_to_k:
            weights = selection.mask.double() if given is None else torch.where(selection.mask, given.double(), 0.0)
            wanted = torch.minimum(torch.as_tensor(batch.k, device=p.device).double(), weights.sum(1))
            tolerance = torch.full_like(wanted, sum_tolerance(p))
            if given is not None:  # sums of weights are rounded in proportion to their size, and equal within SLACK
                tolerance = tolerance * weights.sum(1).clamp_min(1.0) + SLACK * wanted
            found["not_k"] = ~(((p.double() * weights).sum(1) - wanted).abs() <= tolerance)
        return found

    start = resume or Findings(f"operator {getattr(cls, 'name', cls.__name__)}")
    return _collect(start, run, lists, seed, device, progress, getattr(cls, "cost", "n^2"))


def sum_tolerance(p: Tensor) -> float:
    """Return the allowed difference between the sum of a membership, (B, N), and k: 8 N rounding errors."""
    return 8.0 * p.shape[1] * torch.finfo(p.dtype).eps


def _with_tau(cls: Callable[..., Any], tau: float) -> Any:
    try:
        return cls(tau=tau)
    except TypeError:
        return cls()


def _gradient(value: Tensor, scores: Tensor) -> Tensor:
    """Return the gradient of the sum of `value`. Finite entries too large for float16 become 65504."""
    if not value.requires_grad:
        return torch.zeros_like(scores)
    (gradient,) = torch.autograd.grad(value.sum(), scores)
    if scores.dtype != torch.float16:
        return gradient
    largest = torch.finfo(scores.dtype).max
    return torch.nan_to_num(gradient, nan=torch.nan, posinf=largest, neginf=-largest)


def _collect(
    findings: Findings,
    run: Callable[[RandomLists], dict[str, Tensor]],
    lists: int,
    seed: int,
    device: str,
    progress: Callable[[Findings], object] | None,
    cost: str,
) -> Findings:
    with torch.random.fork_rng(devices=[]):
        while findings.lists < lists:
            batch = random_lists(seed, findings.batches, lists - findings.lists, cost).to(device)
            findings = _try(findings, run, batch)
            if progress is not None:
                progress(findings)
    return findings


def _try(findings: Findings, run: Callable[[RandomLists], dict[str, Tensor]], batch: RandomLists) -> Findings:
    """Return the findings including those of one more batch."""
    after: dict[str, Any] = {"batches": findings.batches + 1, "lists": findings.lists + len(batch.scores)}
    torch.manual_seed(batch.seed)  # for operators that draw noise
    try:
        found = run(batch)
    except Exception as error:  # any exception of the class under test is a finding
        after["exceptions"] = findings.exceptions + 1
        after["first"] = findings.first or f"{type(error).__name__}: {error}; first list {batch.list(0)}"
        return replace(findings, **after)
    for kind, bad in found.items():
        count = int(bad.sum())
        after[kind] = getattr(findings, kind) + count
        if count and not after.get("first", findings.first):
            after["first"] = f"{kind}: {batch.list(int(bad.int().argmax()))}"
    return replace(findings, **after)
