"""Random lists against every loss and operator: count results that are not finite, exceptions and broken sums.

The contract suite checks rules on a few chosen lists. This looks for the lists that nobody chose: masks, ties, scores
far from 0 and far apart, half precision, and a k of its own for each list. It needs torch only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from recsys_topk.losses.base import RankingLoss
from recsys_topk.losses.base import registry as losses
from recsys_topk.operators.base import TopKOperator
from recsys_topk.operators.base import registry as operators
from recsys_topk.testing.lists import JUNK_SCORES

Kind = Literal["loss", "operator"]

BATCH = 256
TEMPERATURES = (1e-3, 0.05, 1.0, 20.0, 500.0)
DTYPES = (torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16)
SCALES = (0.0, 1e-3, 1.0, 1.0, 10.0, 1e3, 1e5, 1e7, 1e30)
OFFSETS = (0.0, 0.0, 0.0, 1.0, -1e3, 1e6, -1e7)


@dataclass
class Findings:
    """What was found for one loss or operator.

    Attributes:
        subject: For example ``"loss dftopk"``.
        lists: Number of lists tried.
        not_finite: Number of lists with a value or gradient that is not finite.
        not_k: Number of lists whose membership does not sum to k, for operators that declare `sums_to_k`.
        exceptions: Number of batches that raised.
        first: What the first fault was and on which input; empty if there was none.
    """

    subject: str
    lists: int = 0
    not_finite: int = 0
    not_k: int = 0
    exceptions: int = 0
    first: str = field(default="", repr=False)

    @property
    def clean(self) -> bool:
        """Whether nothing was found."""
        return not (self.not_finite or self.not_k or self.exceptions)


@dataclass(frozen=True)
class _Batch:
    scores: Tensor
    labels: Tensor
    mask: Tensor | None
    k: int | Tensor
    weights: Tensor | None
    tau: float

    def to(self, device: str) -> _Batch:
        """Return the batch on a device."""
        moved: Any = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **moved)

    def list(self, row: int) -> str:
        """Return one list in words."""
        k = int(self.k[row]) if isinstance(self.k, Tensor) else self.k
        mask = None if self.mask is None else self.mask[row].int().tolist()
        return (
            f"scores={self.scores[row].tolist()} ({self.scores.dtype}) labels={self.labels[row].tolist()} "
            f"mask={mask} k={k} (per list: {isinstance(self.k, Tensor)}) tau={self.tau}"
        )


def fuzz(names: Sequence[str] | None = None, lists: int = 100_000, seed: int = 0) -> list[Findings]:
    """Try random lists on losses and operators by name and return one row of findings for each.

    Args:
        names: Names of losses and operators (a name that is both stands for both); None = all.
        lists: Lists per loss and operator.
        seed: Seed of the lists, and of operators that draw noise; equal seeds give equal findings.

    Example:
        >>> [(row.subject, row.clean) for row in fuzz(["dftopk"], lists=512)]
        [('loss dftopk', True), ('operator dftopk', True)]
    """
    return [fuzz_one(kind, name, lists, seed) for kind, name in fuzz_subjects(names)]


def fuzz_subjects(names: Sequence[str] | None = None) -> list[tuple[Kind, str]]:
    """Return the losses, then the operators, of these names; None = all."""
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
    progress: Callable[[int], object] | None = None,
) -> Findings:
    """Try random lists on a loss: its value and its gradient must be finite.

    Args:
        cls: The class; `tau` is set where its operator or the loss itself has one.
        lists: How many lists.
        seed: Seed of the lists.
        device: Where to compute.
        progress: Called with the number of lists of each batch.
    """

    def run(batch: _Batch) -> dict[str, Tensor]:
        loss = _with_tau(cls, batch.tau)
        loss.reduction = "none"
        loss._warned = True  # batches without a positive are part of the plan
        scores = batch.scores.clone().requires_grad_()
        value = loss(scores, batch.labels, batch.mask, k=batch.k, weights=batch.weights)
        gradient = _gradient(value, scores)
        return {"not_finite": ~(torch.isfinite(value) & torch.isfinite(gradient).all(1))}

    return _collect(f"loss {getattr(cls, 'name', cls.__name__)}", run, lists, seed, device, progress)


def fuzz_operator(
    cls: Callable[..., TopKOperator],
    lists: int = 100_000,
    seed: int = 0,
    *,
    device: str = "cpu",
    progress: Callable[[int], object] | None = None,
) -> Findings:
    """Try random lists on an operator: no NaN, finite gradients, and the declared sum.

    Args:
        cls: The class.
        lists: How many lists.
        seed: Seed of the lists.
        device: Where to compute.
        progress: Called with the number of lists of each batch.
    """

    def run(batch: _Batch) -> dict[str, Tensor]:
        operator = _with_tau(cls, batch.tau)
        scores = batch.scores.clone().requires_grad_()
        selection = operator(scores, batch.k, batch.mask)
        p, q = selection.p, selection.log_q.exp()
        gradient = _gradient(p * batch.labels + q * (1.0 - batch.labels), scores)
        bad = ~(torch.isfinite(p) & torch.isfinite(q) & torch.isfinite(gradient)).all(1)
        found = {"not_finite": bad}
        if operator.sums_to_k:
            valid = selection.mask.sum(1)
            wanted = torch.minimum(torch.as_tensor(batch.k, device=valid.device), valid)
            found["not_k"] = ~((p.double().sum(1) - wanted).abs() <= sum_tolerance(p))
        return found

    return _collect(f"operator {getattr(cls, 'name', cls.__name__)}", run, lists, seed, device, progress)


def sum_tolerance(p: Tensor) -> float:
    """Return how far the sum of a membership, (B, N), may lie from k: 8 N rounding errors of its dtype."""
    return 8.0 * p.shape[1] * torch.finfo(p.dtype).eps


def _with_tau(cls: Callable[..., Any], tau: float) -> Any:
    try:
        return cls(tau=tau)
    except TypeError:
        return cls()


def _gradient(value: Tensor, scores: Tensor) -> Tensor:
    """Return the gradient of the sum of `value`; what is finite and only too large for float16 comes back as 65504."""
    if not value.requires_grad:
        return torch.zeros_like(scores)
    (gradient,) = torch.autograd.grad(value.sum(), scores)
    if scores.dtype != torch.float16:
        return gradient
    largest = torch.finfo(scores.dtype).max
    return torch.nan_to_num(gradient, nan=torch.nan, posinf=largest, neginf=-largest)


def _collect(
    subject: str,
    run: Callable[[_Batch], dict[str, Tensor]],
    lists: int,
    seed: int,
    device: str,
    progress: Callable[[int], object] | None,
) -> Findings:
    findings = Findings(subject)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _try(findings, run, lists, seed, device, progress)
    return findings


def _try(
    findings: Findings,
    run: Callable[[_Batch], dict[str, Tensor]],
    lists: int,
    seed: int,
    device: str,
    progress: Callable[[int], object] | None,
) -> None:
    for batch in _batches(lists, seed):
        batch = batch.to(device)
        findings.lists += len(batch.scores)
        if progress is not None:
            progress(len(batch.scores))
        try:
            found = run(batch)
        except Exception as error:  # whatever the class under test raises is a finding
            findings.exceptions += 1
            findings.first = findings.first or f"{type(error).__name__}: {error}; first list {batch.list(0)}"
            continue
        for kind, bad in found.items():
            count = int(bad.sum())
            setattr(findings, kind, getattr(findings, kind) + count)
            if count and not findings.first:
                findings.first = f"{kind}: {batch.list(int(bad.int().argmax()))}"


def _batches(lists: int, seed: int) -> Iterator[_Batch]:
    draw = torch.Generator().manual_seed(seed)

    def pick(options: Sequence[Any], size: tuple[int, ...] = ()) -> Any:
        index = torch.randint(len(options), size, generator=draw)
        return torch.tensor(options)[index] if size else options[int(index)]

    def chance(probability: float, *size: int) -> Tensor:
        return torch.rand(*size, generator=draw) < probability

    for start in range(0, lists, BATCH):
        rows, n = min(BATCH, lists - start), int(torch.randint(1, 13, (), generator=draw))
        n = 130 if bool(chance(0.02, 1)) else n
        dtype, column = pick(DTYPES), (rows, 1)
        drawn = torch.randn(rows, n, generator=draw, dtype=torch.float64)
        tied = torch.randint(-1, 2, (rows, n), generator=draw).double()
        drawn = torch.where(chance(0.3, *column), tied, drawn)
        scores = drawn * pick(SCALES, column).double() + pick(OFFSETS, column).double()
        limit = float(torch.finfo(dtype).max) if dtype == torch.float16 else 1e30
        scores = scores.clamp(-limit, limit).to(dtype)
        kind = pick(("binary", "grades", "places"))
        top = {"binary": 1, "grades": 4, "places": 29}[kind]
        labels = torch.randint(0, top + 1, (rows, n), generator=draw) * chance(0.5, rows, n)
        mask: Tensor | None = None
        if bool(chance(0.5, 1)):
            mask = chance(float(pick((0.2, 0.5, 0.9))), rows, n)
            junk = torch.tensor(JUNK_SCORES).to(dtype)[torch.randint(len(JUNK_SCORES), (rows, n), generator=draw)]
            scores = torch.where(mask, scores, junk)
        ks = torch.randint(0, n + 2, (rows,), generator=draw)
        k: int | Tensor = ks if bool(chance(0.5, 1)) else int(ks[0])
        weights = torch.rand(rows, generator=draw) if bool(chance(0.2, 1)) else None
        yield _Batch(scores, labels.to(torch.float32), mask, k, weights, pick(TEMPERATURES))
