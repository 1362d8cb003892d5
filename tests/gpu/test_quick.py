"""A small part of every check of `make test-gpu`, on a CPU."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
import torch

from tests.gpu import checks
from tests.gpu.__main__ import main, parser
from tests.gpu.checks import CHECKS, ROOT, row

NAMES = {
    "contract", "random lists", "kernels", "no waiting", "fit", "bench losses", "bench operators", "bench step"
}  # fmt: skip
LINES = {
    "fit": ["32-true, dense tables | ok, loss ", "bf16-mixed, fused tables | ok, loss "],
    "no waiting": ["step, clipping, Adam, 25 negatives: popularity | ok |"],
}


@pytest.mark.parametrize("only", ["waits", pytest.param("", marks=pytest.mark.long)])
def test_checks_run_on_a_cpu(
    only: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "rows.json"
    status = main(["--device", "cpu", "--quick", "--json", str(file), *(["--only", only] if only else [])])
    output, rows = capsys.readouterr().out, json.loads(file.read_text())
    assert status == 0, output
    names = {"no waiting"} if only else NAMES
    assert {one["check"] for one in rows} == names
    for name in names & set(LINES):
        assert all(f"| {name} | {line}" in output for line in LINES[name])
    table = [line for line in output.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(rows)
    assert {line.count("|") for line in table} == {4}


def test_make_target_installs_the_lock_and_runs_all_checks(capsys: pytest.CaptureFixture[str]) -> None:
    """The files that `make -n test-gpu` names exist, and the parser accepts its last command."""
    command = ["make", "--no-print-directory", "-n", "test-gpu", "GPU_VENV=somewhere"]
    own = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")
    }  # set by `make test`
    made = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, check=True).stdout.splitlines()
    lock = next(shlex.split(line) for line in made if "-r" in shlex.split(line))
    text = (ROOT / lock[lock.index("-r") + 1]).read_text()
    assert all(f"\n{name}==" in text for name in ("torch", "triton", "fbgemm-gpu", "torchrec", "lightning", "pytest"))
    python, flag, module, *options = shlex.split(made[-1])
    assert (python, flag, module) == ("somewhere/bin/python", "-m", "tests.gpu")
    given = parser().parse_args(options)
    assert (given.device, given.only, given.quick) == ("cuda", None, False)


def test_fit_runs_every_precision_with_dense_and_fused_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "output_of", lambda *given: seen.append(given))
    seen: list[tuple[str, ...]] = []
    rows = checks.fit("cuda", quick=False)
    assert [one["what"] for one in rows] == [
        "32-true, dense tables", "32-true, fused tables", "bf16-mixed, dense tables", "bf16-mixed, fused tables"
    ]  # fmt: skip
    assert all({"fit", "--trainer.accelerator=gpu"} <= set(given) for given in seen)
    assert len(seen) == 4


def test_no_waiting_sets_the_sync_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", calls.append)
    with checks.no_waiting("cuda"):
        calls.append("step")
    assert calls == ["synchronize", "error", "step", "default"]


def test_failed_check_is_a_row_and_sets_the_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(device: str, quick: bool) -> list[dict[str, str]]:
        return [row("contract", "loss mine", lambda: torch.ones(2) @ torch.ones(3))]

    monkeypatch.setitem(CHECKS, "contract", broken)
    assert main(["--device", "cpu", "--quick", "--only", "contract"]) == 1
    assert "| contract | loss mine | FAILED: RuntimeError" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_error_without_a_gpu_names_the_cpu_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "--device cpu" in capsys.readouterr().err
