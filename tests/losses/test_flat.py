"""Lists in 1-D tensors equal padded rows, need little memory, and errors name the right arguments."""

import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from recsys_topk import losses
from recsys_topk.losses.flat import FlatLists
from recsys_topk.ops import backend

LENGTHS = torch.tensor([5, 1, 10_000, 3, 0, 64, 65, 33, 1, 2_049, 700, 0, 12])


def flat(lengths=LENGTHS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    items = int(lengths.sum())
    scores = torch.randn(items, generator=generator, dtype=torch.float64)
    return scores, torch.randint(0, 4, (items,), generator=generator).double()


def padded(scores, labels, lengths=LENGTHS):
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    shape = mask.shape
    return (
        torch.zeros(shape).double().masked_scatter(mask, scores),
        torch.zeros(shape).masked_scatter(mask, labels.float()),
        mask,
    )


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("name", ["dftopk", "lapsum", "listnet"])
def test_flat_lists_equal_padded_rows(name, reduction):
    scores, labels = flat()
    scores.requires_grad_()
    k, weights = torch.arange(13) % 5 + 1, torch.linspace(0.1, 2.0, 13)
    loss = losses.get(name, reduction=reduction)
    x, y, mask = padded(scores, labels)
    expected = loss(x, y, mask, k=k, weights=weights)
    (slope,) = torch.autograd.grad(expected.sum(), scores)
    by_length = loss(scores, labels, lengths=LENGTHS, k=k, weights=weights)
    torch.testing.assert_close(by_length, expected)
    torch.testing.assert_close(torch.autograd.grad(by_length.sum(), scores)[0], slope)

    order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(1))
    ids = torch.arange(13).repeat_interleave(LENGTHS)[order]
    has_items = LENGTHS > 0
    by_id = loss(scores[order], labels[order], list_ids=ids, k=k[has_items], weights=weights[has_items])
    torch.testing.assert_close(by_id, expected[has_items] if reduction == "none" else expected)
    torch.testing.assert_close(torch.autograd.grad(by_id.sum(), scores)[0], slope)


@pytest.mark.parametrize(
    "lengths",
    [
        torch.arange(1, 10_001, 37),
        torch.tensor([1] * 500 + [10_000]),
        torch.tensor([2**i + 1 for i in range(1, 14)] * 3),
        torch.cat([torch.tensor([2**i + 1] * 40 + [2 ** (i + 1)]) for i in range(1, 13)]),
    ],
    ids=["1 to 10,000", "one long list", "just above powers of two", "one long list per bucket"],
)
def test_buckets_hold_fewer_than_two_entries_per_item(lengths):
    places = sum(bucket.items.numel() for bucket in FlatLists(lengths, None, lengths.device).buckets())
    assert places < 2 * int(lengths.sum())


class Peak(TorchDispatchMode):
    """Tracks the peak of the bytes of all live storages."""

    def __init__(self):
        super().__init__()
        self.live, self.now, self.peak = {}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor.untyped_storage())
        return made

    def count(self, storage):
        if storage.data_ptr() and storage.data_ptr() not in self.live:
            size, key = storage.nbytes(), storage.data_ptr()
            self.live[key] = weakref.finalize(storage, self.drop, key, size)
            self.now += size
            self.peak = max(self.peak, self.now)

    def drop(self, key, size):
        if self.live.pop(key, None) is not None:
            self.now -= size


def peak(loss, scores, labels, **lists):
    leaf = scores.clone().requires_grad_()
    gc.collect()
    with backend("torch"), Peak() as counted:
        loss(leaf, labels, **lists).backward()
    return counted.peak


@pytest.mark.parametrize("name", ["dftopk", "listnet"])
def test_memory_is_at_most_three_times_that_of_equally_many_items_in_a_rectangle(name):
    lengths = torch.cat((torch.arange(1, 101).repeat(4), torch.tensor([9_800, 10_000])))
    scores, labels = (x.float() for x in flat(lengths))
    loss = losses.get(name, k=5)
    rectangle = peak(loss, scores.view(400, 100), labels.view(400, 100))
    assert rectangle > 3 * 4 * len(scores)  # more than the inputs are counted
    assert peak(loss, scores, labels, lengths=lengths) <= 3 * rectangle
    x, y, mask = padded(scores.double(), labels, lengths)
    assert peak(loss, x.float(), y, mask=mask) > 50 * rectangle  # padding to the longest list


