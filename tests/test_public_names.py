"""Public classes import from the top and from each sub-package, on first use."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

import recsys_topk

PACKAGES = [
    "recsys_topk",
    "recsys_topk.cascades",
    "recsys_topk.cascades.objectives",
    "recsys_topk.cascades.stages",
    "recsys_topk.datamodules",
]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_the_thing_itself(package: str) -> None:
    module = import_module(package)
    for name, home in module._HOME.items():
        assert getattr(module, name) is getattr(import_module(f"{package}.{home}"), name)
        assert name in dir(module)
    with pytest.raises(AttributeError, match="has no attribute 'Nonsense'"):
        module.Nonsense  # noqa: B018


def test_all_stages_are_there() -> None:
    from recsys_topk.cascades import stages
    from recsys_topk.cascades.stage import registry

    ours = [stage for stage in registry.classes().values() if stage.__module__.startswith("recsys_topk.")]
    assert len(ours) >= 3
    assert all(getattr(stages, stage.__name__) is stage for stage in ours)


def test_the_sub_packages_import_nothing_heavy_by_themselves() -> None:
    code = f"import sys, {', '.join(PACKAGES)}; print(*[n for n in ('torch', 'numpy', 'torchrec') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
    assert recsys_topk.__version__
