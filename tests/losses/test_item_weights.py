"""Item weights: scaled weights, positives as k, fractional k, errors, and the functional form."""

import pytest
import torch

from recsys_topk import losses, operators
from recsys_topk.cascades.objectives.base import registry as objectives
from recsys_topk.losses import DFTopKLoss, functional
from recsys_topk.ops import backend
from recsys_topk.ops.losses.dcg import discount_sums
from recsys_topk.testing.lists import ragged

LISTS = ragged()
X, Y, MASK = LISTS.scores, LISTS.labels, LISTS.mask
WEIGHTS = torch.tensor([[1, 2, 1, 0, 3, 1, 2], [2, 1, 1, 2, 0, 1, 3], [1, 1, 2, 1, 2, 3, 0]]).double()
NAMES = [name for name in losses.available() if losses.get(name).takes_item_weights]


def test_the_losses_that_take_item_weights():
    of_operators = ["dftopk", "lapsum", "sigmoid", "sparse", "sparse_fy"]
    pairwise = ["lambdaloss", "lambdarank", "ranknet"]
    listwise = ["approx_ndcg", "bce", "listmle", "listnet", "llpauc", "softmax", "softmax_at_k", "talos"]
    assert sorted([*of_operators, *pairwise, *listwise]) == NAMES


@pytest.mark.parametrize("options", [{}, {"k": 3}], ids=["all", "k"])
@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("lambdarank", {}),
        ("lambdarank", {"pairs": "mean"}),
        *(("lambdaloss", {"variant": variant}) for variant in ("ndcg1", "ndcg2", "ndcg2pp")),
        ("lambdaloss", {"variant": "ndcg1", "pairs": "mean"}),
        ("approx_ndcg", {"tau": 0.3}),
    ],
    ids=str,
)
def test_losses_of_ranks_count_copies_of_tied_items(name, own, options):
    loss = losses.get(name, reduction="none", **own, **options)
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(-2, 3, (20, 8), generator=draw).double()
    y = torch.randint(0, 3, (20, 8), generator=draw).double()
    weights = torch.randint(0, 4, (20, 8), generator=draw).double()
    weights[:, 0], y[:, 0] = 2.0, 1.0
    leaf = x.clone().requires_grad_()
    value = loss(leaf, y, item_weights=weights)
    (slope,) = torch.autograd.grad(value.sum(), leaf)
    for row in range(len(x)):
        columns = torch.repeat_interleave(torch.arange(8), weights[row].long())
        copies = x[row : row + 1, columns].clone().requires_grad_()
        expected = loss(copies, y[row : row + 1, columns])
        (parts,) = torch.autograd.grad(expected.sum(), copies)
        torch.testing.assert_close(value[row], expected[0])
        torch.testing.assert_close(slope[row], torch.zeros(8).double().index_add(0, columns, parts[0]))
    small = loss(x, y, item_weights=0.1 * weights)
    assert bool(small.isfinite().all())
    assert float(small.min()) >= -1e-9


