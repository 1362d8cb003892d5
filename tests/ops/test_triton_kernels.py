"""Triton kernels on a GPU, or on a CPU in the interpreter (in a process that test_triton starts)."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from recsys_topk import losses
from recsys_topk.cascades.objectives.joint import JointObjective
from recsys_topk.ops import dispatch
from recsys_topk.ops.dispatch import INTERPRETED, backend, installed
from recsys_topk.ops.losses import joint_terms as joint
from recsys_topk.ops.losses.joint_terms import JointTask, joint_terms
from recsys_topk.ops.losses.pair_sums import PairWeights, pair_sums
from recsys_topk.ops.losses.topk_loss import LONGEST_ON_GPU, topk_loss
from recsys_topk.ops.selection.membership import Law
from tests.losses import test_ltr_parity as peers
from tests.ops import test_parity
from tests.ops.test_topk_loss import LAWS, check
from tests.peers import cases

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.skipif(
        not installed("triton") or (DEVICE == "cpu" and not INTERPRETED), reason="no GPU, and not TRITON_INTERPRET=1"
    ),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # from numpy, for skipped lists
]

KERNELS = {
    name: one for name, one in dispatch.operations.items() if "triton" in [x.backend for x in one.implementations]
}
NAMES = ["dftopk", "sigmoid", "lapsum", "sparse", "sparse_fy"]
PAIRWISE = ["ranknet", "lambdarank", "lambdaloss"]


def to_device(value: Any) -> Any:
    """Return the arguments on the device, with new leaves."""
    if isinstance(value, Tensor):
        return value.detach().clone().to(DEVICE).requires_grad_(value.requires_grad)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(to_device, value))
    return type(value)(map(to_device, value)) if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_matches_torch(name: str) -> None:
    call, samples = test_parity.registry.samples[name]
    given = [to_device(x) for x in samples(torch.Generator().manual_seed(0)) if len(test_parity.tensors(x)[0]) <= 8]
    chosen = given[:: 5 if len(given) > 50 else 1]  # 5 shares no factor with the number of variants per shape
    with backend("triton"):
        assert sum(KERNELS[name].backend_for(*x) == "triton" for x in chosen) > len(chosen) // 3
    assert test_parity.compare(call, chosen, "triton") > 10


@pytest.mark.parametrize("law", LAWS, ids=lambda law: f"{law.name}-{law.alpha}")
def test_values_and_gradients_equal_loops_over_items(law: Law) -> None:
    generator = torch.Generator().manual_seed(0)
    for n in (7, 130):
        x = torch.randn(8, n, generator=generator)
        x[::2] = (x[::2] * 2).round() / 2  # ties
        x[1] = 0.25
        labels = torch.randint(0, 4, (8, n), generator=generator).float()
        mask = torch.rand(8, n, generator=generator) > 0.3
        mask[3], mask[4], mask[4, 2] = False, False, True  # no valid item, one valid item
        labels[6] = 0.0
        ks = torch.tensor([2, 1, 3, 1, 1, 0, 2, n + 1])
        check(x.masked_fill(~mask, math.nan), labels.masked_fill(~mask, 9.0), mask, ks, 1.0, law, "triton", DEVICE)
    check(x, labels, None, None, 2.0, law, "triton", DEVICE)


@pytest.mark.parametrize("name", NAMES)
def test_long_lists_and_extreme_scores_match_float64(name: str) -> None:
    """Very small and very large temperatures, scores far from 0, and the longest list."""
    generator = torch.Generator().manual_seed(1)
    long = torch.randn(1, LONGEST_ON_GPU, generator=generator)
    short = torch.randn(2, 50, generator=generator)
    for x, tau in ((long, 0.7), (short, 1e-4), (short, 1e4), (short * 2 + 1e6, 0.83), (short * 3e30, 1.0)):
        labels = (torch.arange(x.shape[1]) < 5).float().expand_as(x)
        loss = losses.get(name, k=8, tau=tau, reduction="none")
        exact, ours = x.double().requires_grad_(), x.clone().to(DEVICE).requires_grad_()
        with backend("torch"):
            expected = loss(exact, labels.double())
            expected.sum().backward()
        with backend("triton"):
            found = loss(ours, labels.to(DEVICE))
            found.sum().backward()
        torch.testing.assert_close(found.cpu().double(), expected, rtol=2e-4, atol=1e-5)
        size = exact.grad.abs().amax(1, keepdim=True).clamp_min(1e-6)
        # A clipped membership p near 0 is a difference of scores, and its gradient is 1 / p.
        bound = 2e-2 if tau < 1e-3 or name == "sparse" else 2e-3
        assert ((ours.grad.cpu().double() - exact.grad).abs() / size).max() < bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    x = torch.randn(3, 20, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)
    labels = (torch.arange(20, device=DEVICE) % 4 == 0).to(dtype).expand(3, 20)
    first = torch.where(labels > 0, labels, -math.inf)
    weights = PairWeights(first, labels, "ones")
    task = JointTask(labels, None, 4, None, 0.0, LAWS[0])
    calls: list[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
        (
            lambda a: topk_loss(a, labels, None, 4, 0.0, LAWS[0], False)[0],
            lambda a: topk_loss(a, labels.float(), None, 4, 0.0, LAWS[0], False)[0],
        ),
        (
            lambda a: joint_terms([a, -a.detach()], task)[0],
            lambda a: joint_terms([a, -a.detach()], task._replace(labels=labels.float()))[0],
        ),
        (
            lambda a: pair_sums(a, weights, 1.0),
            lambda a: pair_sums(a, PairWeights(first.float(), labels.float(), "ones"), 1.0),
        ),
    ]
    for of_half, of_single in calls:
        half, single = x.clone().requires_grad_(), x.float().requires_grad_()
        with backend("triton"):
            found = of_half(half)
            found.sum().backward()
        with backend("torch"):
            expected = of_single(single)
            expected.sum().backward()
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-6)
        torch.testing.assert_close(half.grad, single.grad.to(dtype), rtol=2e-2, atol=1e-6)


def as_single(case: Any) -> Any:
    case.scores = case.scores.detach().float().to(DEVICE).requires_grad_()
    case.labels, case.mask = case.labels.float().to(DEVICE), case.mask.to(DEVICE)
    case.tolerance = 2e-5
    return case


@pytest.mark.parametrize(
    ("compare", "file"),
    [
        (peers.test_ranknet_averaged_over_pairs_of_the_batch_matches_peer, "ranknet_allrank"),
        (peers.test_ranknet_weighted_by_label_difference_matches_peer, "ranknet_weightdiff_allrank"),
        (peers.test_lambdarank_matches_rax, "lambda_dcg_norm_rax"),
        (peers.test_lambdarank_at_k_matches_rax, "lambda_dcg_norm_topn_rax"),
        (peers.test_ndcg2_matches_rax, "lambda_dcg2_norm_rax"),
        (peers.test_ndcg2_at_k_matches_rax, "lambda_dcg2_norm_topn_rax"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_pairwise_losses_match_their_peers(compare: Callable[[Any], None], file: str) -> None:
    with backend("triton"):
        for case in cases(file):
            compare(as_single(case))


@pytest.mark.parametrize("scheme", ["ndcgLoss1", "ndcgLoss2", "ndcgLoss2PP"])
def test_lambdaloss_matches_allrank(scheme: str) -> None:
    with backend("triton"):
        for case in cases(f"lambdaloss_{scheme}_sum_binary_allrank"):
            peers.test_lambdaloss_sum_matches_allrank(scheme, as_single(case))


def test_dftopk_matches_the_authors_code() -> None:
    for case in cases("loss_topkbce_dftopk_dftopkrepo"):
        with backend("triton"):
            as_single(case).assert_agrees(losses.get("dftopk", k=case.k)(case.scores, case.labels))


@pytest.mark.parametrize("name", [*NAMES, *PAIRWISE])
def test_second_derivatives_match_torch(name: str) -> None:
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(3)).to(DEVICE).requires_grad_()
    labels = torch.tensor([[2.0, 0, 0, 1, 0, 0]], device=DEVICE).expand(2, 6)
    loss, found = losses.get(name, k=2, reduction="none"), []
    for mode in ("triton", "torch"):
        with backend(mode):
            (slope,) = torch.autograd.grad(loss(x, labels).sum(), x, create_graph=True)
            again = torch.autograd.grad(slope.square().sum(), x, allow_unused=True)[0]
            found.append((slope.detach(), torch.zeros_like(x) if again is None else again))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


def compile_and_list_operators(function: Callable[..., Tensor], *arguments: Any) -> tuple[Tensor, list[str]]:
    """Return the value under torch.compile(fullgraph=True), and the operators of the project in its graph."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    seen: list[str] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if "recsys_topk" in str(node.target))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    return compiled(*arguments), seen


