"""Losses accept any integer type as k, and errors name the right call."""

import numpy as np
import pytest
import torch

from recsys_topk import losses, operators
from recsys_topk.losses import DFTopKLoss, LapSumLoss
from recsys_topk.spec import describe

X = torch.tensor([[0.3, -1.2, 0.9, 1.9], [0.1, 0.2, 0.3, -0.4]])
Y = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]])


@pytest.mark.parametrize("k", [np.int64(2), np.uint8(2), torch.tensor(2), torch.tensor(2, dtype=torch.int32)])
def test_k_may_be_any_integer_type(k):
    expected = DFTopKLoss(k=2)(X, Y)
    assert torch.equal(DFTopKLoss(k=k)(X, Y), expected)
    assert torch.equal(DFTopKLoss(k=1)(X, Y, k=k), expected)
    assert torch.equal(operators.get("lapsum")(X, k).p, operators.get("lapsum")(X, 2).p)


def test_k_is_described_as_a_plain_int():
    assert type(describe(DFTopKLoss(k=np.int64(2)))["init_args"]["k"]) is int
    assert type(describe(LapSumLoss(k=torch.tensor(2)))["init_args"]["k"]) is int


def test_k_may_be_a_scalar_tensor_under_compilation():
    torch.compiler.reset()
    compiled = torch.compile(DFTopKLoss(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(X, Y, k=torch.tensor(2)), DFTopKLoss(k=2)(X, Y))


@pytest.mark.parametrize(
    "k", [2.5, np.float64(2.0), torch.tensor(2.5), "two", True, np.bool_(True), torch.tensor(True)]
)
def test_non_integer_k_raises(k):
    with pytest.raises((TypeError, ValueError), match="k must"):
        DFTopKLoss(k=k)
    with pytest.raises(TypeError, match="k must"):
        DFTopKLoss()(X, Y, k=k)


@pytest.mark.parametrize("k", [[1, 2], (1, 2), np.array([1, 2])])
def test_error_for_a_sequence_as_k_names_the_tensor_to_pass(k):
    for call in (lambda: DFTopKLoss(k=k), lambda: DFTopKLoss()(X, Y, k=k), lambda: operators.get("lapsum")(X, k)):
        with pytest.raises(TypeError, match=r"one entry per list, got (list|tuple|ndarray); pass torch.as_tensor\(k\)"):
            call()


@pytest.mark.parametrize("name", [n for n, cls in losses.registry.classes().items() if cls.requires_k])
def test_an_int_without_a_name_is_not_taken_for_another_option(name):
    cls = losses.registry.classes()[name]
    with pytest.raises(TypeError, match=rf"{cls.__name__}\(10\) would set tau, not k; write {cls.__name__}\(k=10\)"):
        cls(10)
    assert cls(2.0).k is None
    assert cls(2, k=10).k == 10


def test_complex_labels_raise():
    with pytest.raises(TypeError, match=r"labels must be real numbers, got torch.complex64; pass labels.real"):
        DFTopKLoss(k=2)(X, Y.to(torch.complex64))
    with pytest.raises(TypeError, match=r"labels must be real numbers"):
        DFTopKLoss(k=2)(X.flatten(), Y.flatten().to(torch.complex64), lengths=[4, 4])


@pytest.mark.parametrize("k", [np.int64(-1), torch.tensor(-1)])
def test_negative_k_raises(k):
    with pytest.raises(ValueError, match=r"non-negative int.*got -1"):
        DFTopKLoss(k=k)
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        DFTopKLoss()(X, Y, k=k)


def test_error_for_class_indices_names_one_hot():
    with pytest.raises(
        ValueError, match=r"index of one positive item per list, pass torch.nn.functional.one_hot\(labels, 4\)"
    ):
        DFTopKLoss(k=1)(X, torch.tensor([0, 2]))


@pytest.mark.parametrize(
    ("shape", "hint"),
    [
        ((2, 3, 4), r"scores.flatten\(0, -2\)"),
        ((2, 4, 1), r"scores.squeeze\(-1\)"),
        ((4,), r"scores\[None, :\].*list_ids or lengths"),
        ((), r"scores\[None, :\]"),
    ],
)
def test_error_for_wrong_shapes_names_the_right_call(shape, hint):
    with pytest.raises(ValueError, match=hint):
        DFTopKLoss(k=1)(torch.zeros(shape), torch.zeros(shape))
    with pytest.raises(ValueError, match=hint):
        operators.get("dftopk")(torch.zeros(shape), 1)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_error_for_nested_tensors_names_the_right_call(layout):
    rows = [torch.tensor([0.3, -0.2, 0.5]), torch.tensor([1.0, 2.0])]
    scores = torch.nested.nested_tensor(rows, layout=layout)
    with pytest.raises(TypeError, match=r"loss\(scores.values\(\), labels.values\(\), lengths=scores.offsets\(\).diff"):
        DFTopKLoss(k=1)(scores, scores)
    if layout == torch.jagged:
        value = DFTopKLoss(k=1)(scores.values(), scores.values() > 0, lengths=scores.offsets().diff())
        alone = [DFTopKLoss(k=1)(row[None], row[None] > 0) for row in rows]
        torch.testing.assert_close(value, torch.stack(alone).mean())


def test_error_for_misspelt_option_names_the_class_and_a_suggestion():
    with pytest.raises(TypeError, match="DFTopKLoss has no option 'taau'; did you mean 'tau'"):
        DFTopKLoss(taau=1)
    with pytest.raises(TypeError, match="LapSumLoss has no option 'reductoin'; did you mean 'reduction'"):
        losses.get("lapsum", reductoin="sum")
    with pytest.raises(TypeError, match="DiffSort has no option 'netwerk'; did you mean 'network'"):
        operators.get("diffsort", netwerk="bitonic")
