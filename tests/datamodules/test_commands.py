from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from recsys_topk.cli import prepare, simulate
from recsys_topk.cli.main import main
from recsys_topk.datamodules import RecFlowDataModule, WorldConfig
from tests.conftest import Result


def test_simulate_then_prepare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    world = tmp_path / "world"
    sizes = ["--users", "30", "--items", "300", "--days", "3", "--requests", "25", "--seed", "1"]
    assert simulate.main(["--out", str(world), *sizes, "--recalls", "--describe"]) == 0
    out = capsys.readouterr().out
    assert "AUC of the true utility against sampled items" in out
    assert "3 days, 75 requests" in out
    lines = [line.split()[0] for line in out.splitlines() if line]
    first = lines.index("ranker")
    assert lines[first : first + 5] == ["ranker", "----------", "random", "popularity", "oracle"]
    caplog.clear()
    options = ["--data.root", str(world), "--data.cache_dir", str(tmp_path / "cache")]
    assert prepare.main([*options, "--data.days", "2024-01-13"]) == 0
    first = capsys.readouterr()
    assert "1 days, 2024-01-13 to 2024-01-13, " in first.out
    assert "2024-01-13, about " in first.err
    (tmp_path / "run.yaml").write_text(
        f"data: {{root: {world}, cache_dir: {tmp_path / 'cache'}}}\nmodel: {{k: 5}}\ntrainer: {{max_epochs: 3}}\n"
    )
    assert prepare.main(["--config", str(tmp_path / "run.yaml")]) == 0
    second = capsys.readouterr()
    assert "3 days, 2024-01-13 to 2024-01-15, " in second.out
    assert "2024-01-15, about " in second.err
    assert prepare.main(options) == 0
    third = capsys.readouterr()
    assert "3 days, " in third.out
    assert third.err == ""
    messages = [
        record.getMessage().split(" days")[0] for record in caplog.records if "preparing" in record.getMessage()
    ]
    assert messages == ["preparing 1 of 1", "preparing 2 of 3"]


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("simulate", ["--out", "{tmp}"], "exists and is not empty"),
        ("simulate", ["--out", "{tmp}/new", "--items", "3"], "at least 200 items, got 3"),
        ("simulate", ["--out", "{tmp}/new", "--days", "2", "--recalls"], "at least 3; got 2"),
        ("simulate", ["--out", "{tmp}/new", "--preset", "drift", "--days", "2", "--describe"], "at least 3; got 2"),
        ("simulate", ["--out", "{tmp}/new", "--new-items", "x"], "invalid int or none value: 'x'"),
        ("prepare", ["--data.root", "{tmp}"], "holds no RecFlow data"),
        ("prepare", ["--loss", "dftopk"], "prepare takes --config and options of the data"),
        ("prepare", ["--data.dais", "2024-01-13"], "did you mean --data.days"),
    ],
)
def test_mistakes_exit_with_one_line(command, arguments, message, tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "file").write_text("")
    assert main([command, *(argument.format(tmp=tmp_path) for argument in arguments)]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


_HELP = """
import sys
from recsys_topk.cli import {command}
try:
    {command}.main(["--help"])
except SystemExit:
    print([m for m in ("torch", "lightning", "datasets", "pyarrow") if m in sys.modules])
"""


@pytest.mark.parametrize("command", ["simulate", "prepare"])
def test_help_imports_no_heavy_libraries(command: str) -> None:
    code = _HELP.format(command=command)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", ["fit", "prepare"])
def test_all_wrong_days_are_reported_before_a_file_is_written(
    command: str, world_root: Path, tmp_path: Path, in_process: Callable[..., Result]
) -> None:
    (tmp_path / "run.yaml").write_text(f"data: {{root: {world_root}, train_days: '2023-01-13'}}\n")
    options = ["--config", "run.yaml", "--data.val_days", "2024-01-30", "--data.test_days", "soon"]
    done = in_process(tmp_path, command, *options)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "train_days='2023-01-13' asks for 2023-01-13, and the data hold 2024-01-13 .. 2024-01-16" in line
    assert "val_days='2024-01-30' asks for 2024-01-30" in line
    assert "YYYY-MM-DD, e.g. 2024-01-13; got 'soon'" in line
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_wrong_days_of_a_simulated_world_raise_before_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_world(*_: object) -> None:
        raise AssertionError("a world would be simulated")

    monkeypatch.setattr("recsys_topk.datamodules.recflow.datamodule.embedded_root", no_world)
    data = RecFlowDataModule(world=WorldConfig(days=4, start="2024-03-01"), test_days="2024-03-05")
    assert data.outline.labels == "places"
    with pytest.raises(ValueError, match=r"test_days='2024-03-05' asks for 2024-03-05, .* 2024-03-01 .. 2024-03-04"):
        data.schema  # noqa: B018


def test_run_without_validation_days_trains_and_tests(
    world_root: Path, tmp_path: Path, in_process: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    days = ["--data.root", str(world_root), "--data.days", "2024-01-13:2024-01-15", "--data.val_days", "none"]
    done = in_process(tmp_path, "fit", *days, "--trainer.enable_progress_bar", "false", "--name", "no-val")
    assert done.returncode == 0, done.stderr
    checkpoint = tmp_path / "runs" / "no-val" / "checkpoints" / "last.ckpt"
    assert [path.name for path in checkpoint.parent.iterdir()] == ["last.ckpt"]
    refused = in_process(tmp_path, "validate", "--ckpt_path", str(checkpoint))
    assert refused.returncode == 2
    assert "nothing for validation; val_days is none: give --data.val_days DATE" in refused.stderr
    tested = in_process(tmp_path, "test", "--ckpt_path", str(checkpoint))
    assert tested.returncode == 0, tested.stderr
