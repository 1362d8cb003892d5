"""The sweeps pass W&B's schema, and the command runs the command lines that W&B's search and agent code make."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from recsys_topk.cli.main import main
from tests import wandb_files
from tests.conftest import TINY_WORLD

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "sweeps").glob("*.yaml"))
METRIC = "val/joint_recall@10@20"
TIME_LIMIT = 600.0  # seconds; a run takes ten on an idle machine

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # W&B's package declares its models in pydantic's old way
    from sweeps.config import schema_violations_from_proposed_config

    import sweeps
    from sweeps import RunState, SweepRun

each_sweep = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(path.read_text())
    return content


def draw(sweep: dict[str, Any]) -> list[dict[str, Any]]:
    """Return all runs of a grid, or a few of any other search, as W&B's server chooses them."""
    runs: list[SweepRun] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while sweep["method"] == "grid" or len(runs) < 6:
            run = sweeps.next_run(sweep, runs, validate=True)
            if run is None:
                break
            runs.append(server_run(f"r{len(runs)}", RunState.finished, [0.1 + 0.01 * len(runs)], run.config))
    return [json.loads(json.dumps(run.config, default=float)) for run in runs]


def server_run(
    name: str, state: RunState, values: Sequence[float], config: Mapping[str, Any] | None = None
) -> SweepRun:
    """Return a run as the server stores it, with the values logged so far."""
    history = [{METRIC: value} for value in values]
    return SweepRun(name=name, state=state, config=dict(config or {}), sampledHistory=history)


def agent_command(sweep: Mapping[str, Any], drawn: Mapping[str, Any]) -> list[str]:
    """Return the command line of one run, made by the agent's code."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    given = create_sweep_command_args({"args": drawn})
    command: list[str] = []
    for part in create_sweep_command(list(sweep["command"])):
        command += given[part[2:-1]] if part.startswith("${") else [part]
    return command


def agent_environment(folder: Path, run_id: str, drawn: Mapping[str, Any], base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that `wandb agent` sets for a run; write its file for `wandb.init`."""
    file = folder / "wandb" / "sweep-s1" / f"config-{run_id}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump({"wandb_version": 1, **{k: {"value": v["value"]} for k, v in drawn.items()}}))
    sweep = {"WANDB_SWEEP_ID": "s1", "WANDB_RUN_ID": run_id, "WANDB_SWEEP_PARAM_PATH": str(file)}
    return {**base, **sweep, "WANDB_DIR": str(folder), "WANDB_PROJECT": "theirs", "WANDB_ENTITY": "them"}


@dataclass
class AgentRuns:
    """A folder in which an agent ran one draw twice: once to the end, once until early termination."""

    folder: Path
    drawn: dict[str, Any]
    statuses: tuple[int, int]
    errors: str

    def records(self, run_id: str) -> list[Any]:
        (file,) = self.folder.glob(f"runs/*/wandb/offline-run-*/run-{run_id}.wandb")
        return wandb_files.records(file)


