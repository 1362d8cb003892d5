"""Learning-to-rank losses against loops in plain Python, their bounds, memory and options."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_topk import losses
from recsys_topk.losses import (
    ApproxNDCGLoss,
    BCELoss,
    LambdaLoss,
    LambdaRankLoss,
    ListMLELoss,
    ListNetLoss,
    RankNetLoss,
    SoftmaxAtKLoss,
    SoftmaxLoss,
)
from recsys_topk.ops.losses import pair_spans
from tests.strategies import lists

OURS = ["approx_ndcg", "bce", "lambdaloss", "lambdarank", "listmle", "listnet", "ranknet", "softmax", "softmax_at_k"]


class One:
    """One list in plain Python, with valid items only."""

    def __init__(self, drawn, row, k):
        items = [i for i in range(drawn.scores.shape[1]) if drawn.mask[row, i]]
        self.x = [float(drawn.scores[row, i]) for i in items]
        self.y = [float(drawn.labels[row, i]) for i in items]
        self.items = range(len(items))
        self.k = k
        ordered = sorted(self.y, reverse=True)
        boundary = -math.inf if k is None or k > len(ordered) else math.inf if k == 0 else ordered[k - 1]
        self.top = [y > 0 and y >= boundary for y in self.y]

    @property
    def counted(self):
        return any(y > 0 for y in self.y)

    def rank(self, i):
        before = sum((-self.x[j], self.y[j]) < (-self.x[i], self.y[i]) for j in self.items)
        return 1 + before + (sum((self.x[j], self.y[j]) == (self.x[i], self.y[i]) for j in self.items) - 1) / 2

    def gain(self, i):
        gains = sorted((2**y - 1 for y in self.y), reverse=True)[: self.k]
        ideal = sum(g / math.log2(2 + r) for r, g in enumerate(gains))
        return (2 ** self.y[i] - 1) / ideal if ideal > 0 else 0.0

    def pairs(self):
        return [(i, j) for i in self.items for j in self.items if self.y[i] > self.y[j]]


def softplus(z):
    return max(z, 0.0) + math.log1p(math.exp(-abs(z)))


def sigmoid(z):
    return math.exp(-softplus(-z))


def logsumexp(values):
    top = max(values)
    return top + math.log(sum(math.exp(v - top) for v in values))


def mean(values):
    return sum(values) / len(values) if values else 0.0


def discount(rank, k=None):
    return 1 / math.log2(1 + rank) if k is None or rank <= k else 0.0


def bce(one):
    return mean([softplus(one.x[i]) - (one.x[i] if one.top[i] else 0.0) for i in one.items])


def softmax(one):
    return mean([logsumexp(one.x) - one.x[i] for i in one.items if one.top[i]])


def softmax_against_negatives(one):
    negatives = [one.x[j] for j in one.items if not one.top[j]]
    return mean([logsumexp([one.x[i], *negatives]) - one.x[i] for i in one.items if one.top[i]])


def softmax_at_k(one):
    beta = sorted(one.x, reverse=True)[one.k - 1]
    positives = [i for i in one.items if one.y[i] > 0]
    return mean([sigmoid((one.x[i] - beta) / 0.5) * (logsumexp(one.x) - one.x[i]) for i in positives])


def listnet(one):
    admitted = [i for i in one.items if one.k is None or one.top[i]]
    if not admitted:
        return 0.0
    total = logsumexp([one.y[i] / 2.0 for i in admitted])
    return sum(math.exp(one.y[i] / 2.0 - total) * (logsumexp(one.x) - one.x[i]) for i in admitted)


def listnet_normalised(one):
    admitted = [i for i in one.items if one.k is None or one.top[i]]
    total = sum(one.y[i] for i in admitted)
    return sum(one.y[i] / total * (logsumexp(one.x) - one.x[i]) for i in admitted) if total else 0.0


def listmle(one):
    terms = [i for i in one.items if one.y[i] > min(one.y) and (one.k is None or one.top[i])]
    return sum(logsumexp([one.x[j] for j in one.items if one.y[j] <= one.y[i]]) - one.x[i] for i in terms)


def ranknet(one):
    chosen = [(i, j) for i, j in one.pairs() if one.k is None or one.top[i]]
    return mean([softplus(one.x[j] - one.x[i]) for i, j in chosen])


def lambdarank(one):
    return sum(
        (one.gain(i) - one.gain(j))
        * abs(discount(one.rank(i), one.k) - discount(one.rank(j), one.k))
        * softplus(one.x[j] - one.x[i])
        for i, j in one.pairs()
    )


def ndcg1(one):
    rows = [i for i in one.items if one.gain(i) > 0]
    weight = {i: one.gain(i) * discount(one.rank(i), one.k) for i in rows}
    return sum(weight[i] * softplus(one.x[j] - one.x[i]) for i in rows for j in one.items) / math.log(2)


def ndcg2(one):
    total = 0.0
    for i, j in one.pairs():
        distance, worse = abs(one.rank(i) - one.rank(j)), max(one.rank(i), one.rank(j))
        delta = discount(distance) - discount(distance + 1)
        if one.k is not None and worse > one.k:
            delta /= 1 - discount(worse)
        total += (one.gain(i) - one.gain(j)) * delta * softplus(one.x[j] - one.x[i])
    return total / math.log(2)


def ndcg2pp(one):
    return 3.0 * ndcg2(one) + lambdarank(one) / math.log(2)


def approximate_ndcg(one):
    ranks = [1 + sum(sigmoid((one.x[j] - one.x[i]) / 0.5) for j in one.items if j != i) for i in one.items]
    return 1 - sum(one.gain(i) / math.log2(1 + ranks[i]) for i in one.items)


LOOPS = {
    "bce": (BCELoss(), bce, True),
    "softmax": (SoftmaxLoss(), softmax, True),
    "softmax against negatives": (SoftmaxLoss(against="negatives"), softmax_against_negatives, True),
    "listnet": (ListNetLoss(label_tau=2.0), listnet, True),
    "listnet normalised": (ListNetLoss(target="normalised"), listnet_normalised, True),
    "listmle": (ListMLELoss(), listmle, True),
    "ranknet": (RankNetLoss(), ranknet, True),
    "lambdarank": (LambdaRankLoss(), lambdarank, True),
    "lambdaloss ndcg1": (LambdaLoss("ndcg1"), ndcg1, True),
    "lambdaloss ndcg2": (LambdaLoss("ndcg2"), ndcg2, True),
    "lambdaloss ndcg2pp": (LambdaLoss("ndcg2pp", mu=3.0), ndcg2pp, True),
    "approx_ndcg": (ApproxNDCGLoss(tau=0.5), approximate_ndcg, False),
}


@pytest.mark.parametrize("name", LOOPS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(drawn=lists(), cut=st.booleans())
def test_loss_equals_loop(name, drawn, cut):
    loss, loop, truncates = LOOPS[name]
    loss.reduction = "none"
    k = drawn.k if cut and truncates else None
    values = loss(drawn.scores, drawn.labels, drawn.mask, k=k)
    for row, value in enumerate(values.tolist()):
        one = One(drawn, row, k)
        assert value == pytest.approx(loop(one) if one.counted else 0.0, rel=1e-9, abs=1e-9)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(drawn=lists())
def test_softmax_at_k_equals_loop(drawn):
    values = SoftmaxAtKLoss(tau_weight=0.5, reduction="none")(drawn.scores, drawn.labels, drawn.mask, k=drawn.k)
    for row, value in enumerate(values.tolist()):
        one = One(drawn, row, drawn.k)
        proper = one.counted and 0 < drawn.k < len(one.x)
        assert value == pytest.approx(softmax_at_k(one) if proper else 0.0, rel=1e-9, abs=1e-9)


def test_softmax_at_k_holds_the_quantile_constant():
    """The gradient equals that of the formula with the k-th score as a constant."""
    x = torch.tensor([[0.3, -0.2, 1.1, 0.7]], dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[1.0, 0.0, 0.0, 1.0]])
    beta = 0.7
    by_hand = (torch.sigmoid(x - beta) * (torch.logsumexp(x, -1, keepdim=True) - x))[:, [0, 3]].mean()
    ours = SoftmaxAtKLoss(k=2, weight_gradient=True)(x, labels)
    torch.testing.assert_close(torch.autograd.grad(ours, x), torch.autograd.grad(by_hand, x))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(drawn=lists(), cut=st.booleans())
def test_approx_ndcg_is_between_0_and_1(drawn, cut):
    values = ApproxNDCGLoss(tau=0.7, reduction="none")(
        drawn.scores, drawn.labels, drawn.mask, k=drawn.k if cut else None
    )
    assert ((values >= -1e-9) & (values <= 1 + 1e-9)).all()


def test_approx_ndcg_tends_to_ndcg():
    scores = torch.tensor([[0.3, 2.0, 1.0, -1.0, 0.0]], dtype=torch.float64)
    labels = torch.tensor([[3.0, 0.0, 2.0, 0.0, 1.0]])
    gain = [0, 3, 7, 1, 0]  # in the order of the scores
    for k in (None, 2):
        cut = gain[:k]
        ideal = sum(g / math.log2(2 + r) for r, g in enumerate(sorted(gain, reverse=True)[:k]))
        ndcg = sum(g / math.log2(2 + r) for r, g in enumerate(cut)) / ideal
        assert ApproxNDCGLoss(tau=1e-3)(scores, labels, k=k).item() == pytest.approx(1 - ndcg, abs=1e-6)


@pytest.mark.parametrize("name", ["ranknet", "lambdarank", "lambdaloss", "approx_ndcg"])
def test_result_does_not_depend_on_the_buffer_size(name, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(11, 9, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 3, (11, 9), generator=generator).float()
    mask = torch.rand(11, 9, generator=generator) > 0.2

    def both():
        value = losses.get(name)(scores, labels, mask)
        return value.detach(), torch.autograd.grad(value, scores)[0]

    whole = both()
    monkeypatch.setattr(pair_spans, "PAIRS_IN_CACHE", 1)
    assert len(list(pair_spans.spans(scores, torch.zeros(11, 9)))) == 11
    torch.testing.assert_close(both(), whole)


@pytest.mark.parametrize("name", OURS)
def test_value_is_the_same_without_gradient(name):
    scores, labels = torch.randn(3, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([[2.0, 0, 1, 0, 0, 0]])
    loss, labels = losses.get(name, k=2), labels.expand(3, 6)
    with torch.no_grad():
        plain = loss(scores, labels)
    assert not plain.requires_grad
    torch.testing.assert_close(plain, loss(scores.requires_grad_(), labels).detach())


@pytest.mark.parametrize("name", OURS)
def test_no_value_is_read_on_the_host(name):
    """Meta tensors have no values: a device synchronisation or a conversion to numpy raises."""
    scores = torch.empty(3, 6, device="meta", requires_grad=True)
    labels, mask = torch.empty(3, 6, device="meta"), torch.empty(3, 6, dtype=torch.bool, device="meta")
    for given_mask in (None, mask):
        value = losses.get(name, k=2)(scores, labels, given_mask)
        assert value.shape == ()
        assert torch.autograd.grad(value, scores)[0].shape == scores.shape


@pytest.mark.parametrize("loss", [LambdaRankLoss(), LambdaLoss(), ApproxNDCGLoss()], ids=lambda loss: loss.name)
def test_large_labels_do_not_overflow_the_exponential_gain(loss):
    scores = torch.tensor([[0.1, 0.4, -0.2]], requires_grad=True)
    value = loss(scores, torch.tensor([[500.0, 499.0, 0.0]]))
    assert value.isfinite()
    assert torch.autograd.grad(value, scores)[0].isfinite().all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LambdaLoss("ndcg3"), "variant must be"),
        (lambda: LambdaLoss(log_base="10"), "log_base must be"),
        (lambda: LambdaRankLoss(gain="square"), "gain must be"),
        (lambda: LambdaRankLoss(pairs="max"), "pairs must be"),
        (lambda: RankNetLoss(weighting="labels"), "weighting must be"),
        (lambda: RankNetLoss(sigma=0), "sigma must be"),
        (lambda: ListNetLoss(target="onehot"), "target must be"),
        (lambda: SoftmaxLoss(against="others"), "against must be"),
        (lambda: ApproxNDCGLoss(tau=-1), "tau must be"),
        (lambda: SoftmaxAtKLoss()(torch.zeros(1, 3), torch.ones(1, 3)), "requires k, got none"),
    ],
)
def test_invalid_arguments_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()


MEMORY = """
import torch
from recsys_topk import losses
from recsys_topk.bench.timing import peak_memory as peak
from recsys_topk.ops.dispatch import backend

torch.set_num_threads(1)
scores = torch.randn(1024, 200, requires_grad=True)
labels = torch.randint(0, 30, (1024, 200)).float()
losses.get("listnet")(scores, labels).backward()
names = ("ranknet", "lambdarank", "lambdaloss", "approx_ndcg")
for name in names:  # compile before measuring: compilers need memory too
    losses.get(name)(scores[:2], labels[:2]).backward()
before = peak()
for mode in ("torch", "auto"):
    with backend(mode):
        for name in names:
            losses.get(name)(scores, labels).backward()
print(peak() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads peak memory in the units of Linux")
def test_pairs_need_little_memory():
    """One (1024, 200, 200) tensor of float32 would take 156 MB, and autograd would keep several."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=120, env=environment, check=True
    )
    assert 0.5 < float(done.stdout) < 100
