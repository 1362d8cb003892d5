"""The top-k losses against peers, brute force and finite differences."""

from __future__ import annotations

import json
import math
import pickle
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recsys_topk.losses import get, registry
from recsys_topk.losses.topk import TopKLoss, _say_once
from recsys_topk.operators import get as get_operator
from recsys_topk.ops.losses.topk_target import topk_target
from tests.conftest import long_except

VECTORS = Path(__file__).parents[1] / "vectors"
NAMES = [name for name, cls in registry.classes().items() if issubclass(cls, TopKLoss)]
ARGUMENTS: dict[str, dict[str, Any]] = {"perturbed": {"seed": 0}}
FINITE = [n for n in NAMES if n not in ("hard", "perturbed", "sinkhorn", "softsort", "neuralsort")]


def build(name: str, **arguments: Any) -> Any:
    return get(name, **{**ARGUMENTS.get(name, {}), **arguments})


def cases(file: str) -> list[dict[str, Any]]:
    return json.loads((VECTORS / f"{file}.json").read_text())["cases"]


def value_and_gradient(loss: Any, x: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    value = loss(x, *arguments, **options)
    (grad,) = torch.autograd.grad(value.sum(), x)
    return value.detach(), grad


def test_dftopk_matches_peer() -> None:
    for case in cases("loss_topkbce_dftopk_dftopkrepo"):
        x, y = (torch.tensor(case[key], dtype=torch.float64) for key in ("scores", "labels"))
        value, grad = value_and_gradient(build("dftopk", k=case["k"]), x, y)
        torch.testing.assert_close(value, torch.tensor(case["output"], dtype=torch.float64), atol=1e-9, rtol=1e-9)
        if case["grad_unique"]:
            torch.testing.assert_close(grad, torch.tensor(case["grad"], dtype=torch.float64), atol=1e-9, rtol=1e-9)


def test_lapsum_matches_peer() -> None:
    # The peer adds 1e-6 inside each logarithm, which moves log p by at most 1e-6 / p.
    for case in cases("loss_topkbce_lapsum_dftopkrepo"):
        x, y = (torch.tensor(case[key], dtype=torch.float64) for key in ("scores", "labels"))
        x.requires_grad_()
        selection = get_operator("lapsum", tau=5.0)(x, case["k"])
        p, q = selection.log_p.exp(), selection.log_q.exp()
        value = -(y * torch.log(p + 1e-6) + (1.0 - y) * torch.log(q + 1e-6)).mean()
        torch.testing.assert_close(value, torch.tensor(case["output"], dtype=torch.float64), atol=1e-7, rtol=1e-7)
        (grad,) = torch.autograd.grad(value, x)
        torch.testing.assert_close(grad, torch.tensor(case["grad"], dtype=torch.float64), atol=1e-7, rtol=1e-7)
        ours, _ = value_and_gradient(build("lapsum", tau=5.0, k=case["k"]), x.detach(), y)
        assert abs(float(ours) - float(value.detach())) <= 1e-6 / float(torch.minimum(p, q).min().detach())


def test_sparse_membership_used_as_a_logit_matches_peer() -> None:
    for case in cases("loss_topkbce_sparse_dftopkrepo"):
        x, y = (torch.tensor(case[key], dtype=torch.float64) for key in ("scores", "labels"))
        peer_form = F.binary_cross_entropy_with_logits(get_operator("sparse")(x, case["k"]).p, y)
        torch.testing.assert_close(peer_form, torch.tensor(case["output"], dtype=torch.float64), atol=1e-6, rtol=1e-6)


def brute_force(name: str, x: Tensor, y: Tensor, mask: Tensor, k: Tensor, **arguments: Any) -> Tensor:
    """Return the cross-entropy per list, from the probabilities of its valid items in float64."""
    losses = []
    for row in range(len(x)):
        items, labels = x[row][mask[row]].double(), y[row][mask[row]]
        wanted = min(int(k[row]), len(items))
        if not (labels > 0).any() or wanted in (0, len(items)):
            losses.append(torch.zeros((), dtype=torch.float64))
            continue
        boundary = labels.sort(descending=True).values[wanted - 1]
        target = ((labels > 0) & (labels >= boundary)).double()
        p = get_operator(name, **{**ARGUMENTS.get(name, {}), **arguments})(items[None], wanted).p[0]
        p = p.clamp(1e-6, 1.0 - 1e-6) if name in ("hard", "perturbed", "sparse") else p
        losses.append(F.binary_cross_entropy(p, target))
    return torch.stack(losses)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "perturbed"])
