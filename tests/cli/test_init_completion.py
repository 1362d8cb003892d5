"""`init` writes configs that fit parses; `completion` completes in a real bash."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from recsys_topk.cli.main import COMMANDS, main
from recsys_topk.runs import TrainingRun

CSV = "user_id,item_id,timestamp\nu1,i1,1700000000\nu2,i2,1700000001\n"


@pytest.mark.parametrize(
    ("options", "data", "stages"),
    [
        ([], "RecFlowDataModule", None),
        (["--root", "a b.csv"], "InteractionsDataModule", ["retrieval", "ranking"]),
        (["--root", "a b.csv", "--stages", "1", "--name", "mine"], "InteractionsDataModule", ["retrieval"]),
    ],
)
def test_init_writes_a_config_that_fit_takes(
    options: list[str], data: str, stages: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a b.csv").write_text(CSV)
    assert main(["init", "first.yaml", *options]) == 0
    assert f"runs/{'mine' if 'mine' in options else 'first'} gets this" in Path("first.yaml").read_text()
    read = TrainingRun({"config": "first.yaml"}).options()
    assert read["data"]["class_path"].endswith(data)
    assert read["data"]["init_args"]["root"] == ("a b.csv" if options else None)
    assert read["name"] == ("mine" if "mine" in options else "first")
    assert stages is None or [stage["name"] for stage in read["model"]["stages"]] == stages
    before = Path("first.yaml").read_text()
    assert main(["init", "first.yaml"]) == 2
    assert Path("first.yaml").read_text() == before


def test_init_asks_in_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("clicks.csv").write_text(CSV)
    asked: list[str] = []

    def answer(question: str) -> str:
        asked.append(question)
        return {"your": "clicks.csv", "stag": "1", "name": ""}[question[:4]]

    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", answer)
    assert main(["init", "c.yaml"]) == 0
    content: dict[str, Any] = yaml.safe_load(Path("c.yaml").read_text())
    assert (content["data"]["init_args"]["root"], content["name"]) == ("clicks.csv", "c")
    assert [stage["name"] for stage in content["model"]["stages"]] == ["retrieval"]
    assert len(asked) == 3


def test_bash_completes_commands_options_and_names(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out)

    def completed(*words: str) -> list[str]:
        typed = " ".join(f"'{word}'" for word in words)
        code = (
            f"source {script}; COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _recsys_topk; echo ${{COMPREPLY[@]}}"
        )
        return subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True).stdout.split()

    assert set(completed("recsys-topk", "")) == set(COMMANDS)
    assert completed("recsys-topk", "simu") == ["simulate"]
    assert completed("recsys-topk", "fit", "--loss", "dft") == ["dftopk"]
    assert "--data.root" in completed("recsys-topk", "fit", "--data.r")
    assert "--export" in completed("recsys-topk", "index", "--e")
    assert main(["completion", "fish"]) == 0
    fish = capsys.readouterr().out
    assert "-n '__fish_seen_subcommand_from index' -l export" in fish
    assert main(["completion", "zsh"]) == 0
    assert "bashcompinit" in capsys.readouterr().out.splitlines()[0]
