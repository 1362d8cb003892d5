"""The contract suite detects faults: each class below has exactly one fault, of a kind found in published code."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from recsys_topk.losses.base import RankingLoss
from recsys_topk.numerics import masked_mean
from recsys_topk.operators.base import SoftSelection, TopKOperator
from recsys_topk.testing import Lists, check_loss, check_objective, check_operator
from recsys_topk.testing.lists import ordinary


class Sound(RankingLoss):
    """A plain pointwise loss without a fault; the faulty ones differ from it in one line."""

    label_kind, family, cost = "binary", "pointwise", "n"

    def per_list(self, scores, labels, mask, k):
        return masked_mean(self.each(scores, labels), mask)

    def each(self, scores, labels):
        return F.binary_cross_entropy_with_logits(
            scores, (labels > self.positive_above).to(scores.dtype), reduction="none"
        )


class IgnoresTheMask(Sound):
    def per_list(self, scores, labels, mask, k):
        return self.each(scores, labels).mean(-1)


class CouplesLists(Sound):
    def per_list(self, scores, labels, mask, k):
        return super().per_list(scores - scores.mean(), labels, mask, k)


class DependsOnPosition(Sound):
    def per_list(self, scores, labels, mask, k):
        places = torch.arange(1, scores.shape[1] + 1, device=scores.device)
        return masked_mean(self.each(scores, labels) / places, mask)


class IsNegative(Sound):
    def per_list(self, scores, labels, mask, k):
        return super().per_list(scores, labels, mask, k) - 5.0


class Overflows(Sound):
    def each(self, scores, labels):
        return torch.log(1 + torch.exp(scores)) - scores * (labels > self.positive_above)


class HasTheWrongGradient(Sound):
    def per_list(self, scores, labels, mask, k):
        return super().per_list(scores, labels, mask, k) * scores.detach().sigmoid().sum(-1)


class IsRandom(Sound):
    def per_list(self, scores, labels, mask, k):
        return super().per_list(scores, labels, mask, k) * (1 + 0.01 * torch.rand(()))


class BreaksTheGraph(Sound):
    def per_list(self, scores, labels, mask, k):
        value = super().per_list(scores, labels, mask, k)
        return value * 1.0 if value.detach().numpy().sum() > 0 else value


class WritesIntoItsInput(Sound):
    def per_list(self, scores, labels, mask, k):
        value = super().per_list(scores, labels, mask, k)
        labels.mul_(0.5)
        return value


class CannotBePickled(Sound):
    def __init__(self, **options):
        super().__init__(**options)
        self.link = torch.sigmoid
        self.__dict__["link"] = _Unpicklable()


class _Unpicklable:
    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        raise TypeError("this cannot be pickled")


class FailsOnEmptyLists(RankingLoss):
    """Overrides the handling of lists without positives in the base class."""

    label_kind, family, cost = "binary", "listwise", "n"

    def per_list(self, scores, labels, mask, k):
        positive = (labels > self.positive_above) & mask
        x = torch.where(mask, scores, -math.inf)
        return -(x.log_softmax(-1) * positive).nan_to_num(nan=0.0).sum(-1) / positive.sum(-1)

    def _measure(self, x, y, mask, k):
        valid = torch.ones_like(x, dtype=torch.bool) if mask is None else mask
        return self.per_list(torch.where(valid, x, 0.0), torch.where(valid, y, 0.0), valid, k), None

    def _reduce(self, losses, counted, weights):
        return losses if self.reduction == "none" else losses.mean()


class ForgetsValidation(Sound):
    def __setattr__(self, name, value):
        super().__setattr__(name, False if name == "validate" else value)


class ClosedForm(torch.autograd.Function):
    """log(1 + exp(x)) with its gradient saved in the forward, so that a second derivative is silently 0."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.sigmoid())
        return F.softplus(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


class HasASilentSecondDerivative(Sound):
    def each(self, scores, labels):
        return ClosedForm.apply(scores) - scores * (labels > self.positive_above)


class ReadsValues(Sound):
    def per_list(self, scores, labels, mask, k):
        return super().per_list(scores * (1.0 if scores.detach().numpy().any() else 2.0), labels, mask, k)


class WaitsForTheDevice(Sound):
    def per_list(self, scores, labels, mask, k):
        value = super().per_list(scores, labels, mask, k)
        return value * 2.0 if float(value.detach().max()) > 1e6 else value


LOSSES = {
    WaitsForTheDevice: "no values are read on the host",
    IgnoresTheMask: "masked items have no effect",
    CouplesLists: "lists do not influence each other",
    DependsOnPosition: "order of items does not matter",
    IsNegative: "losses are finite and not negative",
    Overflows: "large scores give finite results",
    HasTheWrongGradient: "gradient matches finite differences",
    HasASilentSecondDerivative: "second derivatives are correct or raise",
    ReadsValues: "torch func transforms agree",
    IsRandom: "the same input gives the same loss",
    BreaksTheGraph: "compiled results are equal",
    WritesIntoItsInput: "inputs are not modified",
    CannotBePickled: "losses can be stored",
    FailsOnEmptyLists: "lists without positives are skipped",
    ForgetsValidation: "validate raises on non finite scores",
}


def test_loss_without_a_fault_passes():
    check_loss(Sound)


@pytest.mark.parametrize(("faulty", "rule"), LOSSES.items(), ids=[cls.__name__ for cls in LOSSES])
def test_fault_in_a_loss_is_reported(faulty, rule):
    with pytest.raises(AssertionError) as caught:
        check_loss(faulty, rules=[rule])
    assert f"rule '{rule}'" in str(caught.value)
    assert faulty.__name__ in str(caught.value)


def test_all_broken_rules_are_reported_at_once():
    with pytest.raises(AssertionError) as caught:
        check_loss(CouplesLists)
    for rule in ("lists do not influence each other", "masked items have no effect"):
        assert f"rule '{rule}'" in str(caught.value)


def test_unknown_rule_raises():
    with pytest.raises(ValueError, match="unknown rules"):
        check_loss(Sound, rules=["ties are nice"])


def test_report_shows_the_input():
    with pytest.raises(AssertionError, match=r"scores=\[\[.*labels=.*mask=.*k=3"):
        check_loss(IsNegative, [ordinary()])


class SoundOperator(TopKOperator):
    """A logistic membership around the mean of the list, which does not sum to k."""

    cost, sums_to_k = "n", False

    def select(self, scores, k, mask):
        z = (scores - masked_mean(scores, mask)[:, None]) / self.tau
        return SoftSelection(F.logsigmoid(z), F.logsigmoid(-z), mask)


class IsNotTieFair(SoundOperator):
    def select(self, scores, k, mask):
        places = torch.arange(scores.shape[1], device=scores.device) / scores.shape[1]
        z = (scores - masked_mean(scores, mask)[:, None] - places) / self.tau
        return SoftSelection(F.logsigmoid(z), F.logsigmoid(-z), mask)


class GivesTheGradientToOneTiedItem(SoundOperator):
    def select(self, scores, k, mask):
        top = torch.where(mask, scores, -math.inf).max(-1, keepdim=True)
        z = (scores - scores.gather(1, top.indices)) / self.tau
        return SoftSelection(F.logsigmoid(z), F.logsigmoid(-z), mask)


class DoesNotSumToK(SoundOperator):
    sums_to_k = True


class HasInconsistentLogs(SoundOperator):
    def select(self, scores, k, mask):
        selection = super().select(scores, k, mask)
        return SoftSelection(selection.log_p, selection.log_q * 2.0, mask)


class LetsPaddingCompete(SoundOperator):
    def select(self, scores, k, mask):
        z = (scores - scores.mean(-1, keepdim=True)) / self.tau
        return SoftSelection(F.logsigmoid(z), F.logsigmoid(-z), mask)


class IsCappedInHalfPrecision(SoundOperator):
    def select(self, scores, k, mask):
        selection = super().select(scores.half().to(scores.dtype), k, mask)
        return SoftSelection(selection.log_p, selection.log_q, mask)


class HasADetachedThreshold(SoundOperator):
    def select(self, scores, k, mask):
        z = (scores - masked_mean(scores, mask)[:, None].detach()) / self.tau
        return SoftSelection(F.logsigmoid(z), F.logsigmoid(-z), mask)


class HasASilentSecondDerivativeToo(SoundOperator):
    def select(self, scores, k, mask):
        z = (scores - masked_mean(scores, mask)[:, None]) / self.tau
        return SoftSelection(z - ClosedForm.apply(z), -ClosedForm.apply(z), mask)


class WorksOutsideTransformsOnly(SoundOperator):
    def select(self, scores, k, mask):
        assert scores.tolist()
        return super().select(scores, k, mask)


class IndexesByAMask(SoundOperator):
    def select(self, scores, k, mask):
        selection = super().select(scores, k, mask)
        selection.log_p[~mask].sum()
        return selection


OPERATORS = {
    IndexesByAMask: "no values are read on the host",
    HasASilentSecondDerivativeToo: "second derivatives are correct or raise",
    WorksOutsideTransformsOnly: "torch func transforms agree",
    IsNotTieFair: "ties are fair",
    GivesTheGradientToOneTiedItem: "order of items does not matter",
    DoesNotSumToK: "membership is a probability",
    HasInconsistentLogs: "membership is a probability",
    LetsPaddingCompete: "masked items have no effect",
    IsCappedInHalfPrecision: "large scores give finite results",
    HasADetachedThreshold: "gradient matches finite differences",
}


def test_operator_without_a_fault_passes():
    check_operator(SoundOperator)


@pytest.mark.parametrize(("faulty", "rule"), OPERATORS.items(), ids=[cls.__name__ for cls in OPERATORS])
def test_fault_in_an_operator_is_reported(faulty, rule):
    with pytest.raises(AssertionError) as caught:
        check_operator(faulty, rules=[rule])
    assert f"rule '{rule}'" in str(caught.value)
    assert faulty.__name__ in str(caught.value)


class Output:
    def __init__(self, total, **terms):
        self.total, self.terms = total, terms


class SoundObjective(nn.Module):
    """Sum of a pointwise loss over stages."""

    def forward(self, scores, labels, mask=None, *, groups=None, quotas, k):
        terms = [self.stage(x, labels, mask, groups) for x in scores]
        return Output(sum(terms), **{f"stage{m}": term for m, term in enumerate(terms)})

    def stage(self, scores, labels, mask, groups):
        return Sound()(scores, labels, mask)


class LetsPaddingCount(SoundObjective):
    def stage(self, scores, labels, mask, groups):
        losses = Sound(reduction="none")(scores, labels, mask)
        return losses.sum() / mask.numel()


class IsNaNWithoutItems(SoundObjective):
    def stage(self, scores, labels, mask, groups):
        losses = Sound(reduction="sum")(scores, labels, mask)
        return losses / mask.any(-1).sum()


class ForgetsAStage(SoundObjective):
    def forward(self, scores, labels, mask=None, *, groups=None, quotas, k):
        return super().forward([scores[0], *(x.detach() for x in scores[1:])], labels, mask, quotas=quotas, k=k)


class UsesPositions(SoundObjective):
    def stage(self, scores, labels, mask, groups):
        return Sound()(scores * torch.arange(1, scores.shape[1] + 1), labels, mask)


class StaysInHalfPrecision(SoundObjective):
    def stage(self, scores, labels, mask, groups):
        return super().stage(scores, labels, mask, groups).to(scores.dtype)


class CopiesNumbersToTheDevice(SoundObjective):
    def stage(self, scores, labels, mask, groups):
        scale = torch.tensor([2.0], device=scores.device)
        return super().stage(scores, labels, mask, groups) * scale[0]


OBJECTIVES = {
    CopiesNumbersToTheDevice: "no values are read on the host",
    LetsPaddingCount: "masked items have no effect",
    IsNaNWithoutItems: "lists without items are skipped",
    ForgetsAStage: "the output is a scalar with named terms",
    UsesPositions: "order of items does not matter",
    StaysInHalfPrecision: "half precision is computed in float32",
}


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_objective_without_a_fault_passes(stages):
    check_objective(SoundObjective, stages)


@pytest.mark.parametrize(("faulty", "rule"), OBJECTIVES.items(), ids=[cls.__name__ for cls in OBJECTIVES])
def test_fault_in_an_objective_is_reported(faulty, rule):
    with pytest.raises(AssertionError) as caught:
        check_objective(faulty, 2)
    assert f"rule '{rule}'" in str(caught.value)
    assert faulty.__name__ in str(caught.value)


def test_long_lists_are_shown_as_their_shape():
    many = Lists(torch.zeros(9, 20), torch.zeros(9, 20), torch.ones(9, 20, dtype=torch.bool), k=3)
    assert str(many) == "lists of shape (9, 20) (float32) k=3"


def test_with_junk_keeps_the_real_items_in_order():
    lists = ordinary()
    wide, where = lists.with_junk()
    assert torch.equal(wide.scores[:, where], lists.scores)
    assert all(a < b for a, b in itertools.pairwise(where.tolist()))
    assert not wide.mask[:, [i for i in range(wide.mask.shape[1]) if i not in where.tolist()]].any()
