"""The lock files, the Makefile's reuse of the environment, and the files of the wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import recsys_topk

ROOT = Path(__file__).parents[1]
PIN = re.compile(r"^(?P<name>[a-z0-9._-]+)==(?P<version>[^ ;]+)( ; .+?)?( +--hash=sha256:[0-9a-f]{64})+$")


def pins(name: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for line in (ROOT / "requirements" / name).read_text().replace("\\\n", "").splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            match = PIN.match(line)
            assert match, f"{name} is not fully pinned with hashes: {line!r}"
            found.setdefault(match["name"], set()).add(match["version"])
    return found


@pytest.mark.parametrize(("lock", "fbgemm"), [("cpu.lock", "fbgemm-gpu-cpu"), ("gpu.lock", "fbgemm-gpu")])
def test_locks_are_fully_pinned_with_compatible_versions(lock: str, fbgemm: str) -> None:
    found = pins(lock)
    assert found["torchrec"] == {"1.9.2"}
    assert found[fbgemm] == {"1.8.0"}
    assert found["torchmetrics"] == {"1.9.0"}
    assert {"lightning", "datasets", "wandb", "pyarrow", "jsonargparse", "hypothesis", "ruff", "mypy"} <= set(found)
    assert ("torch" in found) == (lock == "gpu.lock")
    assert any(name.startswith("nvidia-") for name in found) == (lock == "gpu.lock")


def test_make_reuses_the_environment_until_a_lock_changes(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    (tmp_path / ".venv").mkdir()
    stamp = tmp_path / ".venv" / ".installed"
    stamp.touch()
    newest = max(path.stat().st_mtime for path in tmp_path.rglob("*"))
    os.utime(stamp, (newest + 10, newest + 10))

    def out_of_date() -> bool:
        done = subprocess.run(["make", "--question", "install"], cwd=tmp_path, capture_output=True, check=False)
        return done.returncode == 1

    assert not out_of_date()
    os.utime(tmp_path / "requirements" / "cpu.lock", (newest + 20, newest + 20))
    assert out_of_date()


def test_old_python_fails_with_a_message(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    fake = tmp_path / "python-old"
    fake.write_text('#!/bin/sh\nexec python3 -c "import sys; sys.version_info = (3, 8, 1); exec(sys.argv[1])" "$2"\n')
    fake.chmod(0o755)
    done = subprocess.run(
        ["make", "install", f"PYTHON={fake}"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "recsys_topk needs Python 3.11 or newer" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_package_includes_type_marker_and_configs() -> None:
    package = Path(recsys_topk.__file__).parent
    assert (package / "py.typed").is_file()
    names = {path.stem for path in (package / "runs" / "configs").glob("*.yaml")}
    assert {"simulated", "simulated-3stage", "recflow-2stage", "recflow-3stage", "paper-online"} <= names


def test_citation_and_changelog_name_the_version() -> None:
    assert f"version: {recsys_topk.__version__}" in (ROOT / "CITATION.cff").read_text()
    assert f"## {recsys_topk.__version__}" in (ROOT / "CHANGELOG.md").read_text()
