"""Properties of all operators, checked against brute force, finite differences and closed forms."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from recsys_topk import operators
from recsys_topk.operators import TopKOperator, available, get, registry
from recsys_topk.operators.perturbed import noised_topk
from tests.conftest import long_except

ARGUMENTS: dict[str, dict[str, Any]] = {"perturbed": {"seed": 0}}
NAMES = available()
DIFFERENTIABLE = [n for n in NAMES if registry.resolve(n).exact_gradient] + ["softsort plain", "neuralsort plain"]


def build(name: str, **arguments: Any) -> TopKOperator:
    base, _, form = name.partition(" ")
    extra = {"normalised": False} if form else {}
    return get(base, **{**ARGUMENTS.get(base, {}), **extra, **arguments})


def both(operator: TopKOperator, scores: Tensor, k: Any, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return log_p, log_q and the gradient of a fixed combination of the finite entries of both."""
    x = scores.clone().requires_grad_()
    selection = operator(x, k, mask)
    weights = torch.linspace(-1.0, 2.0, scores.shape[1], dtype=selection.log_p.dtype)
    total = selection.log_p.new_zeros(())
    for log, sign in ((selection.log_p, 1.0), (selection.log_q, 0.7)):
        total = total + (torch.where(torch.isfinite(log), log, 0.0) * weights * sign).sum()
    (grad,) = torch.autograd.grad(total, x, allow_unused=True)
    return selection.log_p.detach(), selection.log_q.detach(), torch.zeros_like(x) if grad is None else grad


