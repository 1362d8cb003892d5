"""Imports inside the package follow the table below, and light packages import no heavy libraries."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import recsys_topk

PACKAGE = Path(recsys_topk.__file__).parent

# Modules that every other module may import.
BASE = {
    "lazy",
    "options",
    "numerics",
    "processes",
    "checks",
    "registry",
    "spec",
    "trust",
    "files",
    "types",
    "text",
    "machine",
}
# package -> packages that it may import besides itself and BASE. "a.b" allows only that module of a package.
ALLOWED: dict[str, set[str]] = {
    **{name: set() for name in BASE},
    "ops": set(),
    "operators": {"ops"},
    "losses": {"operators", "ops"},
    "metrics": {"ops"},
    "tabular": set(),
    "datamodules": {"tabular", "metrics.functional", "ops"},
    "cascades": {"datamodules.batch", "tabular.schema", "losses", "metrics", "operators", "ops"},
    "reference": {"cascades.objectives", "losses", "metrics", "operators"},
    "evaluation": {"cascades", "datamodules", "tabular", "metrics", "ops", "serving.index", "serving.manifest"},
    "strategies": {"cascades", "datamodules", "evaluation", "metrics", "ops"},
    "callbacks": {"cascades", "datamodules", "tabular", "evaluation", "metrics", "ops"},
    "testing": {"losses", "operators", "metrics", "cascades", "datamodules", "tabular"},
    "serving": {"tabular"},
}
# Modules that may import more than the rest of their package: the exporter reads a trained cascade and its data.
EXCEPTIONS = {name: {"cascades", "datamodules", "metrics", "ops"} for name in ("serving.export", "serving.twin")}
LIBRARY = set(ALLOWED) - {"testing"}
ALLOWED["runs"] = LIBRARY
ALLOWED["reports"] = {*LIBRARY, "runs"}
ALLOWED["bench"] = {*LIBRARY, "runs"}
ALLOWED["experiments"] = {*LIBRARY, "runs", "reports"}
ALLOWED["cli"] = {*ALLOWED, "testing"}
ALLOWED["__main__"] = {"cli"}
ALLOWED["__init__"] = LIBRARY | {"runs"}

# LIGHT packages need only torch and numpy; they must not import HEAVY libraries.
LIGHT = {*BASE, "ops", "operators", "losses"}
HEAVY = {"lightning", "torchrec", "datasets", "wandb", "torchmetrics", "pyarrow", "pandas", "jsonargparse", "yaml"}
# These packages run without torch, except the modules of EXCEPTIONS.
WITHOUT_TORCH = {"lazy", "files", "types", "text", "machine", "tabular", "serving"}
TORCH = {"torch", "lightning", "torchrec", "torchmetrics", "datasets"}
# Modules of `trust` that read files for a parser. They use yaml and jsonargparse; no light module imports them.
# `recsys_topk.trust` itself needs only the standard library.
READERS = {"trust.documents", "trust.guard", "trust.typed"}

FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(("recsys_topk", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


def imported(path: Path) -> set[str]:
    """Return the full names of all modules and objects that a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def forbidden_imports(path: Path) -> set[str]:
    """Return the imports of a file that the table does not allow."""
    mine = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    allowed = {mine, *BASE, *ALLOWED[mine]}
    module = name_of(path).removeprefix("recsys_topk.")
    allowed |= EXCEPTIONS.get(module, set())
    everything = imported(path)
    libraries = {name.split(".")[0] for name in everything}
    names = {name.removeprefix("recsys_topk.") for name in everything if name.startswith("recsys_topk.")}
    names -= {"__version__"}
    wrong = {n for n in names if not any(n == part or n.startswith(f"{part}.") for part in allowed)}
    if mine in WITHOUT_TORCH and module not in EXCEPTIONS:
        wrong |= libraries & TORCH
    if mine in LIGHT and module not in READERS:
        wrong |= libraries & HEAVY
        wrong |= {name for name in names if any(name == part or name.startswith(f"{part}.") for part in READERS)}
    return wrong


def test_imports_follow_the_table() -> None:
    assert {name_of(path): wrong for path in FILES if (wrong := forbidden_imports(path))} == {}


def test_table_lists_every_package() -> None:
    present = {entry.stem for entry in PACKAGE.iterdir() if entry.suffix == ".py" or (entry / "__init__.py").is_file()}
    assert set(ALLOWED) == present


def test_only_the_entry_point_reads_sys_argv() -> None:
    assert [name_of(path) for path in FILES if "sys.argv" in path.read_text()] == ["recsys_topk.cli.main"]


def test_only_main_imports_the_command_line() -> None:
    outside = [path for path in FILES if path.relative_to(PACKAGE).parts[0] != "cli"]
    assert [name_of(path) for path in outside if "recsys_topk.cli" in path.read_text()] == ["recsys_topk.__main__"]


BLOCK = """
import importlib.abc, sys
BLOCKED = {"lightning", "torchrec", "datasets", "wandb", "torchmetrics", "pyarrow", "jsonargparse", "yaml"}

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked in this test")

sys.meta_path.insert(0, Refuse())
"""


def run_blocked(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", BLOCK + code], capture_output=True, text=True, check=False)


def test_blocked_import_fails() -> None:
    assert run_blocked("import lightning").returncode != 0


def test_losses_operators_and_metrics_need_only_torch_and_numpy() -> None:
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


def test_losses_command_needs_only_torch_and_numpy() -> None:
    done = run_blocked("from recsys_topk.cli.main import main; raise SystemExit(main(['losses']))")
    assert done.returncode == 0, done.stderr
    assert "\ndftopk " in done.stdout


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, recsys_topk, recsys_topk.cli.main; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
