"""The dependency direction of the package, and what may be imported where."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import recsys_topk

PACKAGE = Path(recsys_topk.__file__).parent

# A layer may import itself and what is listed; `BASE` is in its own order of dependency.
BASE = ["trust", "registry", "spec", "numerics", "checks", "ops"]
TORCH_ONLY = [*BASE, "operators", "losses"]
ALLOWED = {
    **{name: BASE[:i] for i, name in enumerate(BASE)},
    "operators": BASE,
    "losses": [*BASE, "operators"],
    "testing": [*TORCH_ONLY, "datamodules"],
    "metrics": BASE,
    "datamodules": BASE,
    "cascades": [*TORCH_ONLY, "metrics", "datamodules"],
    "reference": [*TORCH_ONLY, "metrics", "cascades"],
    "callbacks": [*TORCH_ONLY, "metrics", "datamodules", "cascades"],
}
BELOW_RUNS = [*ALLOWED["callbacks"], "callbacks", "trust", "ops", "reference", "strategies", "serving"]
ALLOWED |= {
    "runs": BELOW_RUNS,
    "reports": [*BELOW_RUNS, "runs"],
    "bench": [*BELOW_RUNS, "runs"],
    "experiments": [*BELOW_RUNS, "runs", "reports"],
    "__main__": ["cli"],
}
# Third-party packages that a layer may import at module level, besides torch and numpy.
LIGHT = {*TORCH_ONLY, "testing"}
HEAVY = {"lightning", "torchrec", "datasets", "wandb", "torchmetrics", "pyarrow", "pandas", "jsonargparse", "yaml"}


def layer(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    mine = layer(path)
    names = imported(path)
    if mine in ALLOWED:
        ours = {name.split(".")[1] for name in names if name.startswith("recsys_topk.")}
        assert ours <= {mine, *ALLOWED[mine]}, f"{mine} may not import {sorted(ours - {mine, *ALLOWED[mine]})}"
    if mine in LIGHT:
        assert not {name.split(".")[0] for name in names} & HEAVY


def test_the_command_line_is_for_people() -> None:
    """Nothing but the entry point imports cli or reads what was typed."""
    for path in FILES:
        if layer(path) not in ("cli", "__main__"):
            assert not [name for name in imported(path) if name.startswith("recsys_topk.cli")], path
        if path.relative_to(PACKAGE) != Path("cli/main.py"):
            assert "sys.argv" not in path.read_text(), path


BLOCK = """
import importlib.abc, sys
BLOCKED = {"lightning", "torchrec", "datasets", "wandb", "torchmetrics", "pyarrow", "jsonargparse"}

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked in this test")

sys.meta_path.insert(0, Refuse())
"""


def run_blocked(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", BLOCK + code], capture_output=True, text=True, check=False)


def test_the_block_itself_works() -> None:
    assert run_blocked("import lightning").returncode != 0


def test_losses_operators_and_metrics_need_torch_and_numpy_only() -> None:
    done = run_blocked(
        """
import torch
import recsys_topk.losses, recsys_topk.operators, recsys_topk.metrics.functional, recsys_topk.testing.contract
scores = torch.randn(3, 12, requires_grad=True)
labels = torch.arange(12.0).expand(3, 12)
for name in recsys_topk.losses.available():
    loss = recsys_topk.losses.get(name)
    loss(scores, labels, k=4 if loss.requires_k else None).backward()
print(len(recsys_topk.losses.available()))
"""
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 3


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, recsys_topk, recsys_topk.cli.main; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
