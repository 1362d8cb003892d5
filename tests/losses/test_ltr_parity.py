"""Learning-to-rank losses against Rax, TensorFlow Ranking, allRank and the LCRON code: values and gradients.

Peers average over different things. Each test averages our per-list values as its peer does; formulas are not adapted.
"""

import math

import pytest
import torch

from recsys_topk.losses import (
    ApproxNDCGLoss,
    BCELoss,
    LambdaLoss,
    LambdaRankLoss,
    ListMLELoss,
    ListNetLoss,
    RankNetLoss,
    SoftmaxLoss,
)
from recsys_topk.ops.losses.dcg import gains, ideal_dcg
from recsys_topk.ops.selection.ranks import tie_ranks
from tests.peers import cases, ordered_pairs


def parametrize(*files):
    found = [pytest.param(case, id=f"{file}-{case.name}") for file in files for case in cases(file)]
    return pytest.mark.parametrize("case", found)


def per_list(loss, case, **options):
    return loss(reduction="none", **options)(case.scores, case.labels, case.mask)


def relevant_ideal(case, k=None):
    return ideal_dcg(torch.where(case.mask, gains(case.labels, "exponential"), 0.0), k)


@parametrize("pointwise_sigmoid_rax")
def test_bce_matches_rax(case):
    """Rax: one mean over the valid items of the batch."""
    valid = case.mask.sum(-1)
    case.assert_agrees((per_list(BCELoss, case) * valid).sum() / valid.sum())


@parametrize("pointwise_bce_allrank")
def test_bce_matches_allrank(case):
    """The allRank code: sum over items, divided by the number of lists."""
    case.assert_agrees((per_list(BCELoss, case) * case.mask.sum(-1)).mean())


@parametrize("sigmoid_ce_tfr")
def test_bce_matches_tfr(case):
    """TensorFlow Ranking: sum over valid items, divided by all places of the batch, padding included."""
    case.assert_agrees((per_list(BCELoss, case) * case.mask.sum(-1)).sum() / case.mask.numel())


@parametrize("ranknet_allrank", "pairwise_logistic_rax")
def test_ranknet_averaged_over_pairs_of_the_batch_matches_peer(case):
    case.assert_agrees(per_list(RankNetLoss, case, pairs="sum").sum() / ordered_pairs(case).sum())


@parametrize("ranknet_allrank")
def test_ranknet_means_weighted_by_pairs_match_allrank(case):
    pairs = ordered_pairs(case)
    case.assert_agrees((per_list(RankNetLoss, case, pairs="mean") * pairs).sum() / pairs.sum())


@parametrize("pairwise_logistic_sum_rax")
def test_ranknet_sum_matches_rax(case):
    case.assert_agrees(RankNetLoss(pairs="sum", reduction="sum")(case.scores, case.labels, case.mask))


@parametrize("pairwise_logistic_tfr")
def test_ranknet_matches_tfr(case):
    """Where scores tie, the peer's gradient is 0 (it differentiates relu and abs at 0); the right value is -1/2."""
    case.raw["peer_grad_known_wrong"] = case.name == "open_ties"
    case.assert_agrees(per_list(RankNetLoss, case, pairs="sum").sum() / case.mask.numel())


@parametrize("ranknet_weightdiff_allrank", "lambda_labeldiff_rax")
def test_ranknet_weighted_by_label_difference_matches_peer(case):
    total = per_list(RankNetLoss, case, pairs="sum", weighting="label_difference").sum()
    case.assert_agrees(total / ordered_pairs(case).sum())


@parametrize("ranknet_weightdiffpow_allrank")
def test_ranknet_weighted_by_squared_label_difference_matches_peer(case):
    total = per_list(RankNetLoss, case, pairs="sum", weighting="squared_label_difference").sum()
    case.assert_agrees(total / ordered_pairs(case).sum())


