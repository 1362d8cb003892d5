"""Public classes import from the top and from each sub-package, on first use."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import recsys_topk

PACKAGES = [
    "recsys_topk",
    "recsys_topk.cascades",
    "recsys_topk.cascades.objectives",
    "recsys_topk.cascades.stages",
    "recsys_topk.datamodules",
    "recsys_topk.datamodules.recflow",
    "recsys_topk.datamodules.simulator",
    "recsys_topk.metrics",
    "recsys_topk.reference",
    "recsys_topk.runs",
]


def declared(file: str) -> dict[str, str]:
    """Return the names that a type checker sees in an ``__init__.py``, with the module that each comes from."""
    blocks = [node for node in ast.parse(Path(file).read_text()).body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_the_defined_object(package: str) -> None:
    module = import_module(package)
    names = declared(str(module.__file__))
    assert names
    for name, home in names.items():
        assert getattr(module, name) is getattr(import_module(home), name)
    own = {name for name in dir(module) if not name.startswith("_") and name not in vars(module)}
    assert own - set(names) <= {"losses", "operators", "metrics", "cascades", "datamodules", "ops", "reference"}
    assert set(names) <= set(dir(module))
    with pytest.raises(AttributeError, match="has no attribute 'Nonsense'"):
        module.Nonsense  # noqa: B018


def test_stages_package_exports_every_stage() -> None:
    from recsys_topk.cascades import stages
    from recsys_topk.cascades.stage import registry

    ours = [stage for stage in registry.classes().values() if stage.__module__.startswith("recsys_topk.")]
    assert len(ours) >= 3
    assert all(getattr(stages, stage.__name__) is stage for stage in ours)


def test_importing_sub_packages_does_not_import_torch_or_numpy() -> None:
    code = f"import sys, {', '.join(PACKAGES)}; print(*[n for n in ('torch', 'numpy', 'torchrec') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
    assert recsys_topk.__version__