@pytest.fixture
def scores() -> Tensor:
    return torch.randn(5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", NAMES)
def test_p_and_q_sum_to_one(name: str, scores: Tensor) -> None:
    selection = build(name, tau=0.5)(scores, 4)
    torch.testing.assert_close(selection.log_p.exp() + selection.log_q.exp(), torch.ones_like(scores))
    assert ((selection.p >= 0) & (selection.p <= 1 + 1e-12)).all()
    if registry.resolve(name).sums_to_k:
        torch.testing.assert_close(selection.p.sum(1), torch.full((5,), 4.0, dtype=torch.float64))


def relaxed_permutation(name: str, x: Tensor, tau: float) -> Tensor:
    """Return the n x n matrix of a list, straight from the definition."""
    n, ordered = len(x), x.sort(descending=True).values
    if name == "softsort":
        return torch.softmax(-(ordered[:, None] - x).abs() / tau, 1)
    slopes = n + 1 - 2 * torch.arange(1, n + 1, dtype=x.dtype)
    return torch.softmax((slopes[:, None] * x - (x[:, None] - x).abs().sum(1)) / tau, 1)


@pytest.mark.parametrize("name", ["softsort", "neuralsort"])
@pytest.mark.parametrize("shape", [(1, 2, 1), (1, 30, 29), (4, 60, 1), (2, 300, 40)])
def test_values_and_gradients_equal_those_of_the_full_matrix(name: str, shape: tuple[int, int, int]) -> None:
    rows, n, k = shape
    tau = max(2.0, n / 15)  # at smaller temperatures the full matrix underflows
    x = torch.randn(rows, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)).requires_grad_()
    weights = torch.randn(2, rows, n, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    matrices = torch.stack([relaxed_permutation(name, row, tau) for row in x])
    up, down = matrices[:, :k].sum(1), matrices[:, k:].sum(1)
    total = (up + down).detach()
    for form, logs in (("", (up / total, down / total)), (" plain", (up, None))):
        selection = build(name + form, tau=tau)(x, k)
        ours, exact = weights[0] * selection.log_p, weights[0] * logs[0].log()
        torch.testing.assert_close(selection.log_p, logs[0].log())
        if logs[1] is not None:
            torch.testing.assert_close(selection.log_q, logs[1].log())
            ours, exact = ours + weights[1] * selection.log_q, exact + weights[1] * logs[1].log()
        torch.testing.assert_close(
            torch.autograd.grad(ours.sum(), x)[0], torch.autograd.grad(exact.sum(), x, retain_graph=True)[0]
        )
        per_list = build(name + form, tau=tau)(x.detach(), torch.full((rows,), k))
        torch.testing.assert_close(per_list.log_p, selection.log_p.detach())


@pytest.mark.parametrize("name", ["softsort plain", "neuralsort plain"])
def test_plain_form_sums_to_k_and_log_q_is_its_complement(name: str, scores: Tensor) -> None:
    selection = build(name, tau=0.5)(scores, 4)
    torch.testing.assert_close(selection.p.sum(1), torch.full((5,), 4.0, dtype=torch.float64))
    torch.testing.assert_close(selection.log_q.exp(), (1.0 - selection.p).clamp_min(0.0))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
@pytest.mark.parametrize("masked", [False, True])
def test_gradient_matches_finite_differences(name: str, masked: bool) -> None:
    x = torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    mask = torch.ones(3, 7, dtype=torch.bool)
    k: Any = 3
    if masked:
        mask[0, 5:], mask[1, ::3] = False, False
        k = torch.tensor([2, 1, 5])
    operator = build(name, tau=1.7)

    def logs(x: Tensor) -> Tensor:
        selection = operator(x, k, mask if masked else None)
        value = torch.stack((selection.log_p, selection.log_q))[:, mask]
        return torch.where(torch.isfinite(value), value, 0.0)

    assert torch.autograd.gradcheck(logs, (x,))


@pytest.mark.parametrize("name", NAMES)
def test_masked_items_have_no_effect(name: str, scores: Tensor) -> None:
    operator = build(name, tau=0.5)
    log_p, log_q, grad = both(operator, scores[:, :8], torch.tensor([1, 2, 3, 4, 7]))
    places = torch.tensor([0, 2, 3, 5, 6, 8, 10, 11])
    wide, mask = scores.clone(), torch.zeros(5, 12, dtype=torch.bool)
    wide[:], mask[:, places] = float("nan"), True
    wide[:, 1], wide[:, 4], wide[:, places] = float("inf"), -float("inf"), scores[:, :8]
    x = wide.requires_grad_()
    selection = operator(x, torch.tensor([1, 2, 3, 4, 7]), mask)
    torch.testing.assert_close(selection.log_p[:, places], log_p)
    torch.testing.assert_close(selection.log_q[:, places], log_q)
    assert torch.isneginf(selection.log_p[~mask]).all()
    assert (selection.log_q[~mask] == 0).all()
    weights = torch.linspace(-1.0, 2.0, 8, dtype=torch.float64)
    total = sum(
        (torch.where(torch.isfinite(log), log, 0.0)[:, places] * weights * sign).sum()
        for log, sign in ((selection.log_p, 1.0), (selection.log_q, 0.7))
    )
    (wide_grad,) = torch.autograd.grad(total, x)
    torch.testing.assert_close(wide_grad[:, places], grad)
    assert (wide_grad[~mask] == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_lists_do_not_influence_each_other(name: str, scores: Tensor) -> None:
    if not registry.resolve(name).deterministic:
        pytest.skip("its noise depends on the shape of the batch")
    operator, k = build(name), torch.tensor([1, 3, 5, 7, 11])
    together = both(operator, scores, k)
    for row in range(5):
        for one, many in zip(both(operator, scores[row : row + 1], int(k[row])), together, strict=True):
            torch.testing.assert_close(one[0], many[row])


@pytest.mark.parametrize("name", [n for n in NAMES if registry.resolve(n).equivariant])
def test_permuting_a_list_permutes_the_result(name: str, scores: Tensor) -> None:
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    operator = build(name, tau=0.5)
    plain, permuted = operator(scores, 4), operator(scores[:, order], 4)
    torch.testing.assert_close(plain.log_p[:, order], permuted.log_p)
    torch.testing.assert_close(plain.log_q[:, order], permuted.log_q)


@pytest.mark.parametrize(
    "name", [n for n in NAMES if registry.resolve(n).tie_fair] + ["softsort plain", "neuralsort plain"]
)
def test_equal_scores_get_equal_results(name: str) -> None:
    x = torch.tensor([[1.0, 2.0, 1.0, 0.0, 1.0, 3.0, 2.0]], dtype=torch.float64)
    weights = torch.tensor([[1.0, 2.0, 1.0, 0.5, 1.0, -1.0, 2.0]], dtype=torch.float64)
    for k in (1, 2, 3, 4, 5):
        s = x.clone().requires_grad_()
        selection = build(name, tau=0.8)(s, k)
        log_q = torch.where(torch.isfinite(selection.log_q), selection.log_q, 0.0)
        ((selection.log_p.clamp_min(-50) - 0.3 * log_q) * weights).sum().backward()
        assert s.grad is not None
        for value in (selection.p.detach(), s.grad):
            torch.testing.assert_close(value[0, [0, 2, 4]], value[0, [0, 0, 0]])
            torch.testing.assert_close(value[0, 1], value[0, 6])


@pytest.mark.parametrize("name", NAMES)
def test_k_of_zero_and_k_of_all_items(name: str, scores: Tensor) -> None:
    mask = torch.ones(5, 12, dtype=torch.bool)
    mask[1, 4:], mask[2], mask[4, 1:] = False, False, False
    x = scores.clone().requires_grad_()
    selection = build(name)(x, torch.tensor([0, 4, 3, 12, 1]), mask)
    assert (selection.p[0] == 0).all()
    assert (selection.log_q[0] == 0).all()
    assert (selection.log_p[1, :4] == 0).all()
    assert torch.isneginf(selection.log_q[1, :4]).all()
    assert (selection.p[2] == 0).all()
    assert (selection.p[3] == 1).all()
    torch.where(torch.isfinite(selection.log_p), selection.log_p, 0.0).sum().backward()
    assert (x.grad == 0).all()
    for k in (0, 12, 50):
        assert build(name)(scores, k).p.unique().tolist() == [float(k > 0)]
    assert build(name)(scores[:, :1], 1).p.tolist() == [[1.0]] * 5
    assert build(name)(scores[:0], 1).p.shape == (0, 12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(name: str, dtype: torch.dtype, scores: Tensor) -> None:
    half = scores.to(dtype).requires_grad_()
    selection = build(name, tau=0.01)(half, 4)
    assert selection.log_p.dtype == torch.float32
    expected = build(name, tau=0.01)(half.detach().float(), 4)
    torch.testing.assert_close(selection.log_p.detach(), expected.log_p)
    torch.where(torch.isfinite(selection.log_p), selection.log_p, 0.0).sum().backward()
    assert half.grad is not None
    assert half.grad.dtype == dtype
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert build(name, tau=0.01)(half.detach(), 4).log_p.dtype == torch.float32


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tau", [1e-4, 1e-2, 1.0, 1e2, 1e4])
def test_float32_agrees_with_float64_at_every_temperature(name: str, tau: float) -> None:
    if name == "perturbed":
        pytest.skip("the noise of the two dtypes differs")
    x = torch.randn(4, 50, generator=torch.Generator().manual_seed(5))
    operator = build(name, tau=tau)
    single, double = both(operator, x, 7), both(operator, x.double(), 7)
    # NeuralSort's logits are as large as n |x| / tau; the tolerance allows for their rounding errors.
    loose = 1e-6 * max(1.0, 500.0 / tau if name == "neuralsort" else 10.0 / tau)
    for value, exact in zip(single[:2], double[:2], strict=True):
        assert not value.isnan().any()
        close = torch.isclose(value.double(), exact, rtol=1e-4, atol=loose)
        clamped = (exact < -80.0) | (exact.exp() < 1e-30)
        assert (close | clamped).all()
    assert torch.isfinite(single[2]).all()


@pytest.mark.parametrize("name", long_except(NAMES, "dftopk", "softsort"))
def test_compiles_in_one_graph(name: str, scores: Tensor) -> None:
    operator, scores = build(name), scores[:, :4].contiguous()
    mask = torch.rand(5, 4, generator=torch.Generator().manual_seed(2)) > 0.2
    torch._dynamo.reset()
    for k, valid in ((2, None), (torch.tensor([0, 2, 3, 1, 4]), mask)):

        def run(x: Tensor, k: Any = k, valid: Any = valid) -> tuple[Tensor, Tensor, Tensor]:
            return both(operator, x, k, valid)

        def forward(x: Tensor, k: Any = k, valid: Any = valid) -> tuple[Tensor, Tensor]:
            selection = operator(x, k, valid)
            return selection.log_p, selection.log_q

        compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
        x = scores.clone().requires_grad_()
        log_p, log_q = compiled(x)
        expected = run(scores)
        torch.testing.assert_close(log_p.detach(), expected[0])
        torch.testing.assert_close(log_q.detach(), expected[1])
        weights = torch.linspace(-1.0, 2.0, 4, dtype=torch.float64)
        total = sum(
            (torch.where(torch.isfinite(log), log, 0.0) * weights * sign).sum()
            for log, sign in ((log_p, 1.0), (log_q, 0.7))
        )
        (grad,) = torch.autograd.grad(total, x)
        torch.testing.assert_close(grad, expected[2])


@pytest.mark.parametrize("name", NAMES)
def test_pickles_copies_and_state_dicts_keep_the_result(name: str, scores: Tensor) -> None:
    operator = build(name, tau=0.3)
    for twin in (pickle.loads(pickle.dumps(operator)), copy.deepcopy(operator)):
        assert torch.equal(twin(scores, 4).log_p, operator(scores, 4).log_p)
        twin.load_state_dict(operator.state_dict())
    assert "tau" in repr(operator) or name == "hard"


@pytest.mark.parametrize("name", NAMES)
def test_meta_tensors_keep_shape_and_dtype(name: str) -> None:
    x = torch.empty(3, 9, device="meta")
    selection = build(name)(x, 4, torch.ones(3, 9, dtype=torch.bool, device="meta"))
    assert selection.log_p.shape == (3, 9)
    assert selection.log_p.device.type == "meta"


def test_invalid_input_raises_with_a_message() -> None:
    x = torch.zeros(2, 4)
    operator = get("dftopk", validate=True)
    for error, call in (
        (TypeError, lambda: operator([[1.0]], 1)),
        (ValueError, lambda: operator(torch.zeros(4), 1)),
        (TypeError, lambda: operator(torch.zeros(2, 4, dtype=torch.long), 1)),
        (TypeError, lambda: operator(x, 1, torch.ones(2, 4))),
        (ValueError, lambda: operator(x, 1, torch.ones(2, 3, dtype=torch.bool))),
        (ValueError, lambda: operator(x, 1, torch.ones(2, 4, dtype=torch.bool, device="meta"))),
        (ValueError, lambda: operator(x, -1)),
        (ValueError, lambda: operator(x, torch.tensor([1, -1]))),
        (TypeError, lambda: operator(x, 1.5)),
        (TypeError, lambda: operator(x, True)),
        (TypeError, lambda: operator(x, torch.tensor([1.0, 2.0]))),
        (ValueError, lambda: operator(x, torch.tensor([1, 2, 3]))),
        (ValueError, lambda: operator(torch.tensor([[1.0, float("nan")]]), 1)),
        (ValueError, lambda: operator(torch.tensor([[1.0, float("inf")]]), 1)),
        (ValueError, lambda: get("lapsum", tau=0.0)),
        (ValueError, lambda: get("lapsum", tau=-1.0)),
        (ValueError, lambda: get("lapsum", tau=float("nan"))),
        (ValueError, lambda: get("dftopk", alpha=1.5)),
        (ValueError, lambda: get("diffsort", network="bubble")),
        (ValueError, lambda: get("diffsort", distribution="uniform")),
        (ValueError, lambda: get("perturbed", samples=0)),
        (ValueError, lambda: get("dftpk")),
    ):
        with pytest.raises(error) as raised:
            call()
        assert str(raised.value)
    assert operator(torch.tensor([[1.0, float("nan"), 2.0]]), 1, torch.tensor([[True, False, True]])).p.isfinite().all()


def test_classes_are_found_by_name() -> None:
    import recsys_topk.operators as operators

    for cls in registry.classes().values():
        assert getattr(operators, cls.__name__) is cls
    with pytest.raises(AttributeError, match="NoSuchOperator"):
        _ = operators.NoSuchOperator


def test_perturbed_selects_k_items_if_noise_ties() -> None:
    """Regression: all items that tied at rank k were selected."""
    chosen = noised_topk(torch.zeros(2, 5), torch.tensor([2, 3]), torch.tensor([[0.0, 1, 0, 0, 0], [0.0] * 5]), 1.0)
    assert chosen.sum(1).tolist() == [2, 3]
    assert chosen[0, 1]


def test_registered_class_is_an_attribute_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an operator that the package does not import, e.g. of a plug-in."""
    shown, hidden = type("Planted", (), {}), type("_Planted", (), {})
    monkeypatch.setattr(registry, "classes", lambda: {"shown": shown, "hidden": hidden})
    assert operators.Planted is shown
    for name in ("_Planted", "Missing"):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
            getattr(operators, name)