@pytest.mark.parametrize("labels", ["binary", "graded"])
def test_loss_equals_brute_force_with_masks_and_one_k_per_list(name: str, labels: str) -> None:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(8, 15, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 2 if labels == "binary" else 5, (8, 15), generator=generator).double()
    mask = torch.rand(8, 15, generator=generator) > 0.3
    k = torch.tensor([1, 3, 5, 0, 15, 2, 4, 6])
    y[5], mask[6] = 0.0, False
    expected = brute_force(name, x, y, mask, k)
    dirty, dirty_labels = torch.where(mask, x, float("nan")), torch.where(mask, y, float("inf"))
    each = build(name, reduction="none")(dirty, dirty_labels, mask, k=k)
    torch.testing.assert_close(each.detach(), expected, rtol=1e-6, atol=1e-9)
    counted = expected > 0
    mean = build(name)(dirty, dirty_labels, mask, k=k)
    torch.testing.assert_close(mean.detach(), expected[counted].mean(), rtol=1e-6, atol=1e-9)
    weights = torch.linspace(0.5, 2.0, 8, dtype=torch.float64)
    weighted = build(name)(dirty, dirty_labels, mask, k=k, weights=weights)
    exact = (expected * weights)[counted].sum() / weights[counted].sum()
    torch.testing.assert_close(weighted.detach(), exact, rtol=1e-6, atol=1e-9)
    _, grad = value_and_gradient(build(name), dirty, dirty_labels, mask, k=k)
    assert (grad[~mask] == 0).all()
    assert torch.isfinite(grad).all()
    assert (grad[[3, 4, 5, 6]] == 0).all()


@pytest.mark.parametrize("name", FINITE)
def test_gradient_matches_finite_differences(name: str) -> None:
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(4, 8, generator=generator, dtype=torch.float64).requires_grad_()
    y = torch.randint(0, 4, (4, 8), generator=generator).double()
    mask = torch.rand(4, 8, generator=generator) > 0.2
    for tau in (0.7, 3.0):
        loss = build(name, tau=tau, k=3)
        assert torch.autograd.gradcheck(lambda x, loss=loss: loss(x, y), (x,))
        k = torch.tensor([1, 2, 3, 4])
        assert torch.autograd.gradcheck(lambda x, loss=loss, k=k: loss(x, y, mask, k=k), (x,))


@pytest.mark.parametrize("shape", [(1, 7, 3), (3, 40, 10), (128, 40, 10), (70, 201, 10), (2, 6001, 100)])
@pytest.mark.parametrize("tau", [1e-4, 0.3, 1.0, 500.0])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5])
def test_fused_loss_equals_its_operator(shape: tuple[int, int, int], tau: float, alpha: float) -> None:
    rows, n, k = shape
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(rows, n, generator=generator)
    y = (torch.rand(rows, n, generator=generator) < 0.2).float()
    y[:, 0] = 1.0
    value, grad = value_and_gradient(build("dftopk", tau=tau, alpha=alpha, k=k), x, y)
    reference = TopKLoss(get_operator("dftopk", tau=tau, alpha=alpha), k=k)
    exact, exact_grad = value_and_gradient(reference, x.double(), y.double())
    torch.testing.assert_close(value.double(), exact, rtol=2e-6, atol=1e-9)
    scale = float(exact_grad.abs().max()) + 1e-30
    torch.testing.assert_close(grad.double() / scale, exact_grad / scale, rtol=1e-4, atol=max(2e-6, 1e-6 / tau))


