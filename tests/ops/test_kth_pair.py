"""The k-th pair against a full sort, through every branch of the selection."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from recsys_topk.numerics import full_mask
from recsys_topk.ops.selection.count_true import count_true
from recsys_topk.ops.selection.fill_masked import fill_masked
from recsys_topk.ops.selection.kth_pair import kth_largest, kth_pair, kth_values, pair_numpy
from recsys_topk.ops.selection.scan import scan
from recsys_topk.ops.selection.sorting import share_ties, sort_descending

# Shapes that reach the SIMD sort, the partition of the smaller side, the group prefilter and the sample.
SHAPES = [
    (3, 2, 1),
    (4, 17, 16),
    (5, 512, 10),
    (3, 513, 256),
    (3, 600, 599),
    (2, 2000, 30),
    (2, 3001, 5),
    (2, 25_000, 90),
]


def pair_by_sorting(x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    ordered = x.sort(1, descending=True).values
    return ordered.gather(1, k[:, None] - 1), ordered.gather(1, k[:, None])


@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ties", [False, True])
def test_kth_pair_equals_full_sort(rows: int, n: int, k: int, dtype: torch.dtype, ties: bool) -> None:
    x = torch.randn(rows, n, dtype=dtype, generator=torch.Generator().manual_seed(n))
    x = (x * 2).round() / 2 if ties else x
    for depth in (k, torch.randint(1, k + 1, (rows,)), torch.randint(1, n, (rows,))):
        expected = pair_by_sorting(x, depth if isinstance(depth, Tensor) else torch.full((rows,), k))
        for value, exact in zip(kth_pair(x, depth, full_mask(x)), expected, strict=True):
            assert torch.equal(value, exact)
    mask = torch.rand(rows, n) > 0.3
    mask[:, :2] = True
    some = torch.minimum(torch.randint(1, k + 1, (rows,)), mask.sum(1) - 1)
    nan_padded = torch.where(mask, x, float("nan"))
    expected = pair_by_sorting(torch.where(mask, x, -math.inf), some)
    for value, exact in zip(kth_pair(nan_padded, some, mask), expected, strict=True):
        assert torch.equal(value, exact)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_kth_pair_equals_full_sort_on_random_lists(data: st.DataObject) -> None:
    n = data.draw(st.integers(2, 40))
    values = data.draw(st.lists(st.floats(-10, 10, width=32), min_size=n, max_size=n))
    k = data.draw(st.integers(1, n - 1))
    kept, cut = pair_numpy(np.array([values], dtype=np.float32), k)
    ordered = sorted((np.float32(v) for v in values), reverse=True)
    assert (kept[0], cut[0]) == (ordered[k - 1], ordered[k])


@pytest.mark.parametrize(("n", "k"), [(20, 4), (700, 300), (2000, 20), (30_000, 50)])
def test_nan_ranks_above_every_number(n: int, k: int) -> None:
    x = torch.randn(2, n)
    x[0, [1, n // 2]] = float("nan")
    kept, cut = kth_values(x, k)
    clean = x[0][~x[0].isnan()].sort(descending=True).values
    assert (kept[0, 0], cut[0, 0]) == (clean[k - 3], clean[k - 2])
    assert torch.equal(torch.cat(pair_by_sorting(x[1:], torch.tensor([k]))), torch.cat((kept[1:], cut[1:])))
    assert kth_values(x, 1)[0][0].isnan()


def test_tied_items_share_the_gradient() -> None:
    x = torch.tensor([[3.0, 1.0, 2.0, 2.0, 0.0, 2.0, 1.0]], requires_grad=True)
    kept, cut = kth_pair(x, 4, full_mask(x))
    (kept * 3.0 + cut * 5.0).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.tensor([[0.0, 2.5, 1.0, 1.0, 0.0, 1.0, 2.5]]))
    y = torch.tensor([[1.0, 0.0, 1.0]], requires_grad=True)
    (share_ties(y) * torch.tensor([[1.0, 7.0, 3.0]])).sum().backward()
    assert y.grad is not None
    assert y.grad.tolist() == [[2.0, 7.0, 2.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sort_with_indices_is_stable(dtype: torch.dtype) -> None:
    x = torch.randn(6, 33, dtype=dtype).mul(2).round()
    x[0, :3] = torch.tensor([math.inf, -math.inf, math.inf])
    values, order = sort_descending(x)
    expected = x.sort(dim=1, descending=True, stable=True)
    assert torch.equal(values, expected.values)
    assert torch.equal(order, expected.indices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.0, -math.inf])
def test_fill_masked_equals_where(dtype: torch.dtype, value: float) -> None:
    x = torch.randn(4, 9, dtype=dtype)
    mask = torch.rand(4, 9) > 0.4
    x[~mask] = torch.tensor([float("nan"), math.inf, -math.inf], dtype=dtype)[torch.arange(int((~mask).sum())) % 3]
    x[mask.nonzero()[0, 0], mask.nonzero()[0, 1]] = float("nan")
    x.requires_grad_()
    filled = fill_masked(x, mask, value)
    torch.testing.assert_close(filled, torch.where(mask, x, value), equal_nan=True, rtol=0, atol=0)
    filled.backward(torch.full_like(x, float("nan")).masked_fill(mask, 2.0))
    assert x.grad is not None
    assert torch.equal(x.grad, mask.to(dtype) * 2.0)
    strided = fill_masked(torch.ones(9, 4, dtype=dtype).t(), mask, 0.0)
    assert torch.equal(strided, mask.to(dtype))


def test_count_true_equals_sum() -> None:
    for shape in ((3, 5), (1, 9), (2, 70_000), (4, 0), (0, 3)):
        mask = torch.rand(shape) > 0.5
        assert torch.equal(count_true(mask), mask.sum(1))


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (1, 97), (3, 50), (2, 1001), (40, 7), (0, 4)])
@pytest.mark.parametrize("reverse", [False, True])
def test_scan_equals_loop_and_does_not_change_its_input(shape: tuple[int, int], reverse: bool) -> None:
    a, b = torch.rand(shape, dtype=torch.float64), torch.rand(shape, dtype=torch.float64)
    kept = a.clone(), b.clone()
    expected, carried = torch.empty_like(b), torch.zeros(shape[0], dtype=torch.float64)
    for i in reversed(range(shape[1])) if reverse else range(shape[1]):
        carried = a[:, i] * carried + b[:, i]
        expected[:, i] = carried
    torch.testing.assert_close(scan(a, b, reverse), expected)
    assert torch.equal(a, kept[0])
    assert torch.equal(b, kept[1])


@pytest.mark.parametrize("k", [(None, 3), (torch.tensor([1, 2]), 0)])
def test_registered_operator_passes_opcheck(k: Any) -> None:
    torch.library.opcheck(torch.ops.recsys_topk.kth_largest.default, (torch.randn(2, 9), *k))
    assert kth_largest(torch.randn(2, 9), *k)[0].shape == (2, 1)


def test_fake_tensors_give_shapes() -> None:
    with FakeTensorMode():
        kept, cut = kth_pair(torch.empty(4, 9), 3, full_mask(torch.empty(4, 9)))
        assert kept.shape == cut.shape == (4, 1)
