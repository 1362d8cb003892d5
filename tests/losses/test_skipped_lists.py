"""Bad labels raise with `validate`, and batches in which all lists are skipped warn."""

import math
import warnings

import pytest
import torch

from recsys_topk.losses import BCELoss, DFTopKLoss, get, registry

SCORES = torch.tensor([[0.3, 0.8, -0.1, 1.4, 0.2, 0.6]] * 2)
LABELS = torch.tensor([[1.0, 0.0, 0.0, 2.0, 0.0, 0.0]] * 2)


@pytest.mark.parametrize("bad", [math.nan, -1.0, math.inf])
@pytest.mark.parametrize("name", registry.available())
def test_validation_names_bad_labels(name, bad):
    labels = LABELS.clone()
    labels[1, 2] = bad
    loss = get(name, k=2, validate=True)
    with pytest.raises(ValueError, match=r"labels must be finite and >= 0.*labels\[1, 2\] = (nan|-1|inf)"):
        loss(SCORES, labels)
    loss(
        SCORES, labels, torch.tensor([[True] * 6, [True, True, False, True, True, True]])
    )  # masked labels are not checked


@pytest.mark.parametrize("bad", [math.nan, -1.0])
def test_validation_names_bad_weights(bad):
    with pytest.raises(ValueError, match=r"weights must be finite and >= 0.*weights\[1\] = (nan|-1)"):
        BCELoss(validate=True)(SCORES, LABELS, weights=torch.tensor([1.0, bad]))


@pytest.mark.parametrize(
    ("labels", "mask", "message"),
    [
        (torch.full((2, 6), math.nan), None, r"2 of 2 lists have no valid label above positive_above = 0 .*nan.*check"),
        (torch.full((2, 6), -1.0), None, r"the largest is -1"),
        (LABELS, torch.zeros(2, 6, dtype=torch.bool), r"no item is valid"),
        (LABELS, torch.tensor([[True] * 2 + [False] * 4] * 2), r"(?s)2 of 2 lists have no item beyond .* 2 items"),
        (LABELS * torch.tensor([[0.0], [1.0]]), torch.tensor([[True] * 2 + [False] * 4] * 2), r"1 of 2 .*; 1 of 2"),
    ],
    ids=["nan", "negative", "masked", "covered", "both"],
)
def test_batch_of_skipped_lists_warns_with_the_reason(labels, mask, message):
    loss = DFTopKLoss(k=3)
    with pytest.warns(UserWarning, match=message):
        assert loss(SCORES, labels, mask) == 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(SCORES, labels, mask)


def test_the_warning_returns_after_ten_times_as_many_skipped_batches():
    loss = DFTopKLoss(k=3)
    counts = []
    for batch in range(1, 121):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss(SCORES, LABELS * 0)
        counts += [(batch, str(one.message).partition(":")[0]) for one in caught]
    of = "DFTopKLoss skipped every list of {} batches"
    assert counts == [(1, "DFTopKLoss skipped every list of a batch"), (10, of.format(10)), (100, of.format(100))]


def test_validation_of_padded_labels_names_the_mask():
    with pytest.raises(ValueError, match=r"only a mask marks padding: for labels of -1 pass mask=labels >= 0"):
        BCELoss(validate=True)(SCORES, torch.where(SCORES > 1, -1.0, LABELS))


def test_k_that_covers_every_list_warns():
    with pytest.warns(UserWarning, match=r"DFTopKLoss skipped every list.*choose 1 <= k < 6") as caught:
        assert DFTopKLoss(k=100)(SCORES, LABELS) == 0.0
    assert caught[0].filename == __file__


def test_labels_below_the_threshold_warn():
    with pytest.warns(UserWarning, match=r"positive_above = 7 \(the largest is 2\)"):
        assert BCELoss(positive_above=7)(SCORES, LABELS) == 0.0


@pytest.mark.parametrize("name", registry.available())
def test_batch_with_some_skipped_lists_does_not_warn(name):
    labels = LABELS * torch.tensor([[1.0], [0.0]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        get(name, k=2)(SCORES, labels)
        get(name, k=2)(SCORES[:0], labels[:0])


@pytest.mark.filterwarnings("ignore:.*skipped every list")
@pytest.mark.parametrize("name", registry.available())
def test_counted_lists_are_the_lists_that_enter_the_mean(name):
    draw = torch.Generator().manual_seed(0)
    scores, mask = torch.randn(400, 5, generator=draw), torch.rand(400, 5, generator=draw) < 0.6
    labels = torch.randint(0, 3, (400, 5), generator=draw) * (torch.rand(400, 5, generator=draw) < 0.4)
    k = torch.randint(0, 6, (400,), generator=draw)
    loss = get(name, reduction="none", positive_above=1)
    counted = loss.counted_lists(labels, mask, k=k)
    assert 20 < counted.sum() < 380
    assert (loss(scores, labels, mask, k=k)[~counted] == 0.0).all()
    # The mean is over the counted lists.
    loss.reduction = "mean"
    torch.manual_seed(0)
    if loss.operator is None or loss.operator.deterministic:
        torch.testing.assert_close(
            loss(scores, labels, mask, k=k), loss(scores[counted], labels[counted], mask[counted], k=k[counted])
        )
