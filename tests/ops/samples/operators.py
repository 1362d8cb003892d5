"""Arguments of the operations of `recsys_topk.operators` for the comparison of their backends."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from recsys_topk.numerics import full_mask
from recsys_topk.operators.diffsort import Network, _Wires, network_masses
from recsys_topk.operators.neuralsort import _centred, neuralsort_gradient, neuralsort_masses
from tests.ops.samples.registry import sampled


@sampled(network_masses)
def network_masses_samples(generator: torch.Generator) -> Iterator[tuple[Any, ...]]:
    networks: tuple[Network, ...] = ("bitonic", "odd_even")
    for dtype, network in itertools.product((torch.float32, torch.float64), networks):
        for lists, n in ((3, 8), (17, 11), (2, 2)):
            scores = torch.randn(lists, n, generator=generator, dtype=dtype)
            mask = torch.rand(lists, n, generator=generator) < 0.7
            mask[:, :2] = True
            for valid in (full_mask(scores), mask):
                width = 1 << (n - 1).bit_length() if network == "bitonic" else n
                wires = _Wires.of(scores, valid, width, network)
                x = scores.new_zeros(lists, width).scatter(1, wires.place, scores)
                yield x.requires_grad_(), wires, 1, network, "cauchy", 0.5


@sampled(neuralsort_masses)
def neuralsort_masses_samples(generator: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for dtype in (torch.float32, torch.float64):
        for n in (9, 50):
            count, k = torch.tensor([n, n - 2, n - 5]), torch.tensor([1, 3, 2])
            x = torch.randn(3, n, generator=generator, dtype=dtype).sort(1, descending=True).values
            x *= torch.tensor([[0.01], [0.1], [1.0]], dtype=dtype)
            for normalised in (True, False):
                yield *_centred(x, count), k, count, 2.0, normalised


@sampled(neuralsort_gradient)
def neuralsort_gradient_samples(generator: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for v, distance, k, count, tau, normalised in neuralsort_masses_samples(generator):
        masses = neuralsort_masses.reference(v, distance, k, count, tau, normalised)
        valid = distance.isfinite()
        grads = (torch.where(valid, v.cos(), 0.0), torch.where(valid & torch.tensor(normalised), v.sin(), 0.0))
        yield v, distance, k, count, *masses, *grads, tau, normalised
