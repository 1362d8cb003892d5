"""A run that is killed, interrupted and resumed ends like an uninterrupted run."""

from __future__ import annotations

import csv
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from filelock import FileLock

from recsys_topk.cli.main import main
from tests.conftest import TINY_WORLD, Result

Command = Callable[..., Result]

# 48 steps per epoch, random negatives, shuffled days.
OPTIONS = [*TINY_WORLD, "--data.batch_size=5", "--data.train_negatives=5", "--trainer.max_epochs=2"]


def metric_rows(run: Path) -> list[dict[str, str]]:
    """Return the rows of metrics.csv without timings."""
    with (run / "metrics.csv").open() as file:
        return [{k: v for k, v in row.items() if k != "train/requests_per_second"} for row in csv.DictReader(file)]


def assert_same_run(one: Path, two: Path) -> None:
    assert metric_rows(one) == metric_rows(two)
    for name in ("last.ckpt", "best.ckpt"):
        a, b = (torch.load(run / "checkpoints" / name, weights_only=True) for run in (one, two))
        assert a["global_step"] == b["global_step"]
        assert a["state_dict"].keys() == b["state_dict"].keys()
        assert all(torch.equal(a["state_dict"][key], b["state_dict"][key]) for key in a["state_dict"])


class Running:
    """The command in the background, in a new process group, as a terminal starts it."""

    def __init__(self, python: list[str], arguments: list[str], folder: Path, environment: dict[str, str]) -> None:
        self.output = folder / "output.txt"
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                [*python, "-m", "recsys_topk", *arguments],
                stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=folder, env=environment,
                start_new_session=True,
            )  # fmt: skip

    def signal_at(self, step: int, metrics: Path, number: signal.Signals) -> int:
        """Send a signal once a step has been logged; return the exit status."""
        end = time.monotonic() + 200
        while time.monotonic() < end and self.process.poll() is None:
            logged = metrics.read_text().splitlines() if metrics.is_file() else []
            if any(line.split(",")[1:2] == [str(step)] for line in logged):
                os.killpg(self.process.pid, number)
                return self.process.wait(100)
            time.sleep(0.01)
        self.process.kill()
        raise AssertionError(f"ended before step {step}: {self.output.read_text()}")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str], warm_python: list[str]) -> Path:
    """An uninterrupted run in a terminal; terminal.txt holds its output."""
    folder = tmp_path_factory.mktemp("whole")
    ours, theirs = pty.openpty()
    command = [*warm_python, "-m", "recsys_topk", "fit", *OPTIONS]
    process = subprocess.Popen(
        command, cwd=folder, env={**environment, "COLUMNS": "200", "TERM": "xterm"},
        stdout=theirs, stderr=theirs, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(theirs)
    seen = b""
    try:
        while part := os.read(ours, 65536):
            seen += part
    except OSError:  # the terminal's other end is closed
        pass
    (folder / "terminal.txt").write_bytes(seen)
    assert process.wait(100) == 0, seen.decode()
    return folder


def test_killed_interrupted_and_resumed_run_gives_identical_weights(
    whole: Path, tmp_path: Path, environment: dict[str, str], warm_python: list[str], recsys_topk: Command
) -> None:
    run = tmp_path / "runs" / "dftopk-tau1-neg5-s42"
    arguments = ["fit", *OPTIONS, "--save_every_n_steps=5"]
    first = Running([sys.executable], arguments, tmp_path, environment)
    assert first.signal_at(21, run / "metrics.csv", signal.SIGKILL) == -9
    assert torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] >= 20

    resumed = Running(warm_python, [*arguments, "--resume", "last"], tmp_path, environment)
    assert resumed.signal_at(60, run / "metrics.csv", signal.SIGINT) == 130
    output = resumed.output.read_text()
    assert re.search(r"state +\d+ steps, 0 whole epochs, \d+ batches into epoch 1", output)
    assert "DFTopKLoss(tau=1.0" in output
    assert re.search(r"val/joint_recall@10@20 +0\.\d+", output)
    assert "Traceback" not in output
    at = int(re.findall(r"stopped after step (\d+); .*last.ckpt holds step \1\.", output)[0])
    assert 60 < at < 96
    assert torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == at

    (command,) = re.findall(r"recsys-topk (fit --resume \S+)", output)
    done = recsys_topk(*shlex.split(command))
    assert done.returncode == 0, done.stderr
    assert f"after step {at}" in done.stdout
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [run.name]
    assert_same_run(run, whole / "runs" / run.name)


def test_terminal_shows_progress_recall_table_sizes_and_files(whole: Path) -> None:
    seen = (whole / "terminal.txt").read_text()
    assert re.search(r"epoch 1/2 [━╸ ]+ \d+/48  loss \d\.\d{3}  train recall \(45\) 0\.\d{3}", seen), seen
    assert re.search(r"epoch 2/2 [━╸ ]+ \d+/48  loss \d\.\d{3}  val recall \(80\) 0\.\d{3}", seen), seen
    assert "epoch 0" not in seen.lower()
    assert re.search(r"retrieval +video_id +302 +8 +9\.4 KB", seen)
    assert "100,804 parameters" in seen
    assert re.search(r"joint_recall@10@20 +0\.\d{4}", seen)
    for name in ("checkpoints/best.ckpt", "checkpoints/last.ckpt", "config.yaml", "metrics.csv"):
        assert f"runs/dftopk-tau1-neg5-s42/{name}" in seen


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> Path:
    """An empty folder to work in, within this process."""
    monkeypatch.chdir(tmp_path)
    for name in ("RECSYS_TOPK_CACHE", "HOME"):
        monkeypatch.setenv(name, environment[name])
    return tmp_path


