"""All commands report errors alike: one line on standard error, and an exit status."""

from __future__ import annotations

import shlex
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from recsys_topk.cli.main import COMMANDS, main
from recsys_topk.runs.lost_process import LostProcessError
from recsys_topk.runs.trials import TrialsFailedError
from tests.conftest import TINY_WORLD, Result

Command = Callable[..., Result]


@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_option_exits_with_status_2_and_one_line(command: str, in_process: Command, tmp_path: Path) -> None:
    done = in_process(tmp_path, command, "--no-such-option", "x")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"recsys-topk {command}: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fit", "--lr=0.1"], "did you mean --model.lr?"),
        (["fit", "--epochs=3"], "did you mean --trainer.max_epochs?"),
        (["fit", "--epoch=3"], "did you mean --trainer.max_epochs?"),
        (["fit", "--batch_size=3"], "did you mean --data.batch_size?"),
        (["fit", "--k=3"], "did you mean --model.k?"),
        (["fit", "--seed=3"], "did you mean --seed_everything?"),
        (["fit", "--device=gpu"], "did you mean --trainer.accelerator?"),
        (["fit", "--config=wrong.yaml"], "fit has no option --model.lrr (in wrong.yaml); did you mean --model.lr?"),
        (["fit", "--data.negative_source=random"], "'popularity', 'shared', 'catalogue' or dict, got random"),
        (["fit", "--data.root=nowhere"], "--data.root 'nowhere' does not exist"),
        (
            ["fit", "--config=recflow-2stage", "--data.root=clicks.csv"],
            "clicks.csv is a table and no RecFlow folder; add",
        ),
        (["schema", "cut.yaml"], "cut.yaml: no table with columns was found"),
        (["schema", "other.csv", "--out=x.yaml"], "no column of users or items was recognised among a, b; name them"),
        (["fit", "--config=clicks.csv"], "clicks.csv is a table and no config; give it as --data.root clicks.csv"),
        (["compare", "--losses=dftopk", "--no_such=3"], "fit has no option --no_such"),
        (["compare", "--losses=dftopk,listnet", "--variant=x=--model.lrr 3"], "did you mean --model.lr?"),
        (["bench"], "the following arguments are required: SUITE; see recsys-topk bench --help"),
        (["bench", "step", "--nope"], "unrecognized arguments: --nope"),
        (["fit", "--loss=torch.nn.BCEWithLogitsLoss"], "is not a subclass of recsys_topk.losses.base.RankingLoss"),
        (["fit", "--config=cut.yaml"], "cut.yaml is not valid YAML: while parsing a flow mapping at line 2"),
        (["fit", "--trainer.accelerator=gpu"], "needs a GPU, but no GPU is visible"),
        (["fit", "--trainer.accelerator=cp"], "invalid accelerator name"),
    ],
)
def test_mistakes_exit_before_any_file_is_written(
    arguments: list[str], words: str, in_process: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No world is simulated."""
    files = {"cut.yaml": "data:\n  world: {users: 20", "wrong.yaml": "model:\n  lrr: 1\n", "clicks.csv": "user,item\n"}
    files["other.csv"] = "a,b\n1,2\n"
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    def no_world(*_: object, **__: object) -> None:
        raise AssertionError("a world would be simulated")

    monkeypatch.setattr("recsys_topk.datamodules.recflow.datamodule.embedded_root", no_world, raising=True)
    done = in_process(tmp_path, *arguments)
    assert done.returncode == 2, done.stdout
    (line,) = done.stderr.splitlines()
    assert words in line
    assert {path.name for path in tmp_path.iterdir()} == set(files)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (TrialsFailedError("2 runs failed"), 1),
        (LostProcessError("process 1 was killed"), 1),
        (ValueError("wrong"), 2),
        (FileNotFoundError("no such file"), 2),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_status_distinguishes_failures_from_wrong_usage(
    error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(argv: list[str]) -> None:
        raise error

    module = types.SimpleNamespace(main=fail)
    monkeypatch.setattr("recsys_topk.cli.main.importlib.import_module", lambda name: module)
    assert main(["doctor"]) == status
    assert capsys.readouterr().err.startswith("recsys-topk doctor: ")
    if status == 2:
        monkeypatch.setenv("RECSYS_TOPK_DEBUG", "1")
        with pytest.raises(type(error)):
            main(["doctor"])


def test_first_line_is_written_before_torch_is_imported() -> None:
    code = (
        "import sys, recsys_topk.cli.training as training\n"
        "training.announce_start = lambda command: sys.exit(command if 'torch' not in sys.modules else 'too late')\n"
        "training.main(['fit', '--loss', 'dftopk', '--trainer.max_epochs=1'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "fit"


def test_help_names_the_exit_statuses_and_the_debug_variable(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "exit status: 0 done, 1 failed, 2 wrong input" in shown
    assert "RECSYS_TOPK_DEBUG=1" in shown


def test_table_of_commands_fits_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["--help"]) == 0
    rows = capsys.readouterr().out.partition("commands:\n")[2].partition("\nexamples:")[0].splitlines()
    assert max(map(len, rows)) <= 60
    assert "              candidate as Parquet" in rows


def test_commands_printed_by_fit_run(in_process: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = in_process(tmp_path, "fit", *TINY_WORLD, "--name", "a b", "--trainer.enable_progress_bar=false")
    assert done.returncode == 0, done.stderr
    first = done.stdout.splitlines()[0]
    assert first.endswith("fit: loading torch, a few seconds")
    lines = done.stdout.partition("\nnext:\n")[2].splitlines()
    commands = [shlex.split(line) for line in lines]
    assert [command[:2] for command in commands] == [["recsys-topk", name] for name in ("test", "compare", "export")]
    test, compare, export = (command[1:] for command in commands)
    done = in_process(tmp_path, *test)
    assert done.returncode == 0, done.stderr
    assert compare[-2:] == ["--out", "runs/compare-a b"]  # not where another comparison may be
    done = in_process(tmp_path, *compare, "--seeds=0")  # the other options are accepted
    assert done.stderr == "recsys-topk compare: --seeds must be at least 1, got 0\n"

    def exported(checkpoint: str, out: str, **_: object) -> None:
        raise ValueError(f"{(tmp_path / checkpoint).is_file()} {(tmp_path / out).exists()} {out}")

    monkeypatch.setattr("recsys_topk.runs.deploy.export_checkpoint", exported)
    assert in_process(tmp_path, *export).stderr == "recsys-topk export: True False runs/a b/export\n"