def test_sums_of_discounts_for_large_and_fractional_weights():
    sums = torch.cat([torch.zeros(1).double(), (1 / torch.log2(1 + torch.arange(1, 200_001).double())).cumsum(0)])
    amounts = torch.tensor([0.0, 1.0, 4096.0, 4097.0, 200_000.0])
    torch.testing.assert_close(discount_sums(amounts), sums[amounts.long()], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(discount_sums(torch.tensor([2.5])), sums[2:4].mean()[None])


@pytest.mark.parametrize("name", ["bce", "dftopk", "lapsum", "ranknet", "sigmoid", "sparse"])
def test_equal_weights_do_not_change_a_mean_if_k_is_scaled_too(name):
    """Not so for a softmax, in which copies of an item compete with each other, and for the sum of listmle."""
    loss = losses.get(name, reduction="none")
    doubled = loss(X, Y, MASK, k=torch.tensor([4, 4, 4]), item_weights=torch.full_like(X, 2.0))
    torch.testing.assert_close(doubled, loss(X, Y, MASK, k=2))


@pytest.mark.parametrize("name", NAMES)
def test_positives_as_k_is_the_weight_of_the_positives(name):
    loss = losses.get(name, k="positives", reduction="none")
    amount = torch.where(MASK & (Y > 0), WEIGHTS, 0.0).sum(1)
    expected = loss(X, Y, MASK, k=amount.long(), item_weights=WEIGHTS)
    torch.testing.assert_close(loss(X, Y, MASK, item_weights=WEIGHTS), expected)


def test_zero_weights_skip_a_list_and_get_no_gradient():
    weights, x = WEIGHTS.clone(), X.clone().requires_grad_()
    weights[1] = 0.0
    value = DFTopKLoss(k=2)(x, Y, MASK, item_weights=weights)
    expected = DFTopKLoss(k=2)(X[[0, 2]], Y[[0, 2]], MASK[[0, 2]], item_weights=weights[[0, 2]])
    torch.testing.assert_close(value, expected)
    value.backward()
    assert x.grad is not None
    assert bool((x.grad[weights == 0] == 0).all())


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match="'arf' loss does not support item_weights, because its relaxed permutation"):
        losses.get("arf", k=2)(X, Y, MASK, item_weights=WEIGHTS)
    with pytest.raises(ValueError, match="the 'softsort' operator does not support item_weights"):
        operators.get("softsort")(X, 2, MASK, item_weights=WEIGHTS)
    with pytest.raises(ValueError, match=r"item_weights must have the shape of scores, \(3, 7\)"):
        DFTopKLoss(k=2)(X, Y, MASK, item_weights=WEIGHTS[:, :3])
    with pytest.raises(ValueError, match=r"item_weights must be one per item, \(7,\)"):
        DFTopKLoss(k=2)(X[0], Y[0], lengths=[7], item_weights=WEIGHTS)
    with pytest.raises(ValueError, match="item_weights must be finite and >= 0"):
        DFTopKLoss(k=2, validate=True)(X, Y, item_weights=-WEIGHTS)
    with pytest.raises(ValueError, match="the 'icc' objective with the loss 'dftopk' does not support item_weights"):
        objectives.resolve("icc")(DFTopKLoss(), 1)([X], Y, MASK, quotas=[3], k=2, item_weights=WEIGHTS)


def test_functions_take_item_weights():
    expected = DFTopKLoss(k=2)(X, Y, MASK, item_weights=WEIGHTS)
    torch.testing.assert_close(functional.dftopk(X, Y, MASK, k=2, item_weights=WEIGHTS), expected)


@pytest.mark.parametrize("name", ["sigmoid", "lapsum", "sparse"])
def test_fractional_k_and_weights_solve_the_weighted_sum(name):
    p = operators.get(name, tau=0.5)(X, torch.tensor([0.3, 1.5, 2.25]), MASK, item_weights=0.37 * WEIGHTS).p
    torch.testing.assert_close((0.37 * WEIGHTS * p).sum(1), torch.tensor([0.3, 1.5, 2.25]).double())
    single = operators.get(name)(X[:, :1], 0.5, item_weights=torch.full_like(X[:, :1], 2.0)).p
    torch.testing.assert_close(single, torch.full_like(single, 0.25))


@pytest.mark.parametrize("size", [1.0, 1e4, 1e30])
@pytest.mark.parametrize("name", NAMES)
def test_weights_of_one_equal_no_weights_for_scores_of_any_size(name, size):
    draw = torch.Generator().manual_seed(0)
    labels, loss = torch.randint(0, 3, (50, 20), generator=draw), losses.get(name, k=3)
    x = (torch.randn(50, 20, generator=draw) * size).requires_grad_()
    value = loss(x, labels, item_weights=torch.ones(50, 20))
    with backend("torch"):
        torch.testing.assert_close(value, loss(x, labels), rtol=1e-4, atol=1e-5)
    value.backward()
    assert torch.isfinite(x.grad).all()