@pytest.fixture(scope="module")
def agent_runs(
    environment: dict[str, str], warm_python: list[str], tmp_path_factory: pytest.TempPathFactory
) -> AgentRuns:
    folder = tmp_path_factory.mktemp("agent")
    sweep = read(ROOT / "sweeps" / "learning-rates.yaml")
    drawn = next(run for run in draw(sweep) if run["model.embedding_optimizer"]["value"] != "same")
    command = agent_command(sweep, drawn)
    assert command[0] == "recsys-topk"

    def start(run_id: str, epochs: int) -> subprocess.Popen[str]:
        arguments = [*command[1:], *TINY_WORLD, f"--trainer.max_epochs={epochs}", "--trainer.enable_progress_bar=false"]
        return subprocess.Popen(
            [*warm_python, "-m", "recsys_topk", *arguments],
            cwd=folder, env=agent_environment(folder, run_id, drawn, environment),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    first = start("first", 1)
    _, errors = first.communicate(timeout=TIME_LIMIT)
    second = start("second", 100_000)
    try:
        deadline = time.monotonic() + TIME_LIMIT
        while len(list(folder.glob("runs/*/checkpoints/best.ckpt"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        second.send_signal(signal.SIGTERM)  # as the agent does for early termination
        _, more = second.communicate(timeout=TIME_LIMIT)
    finally:
        second.kill()
    return AgentRuns(folder, drawn, (first.returncode, second.returncode), errors + more)


def test_sweep_exists_for_each_question() -> None:
    names = {path.stem for path in FILES}
    assert {"losses", "negatives", "learning-rates"} <= names
    assert {f"tau-{loss}" for loss in ("dftopk", "lapsum", "neuralsort", "softsort", "sparse", "diffsort")} <= names


@each_sweep
def test_sweep_is_valid_and_optimises_what_fit_monitors(path: Path) -> None:
    sweep = read(path)
    assert schema_violations_from_proposed_config(sweep) == []
    assert sweep["name"] == path.stem
    monitored = "val/recall@20/corpus" if path.stem == "recipes" else METRIC
    assert sweep["metric"] == {"name": monitored, "goal": "maximize"}
    assert sweep["command"][:2] == ["recsys-topk", "fit"]
    assert "--logger=wandb" in sweep["command"]
    assert sweep["command"][-1] == "${args}"


@each_sweep
def test_fit_accepts_the_drawn_options(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs in this process: a new process per run would take minutes."""
    from recsys_topk.cli.arguments import parse_options
    from recsys_topk.losses.base import registry
    from recsys_topk.runs.config import resolve

    sweep = read(path)
    drawn = draw(sweep)
    assert len(drawn) == len({str(run) for run in drawn})
    for run in drawn:
        resolve(parse_options(agent_command(sweep, run)[2:]))  # fails for unknown losses and configs
    for run in representative_runs(drawn):
        assert main([*agent_command(sweep, run)[1:], "--print_config"]) == 0
        printed = capsys.readouterr()
        parsed = yaml.safe_load(printed.out)
        for name, given in run.items():
            if name == "loss":
                assert parsed["model"]["loss"]["class_path"].endswith(f".{registry.resolve(given['value']).__name__}")
            elif name == "model.stages":
                pairs = zip(yaml.safe_load(given["value"]), parsed["model"]["stages"], strict=True)
                assert all(wanted.items() <= stage.items() for wanted, stage in pairs)
            else:
                assert (
                    lookup(
                        parsed,
                        name.replace("loss.", "model.loss.init_args.")
                        .replace("objective.", "model.objective.init_args.")
                        .replace("data.", "data.init_args."),
                    )
                    == given["value"]
                ), name


def representative_runs(drawn: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a few runs that together hold every text, and the smallest and largest value of every number."""
    wanted: set[tuple[str, Any]] = set()
    for name in set(drawn[0]) - {"loss"}:
        values = {run[name]["value"] for run in drawn}
        texts = {value for value in values if isinstance(value, str)}
        wanted |= {(name, value) for value in texts or {min(values), max(values)}}
    chosen = []
    for run in drawn:
        new = wanted & {(name, given["value"]) for name, given in run.items()}
        if new:
            chosen.append(run)
            wanted -= new
    return chosen


def lookup(content: Mapping[str, Any], path: str) -> Any:
    found: Any = content
    for key in path.split("."):
        found = found[key]
    return found


def test_early_termination_stops_the_worse_half() -> None:
    """By W&B's rule, with six evaluations per run, the worst runs stop after two and the best run never."""
    stopping = [read(path) for path in FILES if "early_terminate" in read(path)]
    assert {sweep["name"] for sweep in stopping} == {"learning-rates", "tau-diffsort"}
    for sweep in stopping:
        assert sweep["method"] == "bayes", "a curve needs all its points"
        runs = [server_run(f"r{n}", RunState.running, [0.1 * n, 0.1 * n + 0.01]) for n in range(6)]
        stopped = {run.name for run in sweeps.stop_runs(sweep, runs)}
        assert "r0" in stopped
        assert "r5" not in stopped
        assert 2 <= len(stopped) <= 3
        assert not sweeps.stop_runs(sweep, [server_run(f"r{n}", RunState.running, [0.1 * n]) for n in range(6)])


def test_agent_run_logs_the_metric_of_the_sweep(agent_runs: AgentRuns) -> None:
    assert agent_runs.statuses[0] == 0, agent_runs.errors
    found = agent_runs.records("first")
    values = [row[METRIC] for row in wandb_files.history(found) if METRIC in row]
    assert len(values) == 2, "early termination needs two evaluations per epoch"
    assert all(0.0 < value <= 1.0 for value in values)
    assert wandb_files.summary(found)[METRIC] == max(values), "the summary must hold a plain number for the sweep"
    about = next(record.run for record in found if record.HasField("run"))
    assert (about.run_id, about.sweep_id, about.project) == ("first", "s1", "theirs")
    assert about.display_name == "dftopk-tau1-neg25-s42"
    logged = wandb_files.config(found)
    assert logged["model"]["lr"] == logged["model.lr"] == agent_runs.drawn["model.lr"]["value"]


def test_runs_in_one_folder_have_different_names(agent_runs: AgentRuns) -> None:
    folders = {path.name for path in (agent_runs.folder / "runs").iterdir()}
    assert folders == {"dftopk-tau1-neg25-s42", "dftopk-tau1-neg25-s42-2"}
    names = [next(r.run for r in agent_runs.records(n) if r.HasField("run")).display_name for n in ("first", "second")]
    assert set(names) == folders


def test_run_stopped_early_does_not_fail_and_keeps_its_logs(agent_runs: AgentRuns) -> None:
    # The agent counts a status above 0 as a failure, and stops after a few failures.
    assert agent_runs.statuses[1] <= 0, agent_runs.errors
    assert any(METRIC in row for row in wandb_files.history(agent_runs.records("second")))


def test_command_lists_and_prints_sweeps(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["sweep"]) == 0
    listed = capsys.readouterr().out
    for path in FILES:
        assert f"\n{path.stem} " in listed
    assert main(["sweep", "losses"]) == 0
    assert capsys.readouterr().out == (ROOT / "sweeps" / "losses.yaml").read_text()
    further = ["--config", "recflow-2stage", "--data.root", "a b"]
    assert main(["sweep", "negatives", "--out", "mine.yaml", *further]) == 0
    assert "wandb sweep mine.yaml" in capsys.readouterr().out
    mine = read(tmp_path / "mine.yaml")
    assert schema_violations_from_proposed_config(mine) == []
    assert mine["command"] == ["recsys-topk", "fit", "--logger=wandb", *further, "${args}"]
    assert mine["parameters"] == read(ROOT / "sweeps" / "negatives.yaml")["parameters"]


@pytest.mark.parametrize(
    ("further", "metric"),
    [
        (["--model.k=5"], "val/joint_recall@5@20"),
        (["--config", "recflow-3stage"], METRIC),
        (["--model.stages", "[{kind: two_tower, name: r, quota: 50}]"], "val/joint_recall@10@50"),
        (["--model.metrics", "[{metric: ndcg, k: 3}, selection_mass]"], "val/retrieval_ndcg@3"),
        (["--model.monitor", "ranking_recall@10@20"], "val/ranking_recall@10@20"),
    ],
)
def test_metric_of_the_sweep_follows_the_cascade(
    further: list[str], metric: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", "losses", *further]) == 0
    made = yaml.safe_load(capsys.readouterr().out)
    assert schema_violations_from_proposed_config(made) == []
    assert made["metric"] == {"name": metric, "goal": "maximize"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tau-dftpk"], ["unknown sweep 'tau-dftpk'", "did you mean 'tau-dftopk'", "negatives"]),
        (["losses", "--data.rot", "x"], ["--data.rot", "did you mean --data.root?"]),
        (["losses", "--config", "nope"], ["no config file 'nope'", "recflow-2stage"]),
        (["negatives", "--loss", "bce"], ["the sweep sets --loss itself", "parameters"]),
        (["--out", "x.yaml"], ["which sweep?", "losses"]),
        (["losses", "--out", "."], ["--out must be a file", "'.'"]),
    ],
)
def test_mistakes_exit_with_status_2_and_one_line(
    arguments: list[str],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", *arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    for word in words:
        assert word in line
    assert not list(tmp_path.iterdir())


def test_wheel_includes_the_sweeps(tmp_path: Path) -> None:
    from hatchling.builders.wheel import WheelBuilder

    built = next(iter(WheelBuilder(str(ROOT)).build(directory=str(tmp_path / "dist"), versions=["standard"])))
    with zipfile.ZipFile(built) as wheel:
        wheel.extractall(tmp_path / "site")
    done = subprocess.run(
        [sys.executable, "-m", "recsys_topk", "sweep", "losses"], capture_output=True, text=True, check=False,
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
    )  # fmt: skip
    assert done.stdout == (ROOT / "sweeps" / "losses.yaml").read_text(), done.stderr


def test_sweep_is_in_the_given_project(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`--wandb.project` went to the runs only, whose sweep stayed in the project of the file."""
    assert main(["sweep", "losses", "--wandb.project", "mine"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["project"] == "mine"
    monkeypatch.setenv("WANDB_PROJECT", "of the shell")
    assert main(["sweep", "losses"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["project"] == "of the shell"
    assert main(["sweep", "losses", "--wandb.project", "mine"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["project"] == "mine"
