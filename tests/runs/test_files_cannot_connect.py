"""A file cannot open a connection, show another file, or write to the terminal."""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from recsys_topk.cli.console import echo, warn
from recsys_topk.cli.main import main
from recsys_topk.runs import TrainingRun
from recsys_topk.runs.config import read_config
from recsys_topk.trust.documents import inspect_config
from recsys_topk.trust.source import UntrustedError
from tests.conftest import Result
from tests.test_old_files import FIXTURES


@pytest.mark.parametrize("text", ["wandb: {entity: other}", "wandb: {mode: online}", "wandb.entity: other"])
def test_file_cannot_choose_where_data_are_sent(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"logger: wandb\n{text}\n")
    with pytest.raises(UntrustedError, match=r"sets wandb\.(entity|mode) to .*, but a file cannot choose where data"):
        read_config(str(tmp_path / "a.yaml"))


@pytest.mark.parametrize(
    ("typed", "variable", "mode"),
    [({}, None, "offline"), ({"logger": "wandb"}, None, None), ({}, "online", "online")],
)
def test_file_runs_wandb_offline(
    typed: dict[str, str], variable: str | None, mode: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    if variable is not None:
        monkeypatch.setenv("WANDB_MODE", variable)
    (tmp_path / "a.yaml").write_text("logger: wandb\nwandb: {project: p}\n")
    config, lines = TrainingRun({"config": [str(tmp_path / "a.yaml")], **typed})._resolve("fit")
    assert config["wandb"].get("mode") == mode
    assert any("--logger wandb" in line for line in lines) == (mode == "offline")


@pytest.mark.parametrize("command", ["test", "export"])
def test_checkpoint_does_not_show_another_file(command: str, tmp_path: Path, in_process: Callable[..., Result]) -> None:
    shutil.copytree(FIXTURES / "v0_2", tmp_path / "v")
    path = tmp_path / "v" / "own" / "checkpoints" / "last.ckpt"
    (tmp_path / "shadow.csv").write_text("root:TOPSECRET:0:0,daemon:OTHER:1:1\n1,2\n")
    content = torch.load(path, weights_only=True)
    content["datamodule_hyper_parameters"].update(root="shadow.csv", features=None)
    torch.save(content, path)
    arguments = [command, "--ckpt_path", str(path), *(["--out", "e"] if command == "export" else [])]
    done = in_process(tmp_path, *arguments)
    assert done.returncode == 2
    assert "TOPSECRET" not in done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert "the data that the checkpoint names cannot be read (shadow.csv, " in line


def test_config_does_not_show_a_file_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "shadow").write_text("root:TOPSECRET:0::/root:/bin/bash\n")
    with pytest.raises(UntrustedError, match="contains an address") as refused:
        inspect_config({"data": {"vocabulary": str(tmp_path / "shadow")}}, "checkpoint 'a.ckpt'")
    assert "TOPSECRET" not in str(refused.value)
    with pytest.raises(UntrustedError, match="contains the address 'http://a/b'"):
        inspect_config({"data": {"vocabulary": "http://a/b"}}, "checkpoint 'a.ckpt'")


def test_escape_codes_are_printed_escaped(
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = "\x1b]0;title\x07\x1b[2J\x9b31m"
    echo(f"a{code}\n\tb")
    warn(f"a{code}")
    (tmp_path / f"x{code}.yaml").write_text("a: [")
    assert main(["fit", "--config", str(tmp_path / f"x{code}.yaml")]) == 2
    warned = []

    def of_a_command(arguments: list[str]) -> None:
        logging.getLogger("recsys_topk").warning("column %s", code)
        warned.append(warnings.formatwarning(UserWarning(code), UserWarning, "a.py", 1))

    monkeypatch.setattr("recsys_topk.cli.losses.main", of_a_command)
    before = logging.getLogRecordFactory(), warnings.formatwarning
    assert main(["losses"]) == 0
    assert (logging.getLogRecordFactory(), warnings.formatwarning) == before
    out, err = capsys.readouterr()
    assert out.startswith("a\\x1b]0;title\\x07\\x1b[2J\\x9b31m\n\tb\n")
    assert caplog.messages[-1] == "column \\x1b]0;title\\x07\\x1b[2J\\x9b31m"
    for text in (out, err):
        assert not {"\x1b", "\x07", "\x9b"} & set(text)
    assert err.count("\\x1b]0;title") == 2
    assert warned
    assert "\x1b" not in warned[0]