@pytest.fixture
def finished(whole: Path, here: Path) -> Path:
    """A copy of the finished run, in runs/."""
    name = "dftopk-tau1-neg5-s42"
    shutil.copytree(whole / "runs" / name, here / "runs" / name)
    return Path("runs") / name


def test_resume_of_a_finished_run_reports_that_it_has_finished(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", "--resume", str(finished)]) == 0
    assert "has finished (2 epochs, 96 steps)" in capsys.readouterr().out
    assert main(["fit", "--resume", finished.name, "--trainer.max_epochs=2"]) == 2
    assert "has trained 2 epochs, and --trainer.max_epochs is 2" in capsys.readouterr().err


def test_finished_run_resumed_with_more_epochs_equals_a_longer_run(here: Path) -> None:
    """With a random operator, fused tables, an unfinished warm-up and a moved directory."""
    options = [*TINY_WORLD, "--loss=perturbed", "--model.embedding_optimizer=rowwise_adagrad", "--model.warmup_steps=8"]
    assert main(["fit", *options, "--name=long", "--trainer.max_epochs=2"]) == 0
    assert main(["fit", *options, "--name=short", "--trainer.max_epochs=1"]) == 0
    (here / "runs" / "short").rename(here / "moved")
    assert main(["fit", "--resume", "moved", "--trainer.max_epochs=2"]) == 0
    assert_same_run(here / "moved", here / "runs" / "long")
    saved = yaml.safe_load((here / "moved" / "config.yaml").read_text())
    assert saved["trainer"]["max_epochs"] == 2
    assert saved["ckpt_path"] is None


def test_second_process_cannot_train_the_same_run(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FileLock(finished / ".lock"):
        assert main(["fit", "--resume", str(finished), "--trainer.max_epochs=4"]) == 2
    assert "is being trained by another process" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--resume", "last", "--out", "nowhere"], ["no folder 'nowhere'", "--out"]),
        (["--resume", "last"], ["no unfinished run in 'runs'", "dftopk-tau1-neg5-s42, has finished"]),
        (["--resume", "last", "--name", "other"], ["no run named 'other' in 'runs'"]),
        (["--resume", "runs/other"], ["'runs/other'", "no such directory or checkpoint", "--resume last"]),
        (["--resume"], ["--resume needs a value"]),
        (["--resume", "RUN", "--ckpt_path", "x.ckpt"], ["leave --ckpt_path out"]),
        (["--resume", "RUN", "--loss", "listnet"], ["DFTopKLoss", "ListNetLoss", "without --resume"]),
        (["--resume", "RUN", "--data.batch_size", "7"], ["data.batch_size is 5 there, and 7 was given"]),
        (["--resume", "RUN", "--model.lr=0.5", "--seed_everything=1"], ["is 42 there, and 1 was given (and 1 more)"]),
        (["--resume", "RUN", "--trainer.max_steps", "200"], ["between two epochs", "--trainer.max_steps=-1"]),
        (["--resum", "last"], ["--resum", "did you mean --resume?"]),
        (["--out", "a_file", *TINY_WORLD], ["--out 'a_file' is a file", "folder"]),
        (["--log_checkpoints", "true", *TINY_WORLD], ["--logger wandb"]),
        (["--save_every_n_steps", "0", *TINY_WORLD], ["--save_every_n_steps must be at least 1, got 0"]),
    ],
)
def test_mistakes_exit_with_status_2_and_one_line(
    arguments: list[str], words: list[str], finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a_file").write_text("")
    before = (finished / "metrics.csv").read_text()
    typed = [str(finished) if argument == "RUN" else argument for argument in arguments]
    longer = ["--trainer.max_epochs=5"] if "RUN" in arguments else []
    try:
        status = main(["fit", *typed, *longer])
    except SystemExit as stop:  # raised by the parser
        status = int(stop.code or 0)
    assert status == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    for word in words:
        assert word in line
    assert (finished / "metrics.csv").read_text() == before


def test_run_without_a_checkpoint_cannot_be_resumed(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (finished / "checkpoints" / "last.ckpt").unlink()
    (finished / "run.json").write_text('{"status": "running"}')
    assert main(["fit", "--resume", "last"]) == 2
    assert "stopped before its first checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["half", "empty", "text", "weights", "stranger"])
def test_error_for_unreadable_checkpoint_names_it(
    content: str, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = finished / "checkpoints" / "last.ckpt"
    whole = path.read_bytes()
    plain = torch.load(path, weights_only=True)
    if content == "weights":
        torch.save({key: plain[key] for key in plain if key != "optimizer_states"}, path)
    elif content == "stranger":
        torch.save({"state_dict": {}}, path)
    else:
        path.write_bytes({"half": whole[: len(whole) // 2], "empty": b"", "text": b"no checkpoint at all"}[content])
    assert main(["fit", "--resume", str(finished), "--trainer.max_epochs=4"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path) in line
    expected = {"weights": "holds weights only", "stranger": "describes no cascade"}
    assert expected.get(content, "it is damaged, or no checkpoint") in line


@pytest.mark.parametrize("command", ["test", "fit"])
def test_checkpoint_of_other_data_exits_with_status_2(
    command: str, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = str(finished / "checkpoints" / "best.ckpt")
    options = [*TINY_WORLD, "--data.world.users=41"]
    assert main([command, "--ckpt_path", checkpoint, *options]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "its table user_id has 42 rows, and the data's 43 rows" in line
    assert "--data.root" in line