def test_fused_loss_is_precise_and_not_negative_for_the_right_order() -> None:
    x = torch.linspace(300.0, -300.0, 6000)[None]
    y = (torch.arange(6000) < 100).float()[None]
    loss = build("dftopk", tau=1e-3, k=100)(x, y)
    assert 0.0 <= float(loss) < 1e-6
    gentle = build("dftopk", tau=0.01, k=100)
    assert float(gentle(x, y)) == pytest.approx(float(gentle(x.double(), y.double())), rel=1e-3)


def test_nan_affects_only_its_own_list() -> None:
    x = torch.randn(3, 9)
    x[1, 2] = float("nan")
    y = (torch.arange(9) < 3).float().repeat(3, 1)
    each = build("dftopk", k=3, reduction="none")(x, y)
    assert each.isnan().tolist() == [False, True, False]
    y[1] = 0.0  # without positives the list is skipped
    value, grad = value_and_gradient(build("dftopk", k=3), x, y)
    assert value.isfinite()
    assert grad.isfinite().all()


def test_target_of_ties_masks_and_thresholds() -> None:
    mask = torch.ones(1, 6, dtype=torch.bool)
    labels = torch.tensor([[3.0, 2.0, 2.0, 2.0, 1.0, 0.0]])
    for k, expected in (
        (0, []),
        (1, [0]),
        (2, [0, 1, 2, 3]),
        (4, [0, 1, 2, 3]),
        (5, [0, 1, 2, 3, 4]),
        (6, [0, 1, 2, 3, 4]),
    ):
        assert topk_target(labels, mask, k).nonzero()[:, 1].tolist() == expected
        assert topk_target(labels, mask, torch.tensor([k])).nonzero()[:, 1].tolist() == expected
    assert topk_target(labels, mask, 5, positive_above=1.0).tolist() == [[1.0, 1.0, 1.0, 1.0, 0.0, 0.0]]
    mask[0, 0] = False
    assert topk_target(labels, mask, 1).tolist() == [[0.0, 1.0, 1.0, 1.0, 0.0, 0.0]]


def test_target_on_the_device_path_equals_the_cpu_path() -> None:
    labels = torch.randint(0, 4, (20, 9)).float()
    mask = torch.rand(20, 9) > 0.3
    k = torch.randint(0, 10, (20,))
    compiled = torch.compile(topk_target, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(labels, mask, k), topk_target(labels, mask, k))


