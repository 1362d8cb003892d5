"""Counter-based random numbers: draw j of a request depends only on the seed, the request and j."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

_GAMMA: Final = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed integer
_MIX_1: Final = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2: Final = -7723592293110705685  # 0x94D049BB133111EB


def scramble(x: Tensor) -> Tensor:
    """Return a hash of int64 values (the finaliser of SplitMix64). Every output bit depends on every input bit.

    Integer overflow wraps around in the same way on every device, so the result does not depend on the device.

    Example:
        >>> scramble(torch.tensor([0, 1]))
        tensor([                  0, 6238072747940578789])
    """
    x = _shifted(x, 30).bitwise_xor_(x).mul_(_MIX_1)
    x = _shifted(x, 27).bitwise_xor_(x).mul_(_MIX_2)
    return _shifted(x, 31).bitwise_xor_(x)


def _shifted(x: Tensor, bits: int | Tensor) -> Tensor:
    """Shift right and fill with zeros."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def request_keys(seed: int, request_id: Tensor) -> Tensor:
    """Return the key of each request, (B,) int64. The key determines the draws of the request."""
    start = int(scramble(torch.tensor([seed]) + _GAMMA))  # a Python number, so nothing is copied to the device
    return scramble(request_id * _GAMMA + start)


def integers(keys: Tensor, first: int, last: int, below: int | Tensor) -> Tensor:
    """Return draws `first` to `last` - 1 of each key, uniform in 0..below-1.

    A draw scales the top bits of a 64-bit hash to the range. If `below` has b bits, 62 - b bits of the hash are used.
    The probabilities of two values then differ by less than one part in 2^(62 - 2b).

    Args:
        keys: (B,) from `request_keys`.
        first: Index of the first draw.
        last: One past the index of the last draw.
        below: Size of the range, at most 2^30; a scalar tensor if it is known only on the device.

    Returns:
        (B, last - first) int64.
    """
    length = torch.frexp(below.double()).exponent.long() if isinstance(below, Tensor) else below.bit_length()
    bits = 62 - length
    steps = torch.arange(first + 1, last + 1, device=keys.device) * _GAMMA
    hashed = scramble(keys[:, None] + steps)
    return _shifted(hashed, 64 - bits).mul_(below).bitwise_right_shift_(bits)


def exponentials(keys: Tensor, number: int) -> Tensor:
    """Return `number` standard exponential variables per key, (B, number) float64, separate from `integers`."""
    steps = torch.arange(1, number + 1, device=keys.device) * _GAMMA
    uniform = (_shifted(scramble(~keys[:, None] + steps), 11).double() + 0.5) * math.ldexp(1.0, -53)
    return -torch.log(uniform)
