"""Every registered operation on every backend against its torch reference: values and gradients."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from recsys_topk import ops
from recsys_topk.ops import dispatch
from recsys_topk.ops.dispatch import BACKENDS, Operation, backend, installed
from tests.ops.samples import registry

for module in pkgutil.walk_packages(ops.__path__, "recsys_topk.ops."):
    if ".backends." not in module.name:
        importlib.import_module(module.name)
for kind in ("losses", "operators", "selection", "stages"):
    importlib.import_module(f"tests.ops.samples.{kind}")

# Operations outside recsys_topk.ops may have been imported before; they are compared only if they have a backend.
OURS = {
    name: one
    for name, one in dispatch.operations.items()
    if name.startswith("recsys_topk.ops.") or (name.startswith("recsys_topk.") and one.implementations)
}
SAMPLED = sorted(registry.samples)
# Triton kernels are compared in test_triton_kernels.
HERE = [name for name in BACKENDS if installed(name) and name != "triton"]
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-11}


def tensors(values: Any) -> list[Tensor]:
    """Return all tensors in nested tuples and lists, in order."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, bool):
        return [torch.tensor(values)]
    if isinstance(values, Sequence) and not isinstance(values, str):
        return [x for value in values for x in tensors(value)]
    return []


def run(function: Callable[..., Any], arguments: Sequence[Any]) -> list[Tensor]:
    """Return the outputs, then the gradients of a weighted sum of the floating-point outputs."""
    # Tensors with a grad_fn may be overwritten; leaves may not.
    copies = [x.clone() if isinstance(x, Tensor) and x.grad_fn is not None else x for x in arguments]
    before = [x.detach().clone() for x in tensors(arguments)]
    outputs = tensors(function(*copies))
    leaves = [x for x in tensors(arguments) if x.requires_grad and x.is_leaf]
    floating = [y for y in outputs if y.requires_grad and y.numel()]
    found = [y.detach() for y in outputs]
    if leaves and floating:
        weights = [torch.cos(torch.arange(y.numel())).view_as(y).to(y.dtype) * y.isfinite() for y in floating]
        gradients = torch.autograd.grad(floating, leaves, weights, allow_unused=True, retain_graph=True)
        found += [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, leaves, strict=True)]
    for x, kept in zip(tensors(arguments), before, strict=True):
        torch.testing.assert_close(x.detach(), kept, rtol=0, atol=0, equal_nan=True, msg="an input was written to")
    return found


def compare(function: Callable[..., Any], samples: Iterable[Sequence[Any]], name: str) -> int:
    """Compare a backend with the reference on all samples; return the number of samples."""
    number = 0
    for arguments in samples:
        number += 1
        with backend("torch"):
            expected = run(function, arguments)
        with backend(name):
            found = run(function, arguments)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == other.dtype
            tolerance = TOLERANCE.get(other.dtype, 0.0)
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
    return number


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("function", SAMPLED, ids=lambda name: name.removeprefix("recsys_topk."))
def test_backend_matches_torch(function: str, name: str) -> None:
    call, samples = registry.samples[function]
    assert compare(call, samples(torch.Generator().manual_seed(0)), name) > 0


@pytest.mark.parametrize("function", OURS, ids=lambda name: name.removeprefix("recsys_topk."))
def test_samples_reach_every_backend(function: str) -> None:
    operation, (_, samples) = OURS[function], registry.samples[function]
    given = list(samples(torch.Generator().manual_seed(0)))
    with torch.no_grad():
        unserved = [one for one in operation.implementations if not any(one.serves(*x) for x in given)]
    assert given
    assert not [one.backend for one in unserved if one.backend != "triton"]


def test_comparison_detects_wrong_backends() -> None:
    """Planted faults: a wrong value, gradient or dtype, and a write into the input."""

    def double(x: Tensor) -> Tensor:
        return x * 2.0

    class WrongGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2.0

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2.01

    def written(x: Tensor) -> Tensor:
        x.detach().mul_(1.5)
        return x * 2.0

    faults: list[Callable[[Tensor], Tensor]] = [
        lambda x: x * 2.001,
        WrongGradient.apply,
        lambda x: (x * 2.0).double(),
        written,
    ]
    for fault in faults:
        planted = Operation(double)
        planted.backend("numpy", lambda x: True)(fault)
        with pytest.raises(AssertionError):
            compare(planted, [(torch.randn(3, 4).requires_grad_(),)], "numpy")
    sound = Operation(double)
    sound.backend("numpy", lambda x: True)(lambda x: x + x)
    assert compare(sound, [(torch.randn(3, 4).requires_grad_(),)], "numpy") == 1
