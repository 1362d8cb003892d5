"""`make test-gpu` on a CPU: everything that it runs, the least of each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.gpu.__main__ import main
from tests.gpu.checks import CHECKS, row


def test_everything_runs_on_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "rows.json"
    status = main(["--device", "cpu", "--quick", "--json", str(file)])
    said, rows = capsys.readouterr().out, json.loads(file.read_text())
    assert status == 0, said
    assert "| fit | bf16-mixed, fused tables | ok, loss " in said
    assert {one["check"] for one in rows} == {
        "contract", "random lists", "kernels", "no waiting", "fit", "bench losses", "bench operators"
    }  # fmt: skip


def test_a_failure_is_a_row_and_the_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(device: str, quick: bool) -> list[dict[str, str]]:
        return [row("contract", "loss mine", lambda: torch.ones(2) @ torch.ones(3))]

    monkeypatch.setitem(CHECKS, "contract", broken)
    assert main(["--device", "cpu", "--quick", "--only", "contract"]) == 1
    assert "| contract | loss mine | FAILED: RuntimeError" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "--device cpu" in capsys.readouterr().err