def effect_of_allrank_epsilon(case, target):
    """Return how much the 1e-10 that allRank adds inside the logarithm changes ListNet."""
    scores = torch.where(case.mask, case.scores, -math.inf)
    p = torch.where(case.mask, scores.softmax(-1), 1.0)
    return (target * (torch.log(p + 1e-10) - torch.log(p))).sum(-1).mean()


@parametrize("listnet_allrank")
def test_listnet_matches_allrank(case):
    target = torch.where(case.mask, case.labels, -math.inf).softmax(-1)
    case.assert_agrees(per_list(ListNetLoss, case).mean() - effect_of_allrank_epsilon(case, target))


@parametrize("listnet_binary_allrank")
def test_listnet_with_normalised_target_matches_allrank(case):
    labels = torch.where(case.mask, case.labels, 0.0)
    target = labels / labels.sum(-1, keepdim=True)
    case.assert_agrees(
        per_list(ListNetLoss, case, target="normalised").mean() - effect_of_allrank_epsilon(case, target)
    )


@parametrize("softmax_rax", "softmax_tfr", "softmax_binary_rax")
def test_listnet_with_normalised_target_times_label_sum_matches_softmax_of_peer(case):
    """Rax and TensorFlow Ranking do not normalise the labels."""
    total = torch.where(case.mask, case.labels, 0.0).sum(-1)
    case.assert_agrees((per_list(ListNetLoss, case, target="normalised") * total).mean())


@parametrize("softmax_binary_rax")
def test_softmax_times_number_of_positives_matches_rax(case):
    positives = (case.mask & (case.labels > 0)).sum(-1)
    case.assert_agrees((per_list(SoftmaxLoss, case) * positives).mean())


@parametrize("listmle_rax")
def test_listmle_matches_rax(case):
    case.assert_agrees(per_list(ListMLELoss, case).mean())


@parametrize("listmle_allrank_distinct")
def test_listmle_matches_allrank(case):
    """The peer adds 1e-10 inside its logarithm, which changes the ninth digit."""
    case.tolerance = 1e-8
    case.assert_agrees(per_list(ListMLELoss, case).mean())


@parametrize("listmle_allrank_tied_labels")
def test_listmle_with_ties_broken_by_position_matches_allrank(case):
    """The peer breaks ties by position; labels that decrease slightly from left to right have the same order."""
    if case.labels.shape[1] > 16:
        pytest.skip("the peer's sort (torch's default) is stable for up to 16 items only")
    case.tolerance = 1e-8
    falling = case.labels - 1e-3 * torch.arange(case.labels.shape[1]) + 1.0
    case.assert_agrees(ListMLELoss(reduction="none")(case.scores, falling, case.mask).mean())


@parametrize("listmle_tfr")
def test_listmle_matches_tfr(case):
    """TensorFlow Ranking adds log(1), log(2), ... for padded items, which changes the value and not the gradient."""
    padded = (~case.mask).sum(-1)
    extra = torch.tensor([math.lgamma(int(n) + 1) for n in padded]).mean()
    case.assert_agrees(per_list(ListMLELoss, case).mean() + extra)


@parametrize("lambda_dcg_norm_rax")
def test_lambdarank_matches_rax(case):
    """Rax: mean over the pairs of the batch, times the padded list size."""
    n = case.scores.shape[1]
    case.assert_agrees(per_list(LambdaRankLoss, case).sum() * n / ordered_pairs(case).sum())


@parametrize("lambda_dcg_norm_topn_rax")
def test_lambdarank_at_k_matches_rax(case):
    n = case.scores.shape[1]
    case.assert_agrees(per_list(LambdaRankLoss, case, k=case.k).sum() * n / ordered_pairs(case).sum())


@parametrize("lambda_dcg_rax")
def test_lambdarank_without_normalisation_matches_rax(case):
    n = case.scores.shape[1]
    case.assert_agrees((per_list(LambdaRankLoss, case) * relevant_ideal(case)).sum() * n / ordered_pairs(case).sum())


