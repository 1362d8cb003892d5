"""Options that a loss takes from the data: positive_above, the gain of graded losses, the target of ListNet."""

import copy
import pickle

import pytest
import torch

from recsys_topk.losses import LambdaLoss, get, registry
from recsys_topk.spec import describe

PLACES = torch.tensor([[29.0, 7.0, 28.0, 6.0, 0.0, 25.0], [5.0, 6.0, 7.0, 0.0, 5.0, 6.0]])
SCORES = torch.tensor([[0.3, 0.8, -0.1, 1.4, 0.2, 0.6], [0.1, 0.5, -0.4, 0.9, 0.0, -0.2]])

# The option of each loss that depends on the kind of labels, with its value for grades and for places.
OPTIONS = {
    "approx_ndcg": ("gain", "exponential", "linear"),
    "lambdaloss": ("gain", "exponential", "linear"),
    "lambdarank": ("gain", "exponential", "linear"),
    "listnet": ("target", "softmax", "normalised"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_option_left_none_follows_the_kind_of_labels(name):
    option, for_grades, for_places = OPTIONS[name]
    for kind, value in (("grades", for_grades), ("places", for_places)):
        loss = get(name, k=2)
        assert getattr(loss, option) == for_grades  # the default before the data sets it
        loss.set_label_defaults(kind, 7.0)
        loss.set_label_defaults(kind, 7.0)
        explicit = get(name, k=2, positive_above=7.0, **{option: value})
        assert torch.equal(loss(SCORES, PLACES), explicit(SCORES, PLACES))


@pytest.mark.parametrize("name", OPTIONS)
def test_explicit_option_is_kept(name):
    option, for_grades, _ = OPTIONS[name]
    loss = get(name, k=2, **{option: for_grades})
    loss.set_label_defaults("places", 7.0)
    assert getattr(loss, option) == for_grades


@pytest.mark.parametrize("name", registry.available())
def test_every_loss_takes_the_threshold_from_the_data_unless_set(name):
    # Two positives above 7 in the first list and none in the second; five above 0 in each.
    from_data, explicit, zero = get(name, k=2), get(name, k=2, positive_above=7.0), get(name, k=2, positive_above=0)
    for loss in (from_data, explicit, zero):
        loss.set_label_defaults("grades", 7.0)
    assert (from_data.positive_above, explicit.positive_above, zero.positive_above) == (7.0, 7.0, 0.0)
    for loss in (from_data, explicit, zero):
        loss.reduction = "none"
        torch.manual_seed(0)
        loss.last = loss(SCORES, PLACES).detach()
    assert torch.equal(from_data.last, explicit.last)
    assert from_data.last[1] == 0.0
    assert zero.last[1] != 0.0


def test_description_keeps_options_left_none():
    loss = LambdaLoss(k=10, gain=None, positive_above=None)
    loss.set_label_defaults("places", 7.0)
    assert describe(loss)["init_args"] == {"k": 10, "gain": None, "positive_above": None}


def test_copies_and_pickles_accept_label_defaults():
    for loss in (copy.deepcopy(LambdaLoss(k=10)), pickle.loads(pickle.dumps(LambdaLoss(k=10)))):
        loss.set_label_defaults("places", 7.0)
        assert (loss.gain, loss.positive_above) == ("linear", 7.0)


def test_wrong_option_raises():
    with pytest.raises(ValueError, match="gain must be 'linear'"):
        LambdaLoss(gain="log")
    with pytest.raises(ValueError, match="target must be 'softmax'"):
        get("listnet", target="soft")
