from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from recsys_topk.cli import prepare, simulate
from recsys_topk.cli.main import main


def test_simulate_then_prepare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = tmp_path / "world"
    sizes = ["--users", "30", "--items", "300", "--days", "3", "--requests", "25", "--seed", "1"]
    assert simulate.main(["--out", str(world), *sizes, "--recalls"]) == 0
    out = capsys.readouterr().out
    assert "3 days, 75 requests" in out
    lines = [line.split()[0] for line in out.splitlines()]
    assert lines[1:6] == ["ranker", "----------", "random", "popularity", "oracle"]
    options = ["--data.root", str(world), "--data.cache_dir", str(tmp_path / "cache")]
    assert prepare.main([*options, "--data.days", "2024-01-13"]) == 0
    first = capsys.readouterr()
    assert "1 days, " in first.out
    assert "2024-01-13, about " in first.err
    assert prepare.main(options) == 0
    out = capsys.readouterr().out
    assert "3 days, " in out
    assert "1 already in" in out
    assert prepare.main(options) == 0
    assert "3 already in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("simulate", ["--out", "{tmp}"], "exists and is not empty"),
        ("simulate", ["--out", "{tmp}/new", "--items", "3"], "at least 200 items, got 3"),
        ("simulate", ["--out", "{tmp}/new", "--days", "2", "--recalls"], "at least 3; got 2"),
        ("prepare", ["--data.root", "{tmp}"], "holds no RecFlow data"),
    ],
)
def test_errors_are_one_line(command, arguments, message, tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
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
def test_help_imports_nothing_heavy(command: str) -> None:
    code = _HELP.format(command=command)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "[]"
