"""Vectors in compiled loops against numpy, and the cache of compiled loops."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

numba = pytest.importorskip("numba")

from recsys_topk.ops.backends.compiled.arithmetic import (  # noqa: E402
    ONE,
    ZERO,
    exp_negative,
    log1p_positive,
    log1p_unit,
    log_positive,
    magnitude,
    number,
    ordered,
)
from recsys_topk.ops.backends.compiled.lanes import count, greatest, least, places, splat, total, where  # noqa: E402
from recsys_topk.ops.backends.compiled.memory import load, load_bits, load_where, store, store_where  # noqa: E402
from recsys_topk.ops.backends.compiled.selection import quantile  # noqa: E402

F = np.float32


@numba.njit(error_model="numpy")
def functions_by_lanes(x: Any, n: Any, y: Any) -> None:
    for i in range(0, n, 16):
        v = load(x, i)
        store(y, i, exp_negative(ZERO - magnitude(v)))
        store(y, i + n, log1p_unit(exp_negative(ZERO - magnitude(v))))
        store(y, i + 2 * n, log_positive(magnitude(v)))
        store(y, i + 3 * n, log1p_positive(magnitude(v)))
        store(y, i + 4 * n, number(ordered(v)))


@numba.njit(error_model="numpy")
def functions_by_item(x: Any, y: Any) -> None:
    for i in range(len(x)):
        y[0, i] = exp_negative(-abs(x[i]))
        y[1, i] = log1p_unit(exp_negative(-abs(x[i])))
        y[2, i] = log_positive(abs(x[i]))
        y[3, i] = log1p_positive(abs(x[i]))
        y[4, i] = number(ordered(x[i]))


@numba.njit(error_model="numpy")
def list_statistics(x: Any, mask: Any, n: Any, y: Any) -> Any:
    sums, low, high = splat(ZERO), splat(F(np.inf)), splat(F(-np.inf))
    positive, real = np.int32(0), np.int32(0)
    for i in range(0, n, 16):
        inside = places(np.int32(i)) < np.int32(n)
        v, valid = load_where(x, i, inside), load_bits(mask, i, inside)
        sums = sums + where(valid, v, ZERO)
        low = where(valid & (v < low), v, low)
        high = where(valid & (v > high), v, high)
        positive += count((v > ZERO) & inside)
        real += count(valid)
        store_where(y, i, (v - ONE) / (v * v + F(2.0)), inside)
    return total(sums), least(low), greatest(high), positive, real


def test_functions_are_accurate_to_a_few_units_in_the_last_place():
    magnitudes = np.concatenate([np.geomspace(1e-30, 79.0, 20_000), np.linspace(0.1, 80.0, 12_000)]).astype(F)
    x = magnitudes * np.where(np.arange(len(magnitudes)) % 2, F(1), F(-1))
    found, single = np.empty((5, len(x)), F), np.empty((5, len(x)), F)
    functions_by_lanes(x.ctypes.data, len(x), found.ctypes.data)
    functions_by_item(x, single)
    wide = np.abs(x).astype(np.float64)
    exact = [np.exp(-wide), np.log1p(np.exp(-wide)), np.log(wide), np.log1p(wide)]
    for row, (values, other, expected, units) in enumerate(zip(found, single, exact, (1, 3, 4, 4), strict=False)):
        size = np.maximum(np.abs(expected), 1.0) if row == 2 else expected  # the logarithm is 0 at 1
        assert (np.abs(values - expected) / size).max() <= units * 2.0**-23
        assert (np.abs(other - expected) / size).max() <= units * 2.0**-23
    assert (found[4] == x).all()
    assert (single[4] == x).all()


@pytest.mark.parametrize("n", [1, 15, 16, 17, 40])
def test_list_of_any_length_is_read_and_written_within_its_bounds(n):
    random = np.random.default_rng(n)
    x, mask = random.standard_normal(n + 40).astype(F), random.random(n + 40) < 0.7
    mask[0] = True
    x[n:], mask[n:] = np.nan, True  # memory after the list
    y = np.full(n + 40, 7.0, F)
    sums, low, high, positive, real = list_statistics(x.ctypes.data, mask.ctypes.data, n, y.ctypes.data)
    chosen = x[:n][mask[:n]]
    assert sums == pytest.approx(chosen.sum(dtype=np.float64), rel=1e-5, abs=1e-5)
    assert (low, high) == (chosen.min(), chosen.max())
    assert (positive, real) == ((x[:n] > 0).sum(), mask[:n].sum())
    np.testing.assert_allclose(y[:n], (x[:n] - 1) / (x[:n] ** 2 + 2), rtol=1e-6, atol=1e-7)
    assert (y[n:] == 7.0).all()


@numba.njit(error_model="numpy")
def quantiles(p: Any, z: Any, density: Any) -> None:
    for i in range(len(p)):
        z[i], density[i] = quantile(p[i])


def test_table_of_quantiles_matches_the_normal_distribution():
    p = np.array([1e-9, 1e-6, 0.001, 0.05, 0.3, 0.49, 0.5, 0.51, 0.75, 0.999], F)
    z, density = np.empty_like(p), np.empty_like(p)
    quantiles(p, z, density)
    law = NormalDist()
    expected = np.array([-law.inv_cdf(max(one, 2.0**-24)) for one in p.tolist()])
    np.testing.assert_allclose(z, expected, atol=0.02)
    np.testing.assert_allclose(density, [law.pdf(one) for one in expected], rtol=0.02)