@pytest.mark.parametrize("name", ["lapsum", "lambdaloss", "joint"])
def test_compiled_graph_contains_the_operator(name: str) -> None:
    x = torch.randn(3, 9, generator=torch.Generator().manual_seed(4)).to(DEVICE).requires_grad_()
    labels = (torch.arange(9, device=DEVICE) % 3).float().expand(3, 9)
    function: Callable[..., Tensor] = losses.get("dftopk" if name == "joint" else name, k=3)
    if name == "joint":
        objective = JointObjective(function, 2).to(DEVICE)  # type: ignore[arg-type]
        function = lambda a, b: objective([a, -a], b, quotas=(5, 3), k=3).total  # noqa: E731
    operator = {"lapsum": "topk_loss", "lambdaloss": "pair_sums", "joint": "joint_terms"}[name]
    with backend("triton"):
        expected = function(x, labels)
        value, seen = compile_and_list_operators(function, x, labels)
        assert [one for one in seen if f"fused_{operator}" in one]
        torch.testing.assert_close(value, expected)
        found, wanted = (torch.autograd.grad(one, x)[0] for one in (value, expected))
        torch.testing.assert_close(found, wanted)


def test_operators_pass_opcheck() -> None:
    """Compilation is tested separately."""
    kernels = "recsys_topk.ops.backends.triton_kernels"
    x = torch.randn(3, 9, device=DEVICE, requires_grad=True)
    labels = (torch.arange(9, device=DEVICE) % 3).float().expand(3, 9).contiguous()
    mask, ks = labels < 2, torch.tensor([2, 3, 1], device=DEVICE)
    first, second = torch.where(mask, labels, -math.inf), torch.where(mask, labels, math.inf)
    both = torch.stack([x.detach(), -x.detach()]).requires_grad_()
    for name, arguments in {
        "topk_loss": (x, labels, mask, ks, 0, 0.0, "laplace", 1.0, 0.5, True),
        "joint_terms": (both, labels, mask, [5, 2], 2, 0.0, "dftopk", 1.0, 0.5),
        "pair_sums": (x, first, second, labels, None, None, None, -1, 1.0, "ones", 1.0, True),
    }.items():
        fused = importlib.import_module(f"{kernels}.{name}").fused
        torch.library.opcheck(
            fused, arguments, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
        )