def test_list_ids_may_be_any_integers_and_results_are_sorted_by_id():
    scores, labels = torch.tensor([1.0, 0.0, 2.0, 3.0, -1.0]), torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0])
    loss = losses.SoftmaxLoss(reduction="none")
    found = loss(scores, labels, list_ids=torch.tensor([9, -4, 9, -4, 9], dtype=torch.int32))
    alone = [loss(scores[None, one], labels[None, one])[0] for one in ([1, 3], [0, 2, 4])]
    torch.testing.assert_close(found, torch.stack(alone))
    torch.testing.assert_close(loss(scores, labels, lengths=[2, 3]), loss(scores, labels, lengths=torch.tensor([2, 3])))


@pytest.mark.filterwarnings("ignore:ListNetLoss skipped every list")
def test_no_lists_and_empty_lists_give_zero_with_a_gradient():
    scores = torch.zeros(0, requires_grad=True)
    for lengths in (torch.zeros(0, dtype=torch.int64), torch.tensor([0, 0])):
        value = losses.ListNetLoss()(scores, torch.zeros(0), lengths=lengths)
        value.backward()
        assert value.item() == 0.0


def test_flat_lists_support_half_precision_and_validation():
    scores, labels = flat()
    value = losses.DFTopKLoss(k=2)(scores.half(), labels, lengths=LENGTHS)
    expected = losses.DFTopKLoss(k=2)(scores.half().float(), labels, lengths=LENGTHS)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, expected)
    scores[17] = float("nan")
    with pytest.raises(ValueError, match=r"scores\[17\] = nan"):
        losses.DFTopKLoss(k=2, validate=True)(scores, labels, lengths=LENGTHS)


def test_warning_for_skipped_lists_points_to_the_line_of_the_call():
    with pytest.warns(UserWarning, match="2 of 2 lists have no valid label above") as caught:
        assert losses.DFTopKLoss(k=1)(torch.zeros(5), torch.zeros(5), lengths=torch.tensor([2, 3])) == 0.0
    assert caught[0].filename == __file__


X, IDS = torch.zeros(4), torch.tensor([0, 0, 1, 1])
MISTAKES = {
    "both": ({"list_ids": IDS, "lengths": [4]}, ValueError, "pass one of them"),
    "mask": ({"list_ids": IDS, "mask": torch.ones(4).bool()}, ValueError, "leave masked items out"),
    "ids too short": ({"list_ids": IDS[:3]}, ValueError, r"list_ids must be one per item, \(4,\), got \(3,\)"),
    "float ids": ({"list_ids": X}, TypeError, "list_ids must hold integers, got torch.float32"),
    "lengths too short": ({"lengths": [1, 2]}, ValueError, "sum to the 4 items of scores, .* with sum 3"),
    "negative lengths": ({"lengths": [5, -1]}, ValueError, "not negative"),
    "weights": (
        {"list_ids": IDS, "weights": torch.ones(4)},
        ValueError,
        r"weights must have one entry per list, shape \(2,\)",
    ),
    "k": ({"list_ids": IDS, "k": torch.ones(4).long()}, ValueError, r"one int per list of shape \(2,\), got \(4,\)"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_invalid_arguments_raise(name):
    options, error, message = MISTAKES[name]
    with pytest.raises(error, match=message):
        losses.DFTopKLoss(k=1)(X, X, **options)


def test_wrong_shapes_raise():
    loss = losses.DFTopKLoss(k=1)
    with pytest.raises(ValueError, match=r"with list_ids, scores must be 1-D, one per item, got shape \(2, 2\)"):
        loss(X.view(2, 2), X.view(2, 2), list_ids=IDS)
    with pytest.raises(ValueError, match=r"labels must be 1-D, one per item, \(4,\), got \(3,\)"):
        loss(X, X[:3], list_ids=IDS)
