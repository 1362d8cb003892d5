"""`recsys-topk doctor` checks versions and reports on this installation."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from recsys_topk.cli import doctor
from recsys_topk.cli.doctor import NEEDED, check_versions

GOOD = {
    "torch": "2.13.0+cpu", "fbgemm-gpu-cpu": "1.8.0", "torchrec": "1.9.2", "torchmetrics": "1.9.0",
    "lightning": "2.6.6", "jsonargparse": "4.53.0", "datasets": "5.2.0", "pyarrow": "26.0.1", "wandb": "0.31.0",
    "tensordict": "0.15.3",
}  # fmt: skip


def faults_with_fixes(found: dict[str, str | None], python: tuple[int, ...] = (3, 11, 7)) -> dict[str, str]:
    return {check.part: check.cure for check in check_versions(found, python) if not check.fine}


def test_locked_versions_have_no_fault() -> None:
    assert faults_with_fixes(GOOD) == {}


def test_cuda_versions_have_no_fault() -> None:
    cuda = {**GOOD, "torch": "2.13.0", "fbgemm-gpu": "1.8.0", "fbgemm-gpu-cpu": None}
    assert faults_with_fixes(cuda) == {}


@pytest.mark.parametrize(
    ("change", "part", "cure"),
    [
        ({"torchrec": None}, "torchrec", "pip install --no-deps torchrec==1.9.2"),
        ({"torchmetrics": "1.0.3"}, "torchmetrics", "pip install --no-deps 'torchmetrics>=1.9,<2'"),
        ({"torch": None}, "torch", "pip install --no-deps torch==2.13.0+cpu"),
        ({"torch": "2.4.0+cpu"}, "torch", "torch==2.13.0+cpu"),
        ({"fbgemm-gpu-cpu": None, "fbgemm-gpu": "1.8.0"}, "fbgemm-gpu-cpu", "pip uninstall -y fbgemm-gpu &&"),
        ({"fbgemm-gpu": "1.8.0"}, "fbgemm", "pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu"),
        ({"lightning": "2.7.0"}, "lightning", "pip install 'lightning>=2.6,<2.7'"),
        ({"datasets": None}, "datasets", "pip install '.[train]'"),
    ],
)
def test_fault_is_found_with_its_fix(change: dict[str, str | None], part: str, cure: str) -> None:
    found = faults_with_fixes({**GOOD, **change})
    assert list(found) == [part]
    assert cure in found[part]


def test_ranges_match_pyproject() -> None:
    """The table once accepted lightning 2.5 and jsonargparse 4.40, which the package does not."""
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    ranges = dict(re.findall(r'^    "([\w-]+)(?:\[\w+\])?>=([\d.]+),<[\d.]+",$', project, re.MULTILINE))
    assert set(ranges) >= {"lightning", "jsonargparse", "torchmetrics"}
    assert {name: NEEDED[name][0] for name in ranges} == ranges


def test_old_python_is_a_fault() -> None:
    assert "python" in faults_with_fixes(GOOD, (3, 9, 1))


def test_report_on_this_installation_has_no_fault(warm_python: list[str]) -> None:
    done = subprocess.run(
        [*warm_python, "-m", "recsys_topk", "doctor", "--json"], capture_output=True, text=True, check=False
    )
    report = json.loads(done.stdout)
    parts = {check["part"]: check for check in report["checks"]}
    assert done.returncode == 0, report
    assert parts["embedding look-up"]["found"] == "works"
    assert parts["torchrec"]["found"] == "1.9.2"


def test_environment_that_only_serves_is_fine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """requirements/serve.lock has no torch; a partial installation is a fault, an empty one is too."""
    lock = (Path(__file__).parents[2] / "requirements" / "serve.lock").read_text(encoding="utf-8")
    locked = dict(re.findall(r"^([\w.-]+)==(\S+)", lock, re.MULTILINE))
    monkeypatch.setattr(doctor, "installed", lambda: locked)
    assert doctor.main([]) == 0
    said = capsys.readouterr().out
    assert "serve: ready" in said
    assert "train: not installed" in said
    monkeypatch.setattr(doctor, "installed", lambda: {k: v for k, v in locked.items() if k != "onnxruntime"})
    assert doctor.main([]) == 1
    assert "to fix onnxruntime: pip install '.[serve]'" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "installed", dict)
    assert doctor.main([]) == 1
