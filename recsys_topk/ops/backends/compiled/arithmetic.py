"""Constants, and functions that LLVM does not vectorise. They take one number or 16 of them (see `lanes`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from recsys_topk.ops.backends.compiled.build import inlined
from recsys_topk.ops.backends.compiled.lanes import bits_of, floats_of, to_floats, where
from recsys_topk.ops.backends.task import WIDTH

f32, i32 = np.float32, np.int32
ZERO, HALF, ONE, TWO = f32(0.0), f32(0.5), f32(1.0), f32(2.0)
INFINITY = f32(np.inf)
LOWEST = f32(-80.0)  # the exponential of smaller numbers is not a normal number
EPS = f32(1.1920929e-07)
LOG_2 = f32(0.6931472)
SIGN, EXPONENT, BIAS = i32(31), i32(23), i32(127)
MAGNITUDE = i32(0x7FFFFFFF)
SMALLEST, LARGEST = i32(-0x80000000), i32(0x7FFFFFFF)
PRODUCT = 96 * WIDTH  # number of items whose terms are added, and whose factors of at most 2 are multiplied, in float32

# The exponential on [-log(2) / 2, log(2) / 2], to 3e-9 (a minimax fit); log(2) is subtracted in two parts.
LOG2_E, LOG2_HIGH, LOG2_LOW = f32(1.44269504), f32(0.693359375), f32(-2.12194440e-4)
E2, E3, E4 = f32(0.49999994), f32(0.16666521), f32(0.04166839)
E5, E6 = f32(0.0083687166), f32(0.0013814599)
# Adding it to a number below 2**22 rounds the number to an integer. The low bits of the sum are that integer plus the
# bias of the exponent.
ROUNDING = f32(1.5 * 2.0**23 + 127.0)

# log(1 + x) / x on [0, 1], with a relative error of 3e-8 (a weighted least-squares fit).
L1, L2, L3, L4 = f32(-0.49999493), f32(0.33319098), f32(-0.24842979), f32(0.19105993)
L5, L6, L7, L8 = f32(-0.13663214), f32(0.07822556), f32(-0.029504986), f32(0.0052326294)


@inlined
def exp_negative(x: Any) -> Any:
    """Return exp(x) for x <= 0, to 1 unit in the last place; exp(-80) for x < -80."""
    x = where(x < LOWEST, LOWEST, x)
    shifted = x * LOG2_E + ROUNDING
    n = shifted - ROUNDING
    r = x - n * LOG2_HIGH - n * LOG2_LOW
    y = r * E6 + E5
    y = y * r + E4
    y = y * r + E3
    y = y * r + E2
    y = y * (r * r) + r + ONE
    return y * floats_of(bits_of(shifted) << EXPONENT)


@inlined
def log1p_unit(x: Any) -> Any:
    """Return log(1 + x) for 0 <= x <= 1, to 2 units in the last place."""
    y = x * L8 + L7
    y = y * x + L6
    y = y * x + L5
    y = y * x + L4
    y = y * x + L3
    y = y * x + L2
    y = y * x + L1
    y = y * x + ONE
    return y * x


@inlined
def log_positive(x: Any) -> Any:
    """Return log(x) of a normal number x > 0."""
    bits = bits_of(x)
    mantissa = floats_of((bits & i32(0x7FFFFF)) | i32(0x3F800000))
    return to_floats((bits >> EXPONENT) - BIAS) * LOG_2 + log1p_unit(mantissa - ONE)


@inlined
def magnitude(x: Any) -> Any:
    """Return abs(x)."""
    return floats_of(bits_of(x) & MAGNITUDE)


@inlined
def below_zero(x: Any) -> Any:
    """Return -abs(x)."""
    return floats_of(bits_of(x) | SMALLEST)


@inlined
def log1p_positive(x: Any) -> Any:
    """Return log(1 + x) for x >= 0, to 3 units in the last place."""
    return where(x < ONE, log1p_unit(where(x < ONE, x, ONE)), log_positive(x + ONE))


@inlined
def ordered(x: Any) -> Any:
    """Return integers whose order is that of the float32 numbers."""
    bits = bits_of(x)
    return bits ^ ((bits >> SIGN) & MAGNITUDE)


@inlined
def number(order: Any) -> Any:
    """Return the float32 numbers of `ordered` integers."""
    return floats_of(order ^ ((order >> SIGN) & MAGNITUDE))
