"""Functional metrics against loops in plain Python, on lists with masks and ties."""

import itertools
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_topk.metrics import functional as M
from recsys_topk.metrics.functional import kendall


@st.composite
def lists(draw, stages=1):
    """Draw scores and labels on coarse grids (many ties) and any masks, including fully masked lists."""
    b, n = draw(st.integers(1, 4)), draw(st.integers(1, 8))

    def grid(top):
        rows = st.lists(st.lists(st.integers(0, top), min_size=n, max_size=n), min_size=b, max_size=b)
        return torch.tensor(draw(rows))

    scores = [grid(4).float() - 2.0 for _ in range(stages)]
    return scores, grid(3).float(), grid(3) > 0


def by_score_with_ties_worst_first(items, score, label):
    return sorted(items, key=lambda i: (-score[i], label[i]))


def loop_recall(selected, label, valid, k, above=0.0):
    """Return the largest recall over all top-k sets that the labels allow, by trying each."""
    positives = [i for i in valid if label[i] > above]
    wanted = min(k, len(positives))
    if wanted == 0:
        return 0.0, False
    best = sum(sorted((label[i] for i in positives), reverse=True)[:wanted])
    true_sets = [c for c in itertools.combinations(positives, wanted) if sum(label[i] for i in c) == best]
    return max(len(selected & set(c)) for c in true_sets) / wanted, True


def loop_dcg(ordered_gains):
    return sum(g / math.log2(2 + r) for r, g in enumerate(ordered_gains))


def check(values, counted, expected):
    assert counted.tolist() == [c for _, c in expected]
    for got, (want, c) in zip(values.tolist(), expected, strict=True):
        assert got == pytest.approx(want if c else 0.0, abs=1e-12)


@settings(max_examples=120, deadline=None)
@given(lists(), st.integers(0, 9), st.integers(0, 9), st.sampled_from([0.0, 1.0]))
def test_recall_equals_loop(drawn, k, m, above):
    (scores,), labels, mask = drawn
    expected = []
    for s, y, v in zip(scores.tolist(), labels.tolist(), mask.tolist(), strict=True):
        valid = [i for i, real in enumerate(v) if real]
        expected.append(loop_recall(set(by_score_with_ties_worst_first(valid, s, y)[:m]), y, valid, k, above))
    check(*M.recall_at(scores, labels, mask, k=k, m=m, positive_above=above), expected)


@settings(max_examples=120, deadline=None)
@given(lists(stages=3), st.integers(1, 9), st.tuples(st.integers(0, 8), st.integers(0, 6), st.integers(0, 4)))
def test_joint_recall_equals_loop(drawn, k, quotas):
    stages, labels, mask = drawn
    expected = []
    for row in range(labels.shape[0]):
        y = labels[row].tolist()
        valid = [i for i, real in enumerate(mask[row].tolist()) if real]
        alive = valid
        for scores, quota in zip(stages, quotas, strict=True):
            # Items with equal scores and labels are taken in the order of the list, whatever the stage before did.
            alive = by_score_with_ties_worst_first(sorted(alive), scores[row].tolist(), y)[:quota]
        expected.append(loop_recall(set(alive), y, valid, k))
    check(*M.joint_recall(stages, labels, mask, quotas=quotas, k=k), expected)


@settings(max_examples=80, deadline=None)
@given(lists(), st.one_of(st.none(), st.integers(1, 9)), st.sampled_from(["linear", "exponential"]))
def test_ndcg_equals_loop(drawn, k, gain):
    (scores,), labels, mask = drawn
    expected = []
    for s, y, v in zip(scores.tolist(), labels.tolist(), mask.tolist(), strict=True):
        valid = [i for i, real in enumerate(v) if real]
        g = [(2**label - 1 if gain == "exponential" else label) for label in y]
        best = loop_dcg(sorted(g[i] for i in valid)[::-1][:k])
        achieved = loop_dcg([g[i] for i in by_score_with_ties_worst_first(valid, s, y)][:k])
        expected.append((achieved / best, True) if best > 0 else (0.0, False))
    check(*M.ndcg_at(scores, labels, mask, k=k, gain=gain), expected)