@parametrize("lambda_dcg2_norm_rax")
def test_ndcg2_matches_rax(case):
    n = case.scores.shape[1]
    losses = per_list(LambdaLoss, case, variant="ndcg2", log_base="e")
    case.assert_agrees(losses.sum() * n / ordered_pairs(case).sum())


@parametrize("lambda_dcg2_norm_topn_rax")
def test_ndcg2_at_k_matches_rax(case):
    n = case.scores.shape[1]
    losses = per_list(LambdaLoss, case, variant="ndcg2", log_base="e", k=case.k)
    case.assert_agrees(losses.sum() * n / ordered_pairs(case).sum())


@parametrize("lambda_dcg2_rax")
def test_ndcg2_without_normalisation_matches_rax(case):
    n = case.scores.shape[1]
    losses = per_list(LambdaLoss, case, variant="ndcg2", log_base="e") * relevant_ideal(case)
    case.assert_agrees(losses.sum() * n / ordered_pairs(case).sum())


@parametrize("pairwise_logistic_ndcg_tfr", "pairwise_logistic_ndcgv2_tfr")
def test_ndcg2_matches_tfr(case):
    """TensorFlow Ranking divides by B N and multiplies by N; both of its lambda weights default to NDCG-Loss2."""
    case.assert_agrees(per_list(LambdaLoss, case, variant="ndcg2", log_base="e").mean())


@parametrize("loss_fs_lambda_kwai")
def test_lambdarank_with_linear_gain_matches_the_lcron_code(case):
    """The peer counts each pair in both directions and does not cut the ideal DCG at k; the base of its log cancels."""
    whole, cut = ideal_dcg(case.labels), ideal_dcg(case.labels, case.k)
    case.assert_agrees((2.0 * per_list(LambdaRankLoss, case, gain="linear", k=case.k) * cut / whole).mean())


SCHEMES = {
    "rankNet": lambda case, pairs, **o: per_list(RankNetLoss, case, pairs=pairs, **o),
    "rankNetWeightedByGTDiff": lambda case, pairs, **o: per_list(
        RankNetLoss, case, weighting="label_difference", pairs=pairs, **o
    ),
    "rankNetWeightedByGTDiffPowed": lambda case, pairs, **o: per_list(
        RankNetLoss, case, weighting="squared_label_difference", pairs=pairs, **o
    ),
    "lambdaRank": lambda case, pairs, **o: per_list(LambdaRankLoss, case, pairs=pairs, **o),
    "ndcgLoss1": lambda case, pairs, **o: per_list(LambdaLoss, case, variant="ndcg1", log_base="e", pairs=pairs, **o),
    "ndcgLoss2": lambda case, pairs, **o: per_list(LambdaLoss, case, variant="ndcg2", log_base="e", pairs=pairs, **o),
    "ndcgLoss2PP": lambda case, pairs, **o: per_list(
        LambdaLoss, case, variant="ndcg2pp", log_base="e", pairs=pairs, **o
    ),
}


def clamped(case, scheme):
    """Return whether allRank clamps a pair: it clamps sigmoid(x_i - x_j)^w, often reached with w = y_i^2 - y_j^2."""
    if scheme != "rankNetWeightedByGTDiffPowed":
        return False
    y, x = case.labels, case.scores.detach()
    weight = (y[:, :, None] ** 2 - y[:, None, :] ** 2).clamp_min(0) * case.mask[:, :, None] * case.mask[:, None, :]
    return bool((weight * torch.nn.functional.softplus(x[:, None, :] - x[:, :, None]) > -math.log(1e-10)).any())


def allrank(suffix):
    found = [
        pytest.param(scheme, case, id=f"{scheme}-{case.name}")
        for scheme in SCHEMES
        if not (suffix.endswith("atk") and "GTDiff" in scheme)
        for case in cases(f"lambdaloss_{scheme}_{suffix}_allrank")
    ]
    return pytest.mark.parametrize(("scheme", "case"), found)


