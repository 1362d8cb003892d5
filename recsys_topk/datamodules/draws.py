"""Random numbers that are a function of their position: the j-th draw of a request is the same wherever it is made."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

_GAMMA: Final = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed integer
_MIX_1: Final = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2: Final = -7723592293110705685  # 0x94D049BB133111EB


def scramble(x: Tensor) -> Tensor:
    """Return int64 values mixed so that every output bit depends on every input bit (the finaliser of SplitMix64).

    Integer arithmetic wraps the same way on every device, so the values are the same on all of them.

    Example:
        >>> scramble(torch.tensor([0, 1]))
        tensor([                  0, 6238072747940578789])
    """
    x = _shifted(x, 30).bitwise_xor_(x).mul_(_MIX_1)
    x = _shifted(x, 27).bitwise_xor_(x).mul_(_MIX_2)
    return _shifted(x, 31).bitwise_xor_(x)


def _shifted(x: Tensor, bits: int | Tensor) -> Tensor:
    """Shift right, filling with zeros."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def request_keys(seed: int, request_id: Tensor) -> Tensor:
    """Return a key for each request, (B,) int64, from which its draws follow."""
    start = int(scramble(torch.tensor([seed]) + _GAMMA))  # on the host, as a number: nothing is copied to the device
    return scramble(request_id * _GAMMA + start)


def integers(keys: Tensor, first: int, last: int, below: int | Tensor) -> Tensor:
    """Return draws number `first` to `last` - 1 of each key, uniform in 0..below-1.

    The draw is the top bits of a 64-bit hash scaled to the range; with b bits in `below`, 62 - b of them are used, so
    that the probabilities of two values differ by less than one part in 2^(62 - 2b).

    Args:
        keys: (B,) from `request_keys`.
        first: Number of the first draw.
        last: One past the last draw.
        below: Size of the range, at most 2^30; a scalar tensor where it is known on the device only.

    Returns:
        (B, last - first) int64.
    """
    length = torch.frexp(below.double()).exponent.long() if isinstance(below, Tensor) else below.bit_length()
    bits = 62 - length
    steps = torch.arange(first + 1, last + 1, device=keys.device) * _GAMMA
    hashed = scramble(keys[:, None] + steps)
    return _shifted(hashed, 64 - bits).mul_(below).bitwise_right_shift_(bits)


def exponentials(keys: Tensor, number: int) -> Tensor:
    """Return `number` unit exponential variables of each key, (B, number) float64, apart from its integer draws."""
    steps = torch.arange(1, number + 1, device=keys.device) * _GAMMA
    uniform = (_shifted(scramble(~keys[:, None] + steps), 11).double() + 0.5) * math.ldexp(1.0, -53)
    return -torch.log(uniform)