@settings(max_examples=80, deadline=None)
@given(lists())
def test_kendall_tau_equals_loop(drawn):
    (scores,), labels, mask = drawn
    expected = []
    for s, y, v in zip(scores.tolist(), labels.tolist(), mask.tolist(), strict=True):
        valid = [i for i, real in enumerate(v) if real]
        pairs = [(i, j) for i in valid for j in valid if y[i] > y[j]]
        agreement = sum((s[i] > s[j]) - (s[i] < s[j]) for i, j in pairs)
        expected.append((agreement / len(pairs), True) if pairs else (0.0, False))
    check(*M.kendall_tau(scores, labels, mask), expected)


def test_kendall_tau_does_not_depend_on_the_chunk_size(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    scores, labels = torch.randn(7, 9, generator=generator), torch.randint(0, 4, (7, 9), generator=generator).float()
    whole = M.kendall_tau(scores, labels)[0]
    monkeypatch.setattr(kendall, "PAIRS_AT_A_TIME", 200)
    assert torch.equal(M.kendall_tau(scores, labels)[0], whole)


@settings(max_examples=60, deadline=None)
@given(lists(), st.integers(1, 9), st.integers(0, 9))
def test_perfect_model_scores_one(drawn, k, extra):
    _, labels, mask = drawn
    for values, counted in (
        M.recall_at(labels, labels, mask, k=k, m=k + extra),
        M.joint_recall([labels, labels], labels, mask, quotas=(k + extra, k), k=k),
        M.ndcg_at(labels, labels, mask, k=k),
        M.kendall_tau(labels, labels, mask),
        M.average_precision_at(labels, labels, mask, k=k),
        M.reciprocal_rank_at(labels, labels, mask),
    ):
        assert torch.equal(values, counted.double())


@settings(max_examples=120, deadline=None)
@given(lists(), st.integers(0, 9), st.sampled_from([0.0, 1.0]))
def test_rank_metrics_equal_loop(drawn, k, above):
    """Average precision, reciprocal rank, precision and DCG from the ranks of the positives, item by item."""
    (scores,), labels, mask = drawn
    expected = {"ap": [], "rr": [], "precision": [], "dcg": []}
    for s, y, v in zip(scores.tolist(), labels.tolist(), mask.tolist(), strict=True):
        valid = [i for i, real in enumerate(v) if real]
        ranked = by_score_with_ties_worst_first(valid, s, y)[:k]
        positives = sum(y[i] > above for i in valid)
        ranks = [r for r, i in enumerate(ranked, 1) if y[i] > above]
        precisions = [number / r for number, r in enumerate(ranks, 1)]
        expected["ap"].append((sum(precisions) / max(1, min(k, positives)), positives > 0))
        expected["rr"].append((1 / ranks[0] if ranks else 0.0, positives > 0))
        expected["precision"].append((len(ranks) / max(1, len(ranked)), positives > 0))
        expected["dcg"].append((loop_dcg(y[i] for i in ranked), positives > 0))
    check(*M.average_precision_at(scores, labels, mask, k=k, positive_above=above), expected["ap"])
    check(*M.reciprocal_rank_at(scores, labels, mask, k=k, positive_above=above), expected["rr"])
    check(*M.precision_at(scores, labels, mask, k=k, positive_above=above), expected["precision"])
    check(*M.dcg_at(scores, labels, mask, k=k, gain="linear", positive_above=above), expected["dcg"])


def test_constant_model_is_not_better_than_chance():
    """Positives are in the first columns, as in the data: breaking ties by position would give 1 here."""
    labels = torch.zeros(50, 40)
    labels[:, :10] = 1.0
    constant = torch.zeros(50, 40)
    chance = 20 / 40
    assert float(M.recall_at(constant, labels, k=10, m=20)[0].mean()) <= chance
    assert float(M.joint_recall([constant, constant], labels, quotas=(30, 20), k=10)[0].mean()) <= chance
    random_ndcg = M.ndcg_at(torch.rand(50, 40, generator=torch.Generator().manual_seed(0)), labels, k=10)[0].mean()
    assert float(M.ndcg_at(constant, labels, k=10)[0].mean()) <= float(random_ndcg)
    assert float(M.kendall_tau(constant, labels)[0].abs().max()) == 0.0


@pytest.mark.parametrize("padded_score", [0.0, 1e30, math.inf, -math.inf, math.nan])
def test_padding_is_never_ranked(padded_score):
    generator = torch.Generator().manual_seed(1)
    scores, labels = torch.randn(6, 12, generator=generator), torch.randint(0, 3, (6, 12), generator=generator).float()
    padded_scores = torch.cat([torch.full((6, 5), padded_score), scores], 1)
    padded_labels = torch.cat([torch.full((6, 5), 9.0), labels], 1)
    mask = torch.arange(17).expand(6, 17) >= 5
    for function in (
        lambda s, y, v: M.recall_at(s, y, v, k=3, m=4),
        lambda s, y, v: M.joint_recall([s, -s], y, v, quotas=(8, 4), k=3),
        lambda s, y, v: M.ndcg_at(s, y, v, k=5),
        M.dcg_at,
        M.average_precision_at,
        M.reciprocal_rank_at,
        lambda s, y, v: M.precision_at(s, y, v, k=9),
        M.kendall_tau,
        lambda s, y, v: M.selection_mass(s.sigmoid(), v, k=3),
    ):
        plain, padded = function(scores, labels, None), function(padded_scores, padded_labels, mask)
        assert torch.equal(plain[0], padded[0])
        assert torch.equal(plain[1], padded[1])


def test_nan_scores_rank_last():
    scores = torch.tensor([[math.nan, 1.0, -math.inf]])
    assert M.top(scores, 1).tolist() == [[False, True, False]]


def test_survivors_without_labels_break_ties_by_position():
    kept = M.survivors([torch.zeros(1, 4)], quotas=(2,))
    assert kept.tolist() == [[[True, True, False, False]]]


def test_selection_mass_caps_k_at_the_valid_items():
    p = torch.tensor([[1.0, 1.0, 0.0], [0.5, 0.5, 0.5]])
    mask = torch.tensor([[True, True, False], [False, False, False]])
    values, counted = M.selection_mass(p, mask, k=5)
    assert values.tolist() == [1.0, 0.0]
    assert counted.tolist() == [True, False]


def test_empty_batch_gives_no_values():
    empty = torch.zeros(0, 5)
    assert all(len(f) == 0 for f in (*M.recall_at(empty, empty, k=1, m=1), *M.kendall_tau(empty, empty)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: M.recall_at(x, x, k=-1, m=2), "k must be a non-negative int"),
        (lambda x: M.recall_at(x, x, k=1, m=2.5), "m must be a non-negative int"),
        (lambda x: M.joint_recall([x, x], x, quotas=(2,), k=1), "one quota per stage"),
        (lambda x: M.joint_recall([x, x[:, :2]], x[:, :2], quotas=(2, 2), k=1), "shape of scores"),
        (lambda x: M.ndcg_at(x, x, gain="cubic"), "gain must be"),
    ],
)
def test_invalid_arguments_raise(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(2, 3))


def test_functional_imports_without_torchmetrics():
    code = (
        "import sys; sys.modules['torchmetrics'] = None\n"
        "import recsys_topk.metrics as m; from recsys_topk.metrics import functional\n"
        "assert functional.recall_at\n"
        "try:\n    m.RecallAt\nexcept ImportError:\n    pass\nelse:\n    raise SystemExit('imported torchmetrics')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