@allrank("sum_binary")
def test_lambdaloss_sum_matches_allrank(scheme, case):
    case.raw["peer_clamp_active"] = case.raw.get("peer_clamp_active", False) or clamped(case, scheme)
    case.assert_agrees(SCHEMES[scheme](case, "sum").sum() / math.log(2))


@allrank("mean_natural")
def test_lambdaloss_mean_matches_allrank(scheme, case):
    """The allRank code averages over the pairs of the batch: our means, weighted by the pairs of each list."""
    case.raw["peer_clamp_active"] = case.raw.get("peer_clamp_active", False) or clamped(case, scheme)
    pairs = case.mask.sum(-1).square() if scheme == "ndcgLoss1" else ordered_pairs(case)
    case.assert_agrees((SCHEMES[scheme](case, "mean") * pairs).sum() / pairs.sum())


@allrank("sum_binary_atk")
def test_lambdaloss_at_k_matches_allrank(scheme, case):
    """At k, allRank uses only pairs of which both items rank in the first k: our loss of the list cut to those items.

    It divides gains by the ideal DCG@k of the whole list; we divide by that of the shortened list.
    """
    first = tie_ranks(case.scores.detach(), case.labels, case.mask) <= case.k
    short = case.mask & first
    ratio = torch.ones(len(case.scores))
    if scheme != "rankNet":
        inner = ideal_dcg(torch.where(short, gains(case.labels, "exponential"), 0.0))
        ratio = inner / relevant_ideal(case, case.k)
    case.mask = short
    case.assert_agrees((SCHEMES[scheme](case, "sum") * ratio).sum() / math.log(2))


@parametrize("approxndcg_rax", "approxndcg_allrank")
def test_approx_ndcg_matches_peer(case):
    case.assert_agrees(per_list(ApproxNDCGLoss, case).mean() - 1.0)


@parametrize("approxndcg_T01_rax", "approxndcg_tfr")
def test_approx_ndcg_at_another_temperature_matches_peer(case):
    case.assert_agrees(per_list(ApproxNDCGLoss, case, tau=0.1).mean() - 1.0)


def relaxed_ndcg(case, threshold):
    """NDCG@k with relaxed ranks and cut-off, written out; `threshold` is applied to the cut-off's threshold."""
    ranks = 0.5 + torch.sigmoid(case.scores[:, None, :] - case.scores[:, :, None]).sum(-1)
    ordered = ranks.sort(-1).values
    theta = threshold((ordered[:, case.k - 1 : case.k] + ordered[:, case.k : case.k + 1]) / 2)
    p = torch.sigmoid(theta - ranks)
    achieved = gains(case.labels, "exponential") * p / torch.log2(1 + ranks)
    return achieved.sum(-1) / relevant_ideal(case, case.k), p.sum(-1)


@parametrize("approxndcg_topn_rax")
def test_approx_ndcg_at_k_matches_rax_except_for_the_cap(case):
    """Rax does not cap the soft membership at k, and holds the threshold of its cut-off constant in the gradient."""
    if not case.mask.all():
        pytest.skip("the peer lets padding compete in its relaxed cut-off")
    case.assert_agrees(-relaxed_ndcg(case, torch.detach)[0].mean())
    ndcg, mass = relaxed_ndcg(case, lambda theta: theta)
    ours = per_list(ApproxNDCGLoss, case, k=case.k)
    torch.testing.assert_close(ours, 1.0 - ndcg * (case.k / mass).clamp_max(1.0))
    if case.name == "open_ties":
        return  # at a tied threshold, the plain sort gives the gradient to one item; we share it
    torch.testing.assert_close(
        torch.autograd.grad(ours.sum(), case.scores, retain_graph=True)[0],
        torch.autograd.grad(-(ndcg * (case.k / mass).clamp_max(1.0)).sum(), case.scores)[0],
    )
