"""The command `recsys-topk experiment` on a tiny data set, and the report of its results."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import TINY_WORLD, Result


def test_interrupted_experiment_resumes_runs_once_and_is_reported(
    in_process: Callable[..., Result], environment: dict[str, str], warm_python: list[str], tmp_path: Path
) -> None:
    command = ["experiment", "main-table", "--only", "dftopk,lapsum", "--seeds", "1", "--out", "p", *TINY_WORLD]
    process = subprocess.Popen(
        [*warm_python, "-m", "recsys_topk", *command], cwd=tmp_path, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    shown = ""
    for line in process.stdout:
        shown += line
        if line.startswith("[1/2]"):
            break
    assert "$ recsys-topk compare --config paper-small --seeds 1 --variant 'dftopk=--loss dftopk'" in shown
    assert " left" in shown
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)  # returns when all child processes have ended too
    assert process.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM)
    folder = tmp_path / "p" / "main-table"
    (trial,) = folder.rglob("dftopk-s0.json")
    kept = trial.read_text()

    resumed = in_process(tmp_path, *command)
    assert resumed.returncode == 0, resumed.stderr
    assert trial.read_text() == kept
    assert "[2/2]" in resumed.stdout
    record = json.loads((folder / "experiment.json").read_text())
    assert record["steps"][0]["seconds"] > 0
    rankers = record["reference"]
    assert rankers["random"]["joint"] < rankers["popularity"]["joint"] < rankers["oracle"]["joint"]
    runs = json.loads((folder / "comparison.json").read_text())["runs"]
    taus = {label: run[0]["config"]["model"]["loss"]["init_args"]["tau"] for label, run in runs.items()}
    assert taus == {"dftopk": 500, "lapsum": 5}

    again = in_process(tmp_path, *command)
    assert again.returncode == 0, again.stderr
    assert "already finished: p/main-table/comparison.json" in again.stdout
    assert "$ recsys-topk" not in again.stdout

    # The report names the missing runs of an experiment.
    (folder / "comparison.json").unlink()
    (folder / "trials" / "lapsum-s0.json").unlink()
    page = in_process(tmp_path, "report", "p", "--out", "page.html")
    assert page.returncode == 0, page.stderr
    assert "missing: 1 of 2 runs are not finished" in page.stdout
    text = (tmp_path / "page.html").read_text()
    assert "The main table" in text
    assert "Missing: 1 of 2 runs" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["main-tabel"], "did you mean 'main-table'"),
        (["tau", "--size", "full"], "give its folder with --data.root"),
        (["tau", "--only", "lapsum"], "no such competitor here; there are dftopk"),
        (["tau", "--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["main-table", "--only", "dftopk", "--config", "no-such", "--seeds", "1"], "no config file 'no-such'"),
    ],
)
def test_mistakes_exit_with_status_2(
    in_process: Callable[..., Result], tmp_path: Path, arguments: list[str], words: str
) -> None:
    done = in_process(tmp_path, "experiment", *arguments)
    assert done.returncode == 2
    assert words in done.stderr


def test_list_names_every_experiment(in_process: Callable[..., Result], tmp_path: Path) -> None:
    done = in_process(tmp_path, "experiment", "list")
    assert done.returncode == 0
    assert {"main-table", "runtime", "tau", "negatives", "streaming"} <= set(done.stdout.split())


def test_benchmark_with_a_model_times_every_loss_and_plain_cross_entropy(
    in_process: Callable[..., Result], tmp_path: Path
) -> None:
    done = in_process(
        tmp_path,
        "bench",
        "losses",
        "--model",
        "--shapes",
        "1x4x2",
        "1x12x6",
        "--seconds",
        "0.01",
        "--names",
        "dftopk",
        "listnet",
        "--json",
        "b.json",
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert [(row["name"], row["shape"]) for row in rows] == [
        ("dftopk", "1x4x2"), ("listnet", "1x4x2"), ("dftopk", "1x12x6"), ("listnet", "1x12x6"),
    ]  # fmt: skip
    assert all(row["ms"] > 0 and row["ratio"] == pytest.approx(row["ms"] / row["baseline ms"]) for row in rows)
    wrong = in_process(tmp_path, "bench", "losses", "--model", "--names", "dftpk")
    assert wrong.returncode == 2
    assert "did you mean 'dftopk'" in wrong.stderr
