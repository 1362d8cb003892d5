"""Losses as functions: one for each registered loss, with its options, types and documentation."""

import inspect
import subprocess
import sys

import pytest
import torch

from recsys_topk.losses import available, functional, registry
from recsys_topk.testing.lists import ragged

LISTS = ragged()


@pytest.mark.parametrize("name", available())
def test_function_equals_its_loss(name):
    cls = registry.resolve(name)
    if name == "perturbed":
        torch.manual_seed(0)
    weights = torch.tensor([1.0, 2.0, 3.0])
    expected = cls(k=2, positive_above=1.0, reduction="none")(LISTS.scores, LISTS.labels, LISTS.mask, weights=weights)
    if name == "perturbed":
        torch.manual_seed(0)
    function = getattr(functional, name)
    options = {"positive_above": 1.0, "reduction": "none", "weights": weights}
    assert torch.equal(function(LISTS.scores, LISTS.labels, LISTS.mask, k=2, **options), expected)
    assert function is getattr(functional, name)
    assert name in dir(functional)


@pytest.mark.parametrize("name", available())
def test_signature_and_documentation_show_every_argument(name):
    function, own = getattr(functional, name), inspect.signature(registry.resolve(name).__init__).parameters
    shown = inspect.signature(function).parameters
    assert list(shown)[:4] == ["scores", "labels", "mask", "k"]
    assert {*own} - {"self"} | {"weights", "list_ids", "lengths"} <= {*shown}
    for argument, parameter in shown.items():
        assert f"\n    {argument}: " in function.__doc__, argument
        assert not isinstance(parameter.annotation, str), argument
        assert parameter.annotation is not parameter.empty, argument
        if argument in own:
            assert parameter.default == own[argument].default
    assert function.__name__ == name
    assert function.__module__ == "recsys_topk.losses.functional"


def test_k_is_one_int_one_int_per_list_or_positives():
    x, y = LISTS.scores, LISTS.labels
    each = torch.tensor([1, 2, 3])
    alone = [functional.lapsum(x[i : i + 1], y[i : i + 1], k=i + 1) for i in range(3)]
    torch.testing.assert_close(functional.lapsum(x, y, k=each, reduction="none"), torch.stack(alone))
    positives = functional.lapsum(x, y, k="positives")
    torch.testing.assert_close(positives, functional.lapsum(x, y, k=(y > 0).sum(1)))


def test_seeded_function_gives_the_same_result_in_each_call():
    first, second = (functional.perturbed(LISTS.scores, LISTS.labels, k=2, seed=3) for _ in range(2))
    assert torch.equal(first, second)


def test_errors_name_the_function_and_the_option():
    with pytest.raises(AttributeError, match=r"has no function 'dftpk': .*did you mean 'dftopk'"):
        _ = functional.dftpk
    with pytest.raises(TypeError, match="DFTopKLoss has no option 'taau'; did you mean 'tau'"):
        functional.dftopk(LISTS.scores, LISTS.labels, taau=1.0)
    with pytest.raises(TypeError, match=r"dftopk\(\) missing 1 required positional argument: 'labels'"):
        functional.dftopk(LISTS.scores)


def test_functions_can_be_imported_by_name():
    code = "from recsys_topk.losses.functional import dftopk, neural_ndcg; print(dftopk.__name__, neural_ndcg.__name__)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["dftopk", "neural_ndcg"]
