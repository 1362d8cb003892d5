"""The backend switch and the dispatcher choose the implementation of a call."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from recsys_topk.ops import backend, current_backend, dispatch
from recsys_topk.ops.dispatch import Operation, is_real
from recsys_topk.ops.selection.fill_masked import fill_masked
from recsys_topk.ops.stages.pooled_dot import dot


def reference(x: Tensor) -> str:
    return "torch"


@pytest.fixture
def operation() -> Operation[[Tensor], str]:
    made = Operation(reference)
    made.backend("numba", lambda x: is_real(x) and x.dtype == torch.float32)(lambda x: "numba")
    made.backend("numpy", is_real)(lambda x: "numpy")
    return made


@pytest.mark.parametrize(
    ("mode", "of_float32", "of_float64"),
    [("auto", "numba", "numpy"), ("torch", "torch", "torch"), ("numpy", "numpy", "numpy"), ("numba", "numba", "torch")],
)
def test_switch_selects_the_backend(
    operation: Operation[[Tensor], str], mode: str, of_float32: str, of_float64: str
) -> None:
    single, double, meta = torch.ones(1), torch.ones(1, dtype=torch.double), torch.ones(1, device="meta")
    with backend(mode):
        assert current_backend() == mode
        assert (operation(single), operation(double), operation(meta)) == (of_float32, of_float64, "torch")
        assert operation.backend_for(single) == of_float32
    assert current_backend() == os.environ.get(dispatch.SWITCH, "auto")


def test_backend_that_is_not_installed_is_skipped(
    operation: Operation[[Tensor], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "installed", lambda name: name != "numba")
    assert operation(torch.ones(1)) == "numpy"
    with (
        pytest.raises(
            ModuleNotFoundError,
            match=r"which is not installed or too old, or disabled by NUMBA_DISABLE_JIT; run pip .*recsys-topk\[fast\]",
        ),
        backend("numba"),
    ):
        pass


def test_old_numba_counts_as_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    newest = {"0.61.2": False, "0.68.0": True, "1.0.0rc1": True}
    for version, expected in newest.items():
        monkeypatch.setattr("importlib.metadata.version", lambda _, version=version: version)
        assert dispatch.installed.__wrapped__("numba") is expected


@pytest.mark.parametrize(("value", "expected"), [("1", False), ("0", True), ("", True)])
def test_numba_without_compiler_counts_as_not_installed(
    value: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_DISABLE_JIT", value)
    assert dispatch.installed.__wrapped__("numba") is (expected and dispatch.installed("numba"))


def test_error_for_unknown_backend_suggests_the_nearest() -> None:
    with (
        pytest.raises(
            ValueError, match=r"one of auto, torch, numpy, numba, triton, got 'numab'\. did you mean 'numba'\?"
        ),
        backend("numab"),
    ):
        pass


@pytest.mark.parametrize(("value", "expected"), [("torch", "torch"), ("fast", "ValueError")])
def test_environment_variable_sets_the_switch(value: str, expected: str) -> None:
    code = "import recsys_topk; print(recsys_topk.ops.current_backend())"
    environment = {**os.environ, dispatch.SWITCH: value}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert expected in (done.stdout if done.returncode == 0 else done.stderr)
    assert (done.returncode == 0) == (expected != "ValueError")


def test_transforms_use_the_reference(operation: Operation[[Tensor], str]) -> None:
    seen: list[str] = []

    def record_backend(x: Tensor) -> Tensor:
        seen.append(operation(x))
        return x.sum()

    torch.func.grad(record_backend)(torch.ones(3))
    torch.func.vmap(record_backend)(torch.ones(2, 3))
    assert seen == ["torch", "torch"]
    record_backend(torch.ones(3))
    assert seen[-1] == "numba"


def test_torch_backend_does_not_use_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """No loss converts a tensor to numpy on the backend "torch"."""
    from recsys_topk import losses

    def raise_on_numpy(self: Tensor) -> None:
        raise AssertionError("a tensor was converted to numpy")

    monkeypatch.setattr(Tensor, "numpy", raise_on_numpy)
    x, y, mask = torch.randn(3, 12, requires_grad=True), torch.arange(12.0).expand(3, 12), torch.rand(3, 12) > 0.2
    with backend("torch"):
        for name in losses.available():
            loss = losses.get(name)
            loss(x, y, mask, k=4).backward()
            loss(x, y, k=torch.tensor([1, 2, 3])).backward()


@pytest.mark.parametrize("value", [1.0, -3.5, float("inf")])
def test_fill_masked_fills_with_any_number(value: float) -> None:
    """Regression: it filled with -inf for every value except 0."""
    x, mask = torch.tensor([[1.0, 2.0]]), torch.tensor([[True, False]])
    assert fill_masked(x, mask, value).tolist() == [[1.0, value]]


def test_second_derivatives_of_loops_match_torch() -> None:
    requests, items = torch.randn(2, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    candidates = torch.tensor([[0, 1], [1, 3]])
    found = []
    for name in ("auto", "torch"):
        with backend(name):
            (slope,) = torch.autograd.grad(dot(requests, items, candidates).square().sum(), requests, create_graph=True)
            found.append(torch.autograd.grad(slope.square().sum(), [requests, items]))
    torch.testing.assert_close(found[0], found[1])