@pytest.mark.parametrize("name", long_except(NAMES, "dftopk", "softsort"))
def test_compiles_in_one_graph(name: str) -> None:
    torch._dynamo.reset()
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([[1.0, 0.0, 0.0, 0.0]] * 3 + [[0.0] * 4])
    mask = torch.tensor([[True] * 4] * 2 + [[True, True, False, True]] * 2)
    loss = build(name, k=2)
    compiled = torch.compile(lambda x: loss(x, y, mask), fullgraph=True, backend="aot_eager")
    for ours, eager in zip(
        value_and_gradient(compiled, x), value_and_gradient(lambda x: loss(x, y, mask), x), strict=True
    ):
        torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_pickle_and_empty_batches(name: str) -> None:
    x = torch.randn(3, 8, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    y = (torch.arange(8) < 2).repeat(3, 1)
    loss = pickle.loads(pickle.dumps(build(name, k=2)))
    value, grad = value_and_gradient(loss, x, y)
    assert value.dtype == torch.float32
    assert grad.dtype == torch.bfloat16
    torch.testing.assert_close(value, build(name, k=2)(x.float(), y))
    for scores in (x.float()[:0], x.float()[:, :0], x.float()[:, :1]):
        assert float(loss(scores, torch.zeros_like(scores))) == 0.0
    value, grad = value_and_gradient(loss, x.float(), torch.zeros(3, 8))
    assert float(value) == 0.0
    assert (grad == 0).all()


def test_hard_loss_counts_misplaced_items_and_has_a_straight_through_gradient() -> None:
    x = torch.tensor([[3.0, 1.0, 2.0, 0.0]])
    y = torch.tensor([[1.0, 0.0, 0.0, 1.0]])
    value, grad = value_and_gradient(build("hard", k=2, tau=0.8), x, y)
    assert float(value) == pytest.approx(-(2 * math.log(1e-6) + 2 * math.log1p(-1e-6)) / 4, rel=1e-6)
    _, gradient_of_dftopk = value_and_gradient(build("dftopk", k=2, tau=0.8), x, y)
    torch.testing.assert_close(grad, gradient_of_dftopk)
    _, none = value_and_gradient(build("hard", k=2, straight_through=None), x, y)
    assert (none == 0).all()


def test_perturbed_gradient_estimates_gradient_of_smoothed_membership() -> None:
    x = torch.tensor([[0.6, 0.1, -0.2, -0.9]], dtype=torch.float64)
    weights = torch.tensor([[1.0, -2.0, 0.5, 0.3]], dtype=torch.float64)
    operator = get_operator("perturbed", tau=0.8, samples=200, seed=1)

    def smoothed(x: Tensor) -> Tensor:
        return (operator(x.expand(300, 4), 2).p * weights).sum(1).mean()

    _, grad = value_and_gradient(smoothed, x)
    steps = [torch.eye(4, dtype=torch.float64)[i : i + 1] * 0.2 for i in range(4)]
    numeric = torch.stack([(smoothed(x + step) - smoothed(x - step)) / 0.4 for step in steps])
    torch.testing.assert_close(grad[0], numeric, atol=0.03, rtol=0.05)


def test_cross_entropy_of_sparse_names_the_loss_that_trains_once() -> None:
    _say_once.cache_clear()
    with pytest.warns(UserWarning, match="'sparse' gives misplaced items .* use the loss 'sparse_fy'"):
        get("sparse")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        get("sparse")
        get("sparse_fy")
        TopKLoss("sparse")


def test_no_packaged_config_or_sweep_trains_the_cross_entropy_of_sparse() -> None:
    root = Path(__file__).parents[2]
    files = [*(root / "sweeps").glob("*.yaml"), *(root / "recsys_topk").rglob("*.yaml")]
    assert len(files) > 20
    trains = re.compile(r"loss: sparse\b|value: sparse$|[\[ ]sparse[,\]]|^  sparse: {tau", re.MULTILINE)
    found = {file.name for file in files if trains.search(file.read_text())}
    assert found == {"runtime.yaml"}  # times the operator


def test_k_comes_from_constructor_call_or_positives_and_errors_name_the_argument() -> None:
    x = torch.randn(3, 8)
    y = torch.tensor([[1.0] * 2 + [0.0] * 6, [1.0] * 4 + [0.0] * 4, [1.0] + [0.0] * 7])
    own = build("dftopk", k="positives")(x, y)
    torch.testing.assert_close(own, build("dftopk")(x, y, k=torch.tensor([2, 4, 1])))
    torch.testing.assert_close(build("dftopk", k=5)(x, y, k=3), build("dftopk", k=3)(x, y))
    with pytest.raises(ValueError, match=r"DFTopKLoss\(k=10\)"):
        build("dftopk")(x, y)
    for bad in (-1, 1.5, True, "all"):
        with pytest.raises((ValueError, TypeError)):
            build("dftopk", k=bad)
    with pytest.raises(ValueError, match="weights"):
        build("dftopk", k=2)(x, y, weights=torch.ones(2))
    with pytest.raises(ValueError, match="labels"):
        build("dftopk", k=2)(x, y[:, :3])
    with pytest.raises(ValueError, match="reduction"):
        build("dftopk", reduction="median")
    with pytest.raises(ValueError, match="not finite"):
        build("dftopk", k=2, validate=True)(x * float("inf"), y)


@pytest.mark.slow
def test_inductor_gives_the_same_values() -> None:
    if shutil.which("c++") is None:
        pytest.skip("inductor needs a C++ compiler")
    torch._dynamo.reset()
    x = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    y = (torch.arange(50) < 6).float().repeat(4, 1)
    loss = build("dftopk", k=6)
    compiled = torch.compile(lambda x: loss(x, y), fullgraph=True)
    for ours, eager in zip(value_and_gradient(compiled, x), value_and_gradient(lambda x: loss(x, y), x), strict=True):
        torch.testing.assert_close(ours, eager)
