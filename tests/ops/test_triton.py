"""Triton kernels without a GPU: compiled for two GPUs, interpreted in a new process, and their references."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from recsys_topk.ops.dispatch import installed
from recsys_topk.ops.losses.joint_terms import JointTask, joint_losses
from recsys_topk.ops.losses.pair_sums import PairWeights, pair_sums
from recsys_topk.ops.losses.topk_loss import topk_loss
from recsys_topk.ops.selection.membership import Law
from recsys_topk.testing.host_reads import DEVICE, no_host_reads

pytestmark = pytest.mark.skipif(not installed("triton"), reason="needs triton")

ROOT = Path(__file__).parents[2]
# Types of kernel arguments; all others are float32 or pointers to float32.
TYPES = {"mask_ptr": "*u8", "counted_ptr": "*u8", "ks_ptr": "*i64", "cuts_ptr": "*i64", "lists": "i32", "n": "i32"}
TYPES |= {"k": "i32"}


@pytest.mark.timeout(900)  # half a minute on an idle core
@pytest.mark.parametrize("chosen", ["test_values_and_gradients", pytest.param("test", marks=pytest.mark.long)])
def test_kernels_pass_their_tests_in_the_interpreter(chosen: str) -> None:
    """TRITON_INTERPRET=1 must be set before triton is imported, so the tests run in a new process."""
    command = [sys.executable, "-m", "pytest", "tests/ops/test_triton_kernels.py", "-q", "-p", "no:cacheprovider"]
    command += ["-k", chosen]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=880, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout


def kernels() -> list[Any]:
    """Return every kernel for every law or kind, with options for short lists, and one for the longest lists."""
    found: list[tuple[str, dict[str, Any], int]] = []
    for law in range(5):
        options = {"LAW": law, "HAS_MASK": True, "HAS_KS": law > 0, "WANTS": True, "ROWS": 2, "BLOCK": 32}
        found.append(("topk_loss", options, 1))
    found.append(("topk_loss", {**options, "HAS_MASK": False, "ROWS": 1, "BLOCK": 8192, "LAW": 0}, 16))
    for law in range(4):
        options = {"LAW": law, "STAGES": law + 1, "HAS_MASK": True, "HAS_CUTS": law != 1, "ROWS": 2, "BLOCK": 32}
        found.append(("joint_terms", options, 1))
    for kind in range(3):
        options = {
            "KIND": kind,
            "HAS_DISCOUNTS": kind < 2,
            "HAS_RANKS": kind < 1,
            "HAS_K": kind < 1,
            "HAS_KS": kind < 1,
            "HAS_ITEMS": kind < 2,
        }
        found.append(("pair_sums", {**options, "WANTS": True, "BLOCK_I": 32, "BLOCK_J": 64}, 4))
    names = [name for name, *_ in found]
    return [
        pytest.param(*one, id=f"{one[0]}-{next(iter(one[1].values()))}", marks=[pytest.mark.long] * (one[0] in before))
        for one, before in zip(found, (names[:place] for place in range(len(names))), strict=True)
    ]


@pytest.mark.parametrize(("name", "options", "warps"), kernels())
def test_kernel_compiles_for_a100_and_h100(
    name: str, options: dict[str, Any], warps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(importlib.import_module(f"recsys_topk.ops.backends.triton_kernels.{name}"), f"{name}_kernel")
    signature = {
        one: "constexpr" if one in options else TYPES.get(one, "*fp32" if one.endswith("_ptr") else "fp32")
        for one in kernel.arg_names
    }
    for capability in (80, 90):
        made = triton.compile(
            ASTSource(kernel, signature, constexprs=options),
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": warps, "enable_fp_fusion": True},
        )
        assert f".target sm_{capability}" in made.asm["ptx"]
        assert made.asm["cubin"][:4] == b"\x7fELF"


def test_operators_on_a_cpu_match_the_references() -> None:
    """A graph with these operators may run on a CPU; `torch.library.opcheck` checks them too."""
    from recsys_topk.ops.backends.triton_kernels import joint_terms as joint
    from recsys_topk.ops.backends.triton_kernels import pair_sums as pairs
    from recsys_topk.ops.backends.triton_kernels import topk_loss as topk

    x = torch.randn(3, 9, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = (torch.arange(9) % 3).float().expand(3, 9).contiguous()
    mask, ks = labels < 2, torch.tensor([2, 3, 1])
    first, second = torch.where(mask, labels, -torch.inf), torch.where(mask, labels, torch.inf)
    both, law = torch.stack([x.detach(), -x.detach()]).requires_grad_(), Law("laplace", 0.5)
    rest = (0.0, law.name, law.tau, law.alpha)
    task = JointTask(labels, mask, 2, (5, 2), 0.0, law)
    for fused, arguments, expected in (
        (
            topk.fused,
            (x, labels, mask, ks, 0, *rest, True),
            topk_loss.reference(x, labels, mask, ks, 0.0, law, False)[0],
        ),
        (joint.fused, (both, labels, mask, [5, 2], 2, *rest), joint_losses(both.unbind(), task)[0]),
        (
            pairs.fused,
            (x, first, second, labels, None, mask.float(), None, -1, 1.0, "ones", 1.5, True),
            pair_sums.reference(x, PairWeights(first, second, "ones", labels, items=mask.float()), 1.5),
        ),
    ):
        torch.library.opcheck(
            fused, arguments, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
        )
        value = fused(*arguments)[0]
        weights = torch.cos(torch.arange(value.numel())).view_as(value)
        torch.testing.assert_close(value, expected)
        found, wanted = (torch.autograd.grad(one, arguments[0], weights)[0] for one in (value, expected))
        torch.testing.assert_close(found, wanted)


class _NoOpKernel:
    """A kernel that does nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert all(isinstance(size, int) for size in grid)
        return lambda *_, **__: None


@pytest.mark.parametrize("n", [40, 4096])
def test_kernel_launchers_read_no_values_on_the_host(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("topk_loss", "joint_terms")
    files = {name: importlib.import_module(f"recsys_topk.ops.backends.triton_kernels.{name}") for name in names}
    for name, module in files.items():
        monkeypatch.setattr(module, f"{name}_kernel", _NoOpKernel())
    x, mask = torch.zeros(3, n, device=DEVICE), torch.ones(3, n, dtype=torch.bool, device=DEVICE)
    ks = torch.ones(3, dtype=torch.int64, device=DEVICE)
    with no_host_reads():
        for law in ("dftopk", "logistic", "laplace", "clip", "fenchel_young"):
            for given in ((None, None, 5), (mask, ks, 0), (mask, None, -1)):
                _, _, gradient = files["topk_loss"].fused_topk_loss(x, x, *given, 0.0, law, 1.0, 0.5, True)
                assert gradient.shape == x.shape
        for cuts, k, law in (([30, 10], 5, "dftopk"), ([], -1, "clip")):
            made = files["joint_terms"].fused_joint_terms(torch.stack([x, x]), x, mask, cuts, k, 0.0, law, 1.0, 0.5)
            assert [one.shape[-1] for one in made] == [3, 3, n, n]