def test_weighted_lists_of_the_top_k_losses_use_torch() -> None:
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    labels, weights = (x > 0).float(), x.exp()
    arguments = (x, labels, None, 2, 0.0, LAWS[0], False)
    task = JointTask(labels, None, 2, None, 0.0, LAWS[0])
    pairs = PairWeights(labels, labels, "ones")
    with backend("triton"):
        assert [topk_loss.backend_for(*arguments), topk_loss.backend_for(*arguments, weights)] == ["triton", "torch"]
        tasks = (task, task._replace(item_weights=weights))
        assert [joint_terms.backend_for([x, x], one) for one in tasks] == ["triton", "torch"]
        assert pair_sums.backend_for(x, pairs._replace(items=weights), 1.0) == "triton"


def test_lists_too_long_for_a_program_use_torch() -> None:
    x, labels = torch.zeros(1, LONGEST_ON_GPU + 1, device=DEVICE), torch.zeros(1, LONGEST_ON_GPU + 1, device=DEVICE)
    with backend("triton"):
        for n, expected in ((LONGEST_ON_GPU, "triton"), (LONGEST_ON_GPU + 1, "torch")):
            assert topk_loss.backend_for(x[:, :n], labels[:, :n], None, 20, 0.0, LAWS[0], True) == expected
        for n, expected in ((joint.LONGEST_ON_GPU, "triton"), (joint.LONGEST_ON_GPU + 1, "torch")):
            task = JointTask(labels[:, :n], None, 20, None, 0.0, LAWS[0])
            assert joint_terms.backend_for([x[:, :n]], task) == expected
