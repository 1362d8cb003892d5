"""W&B without an account: what an offline run holds, read back from its file; names of runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from recsys_topk.cascades.module import CascadeModule
from recsys_topk.cli.main import main
from recsys_topk.datamodules import RecFlowDataModule
from recsys_topk.losses import get
from recsys_topk.runs import TrainingRun
from recsys_topk.runs.directory import RunDirectory, run_name
from recsys_topk.runs.wandb_logging import make_wandb
from tests import wandb_files
from tests.cascades.test_module import SCHEMA, STAGES
from tests.conftest import TINY_WORLD, Result

Command = Callable[..., Result]
JOINT = "val/joint_recall@10@20"
ENVIRONMENT = ["environment", "file", "environment"]


@pytest.mark.parametrize(
    ("loss", "options", "objective", "negatives", "seed", "name"),
    [
        ("dftopk", {}, None, 25, 42, "dftopk-tau1-neg25-s42"),
        ("dftopk", {"tau": 500.0}, None, 0, 7, "dftopk-tau500-neg0-s7"),
        ("lapsum", {"tau": 0.05}, "independent", 5, 42, "lapsum-tau0.05-independent-neg5-s42"),
        ("listnet", {}, None, 0, 42, "listnet-neg0-s42"),
        ("listnet", {}, "icc", 0, 42, "icc-neg0-s42"),
        ("bce", {}, "fs_ranknet", 10, None, "fs_ranknet-neg10-unseeded"),
    ],
)
def test_names_tell_runs_apart(
    loss: str, options: dict[str, Any], objective: str | None, negatives: int, seed: int | None, name: str
) -> None:
    model = CascadeModule(SCHEMA, STAGES, get(loss, **options), objective, k=3)
    assert run_name(model, RecFlowDataModule(train_negatives=negatives), seed) == name


def test_a_resumed_run_keeps_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = RunDirectory(tmp_path, "x")
    first = make_wandb(run)
    run.record(wandb_id=first.version)
    assert make_wandb(RunDirectory.open(run.path)).version == first.version
    assert make_wandb(RunDirectory(tmp_path, "x")).version != first.version


def test_a_run_is_offline_whatever_the_process_did_before(tmp_path: Path) -> None:
    """W&B reads its environment when it is first used; later runs asked for a key."""
    code = (
        "import os, sys, wandb; wandb.setup(); os.environ['WANDB_MODE'] = 'offline'\n"
        "from pathlib import Path\n"
        "from recsys_topk.runs.directory import RunDirectory\n"
        "from recsys_topk.runs.wandb_logging import make_wandb\n"
        "make_wandb(RunDirectory(Path('runs'), 'x')).experiment.finish()\n"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    environment = {**kept, "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("runs/x/wandb/offline-run-*"))


def test_typed_options_of_wandb_win_over_the_environment_and_that_over_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").write_text("wandb: {project: file, entity: file, notes: file}\nname: file\n")
    for name in ("PROJECT", "ENTITY", "NAME", "TAGS"):
        monkeypatch.setenv(f"WANDB_{name}", "environment")
    monkeypatch.setenv("WANDB_MODE", "dryrun")
    given: dict[str, Any] = {"config": str(tmp_path / "mine.yaml"), "wandb": {"project": "typed"}}
    found = TrainingRun(given).options()["wandb"]
    assert [found[name] for name in ("project", "entity", "notes", "name")] == ["typed", *ENVIRONMENT]
    assert found["mode"] == "offline"
    assert TrainingRun({**given, "name": "typed"}).options()["wandb"]["name"] is None  # the name of the directory
    logger = make_wandb(RunDirectory(tmp_path, "x"), {**found, "mode": "offline", "tags": "a, b"})
    expected = {"project": "typed", "entity": "environment", "notes": "file", "name": "environment", "tags": ["a", "b"]}
    assert expected.items() <= logger._wandb_init.items()
    assert make_wandb(RunDirectory(tmp_path, "y"))._wandb_init["project"] == "recsys-topk"


def test_wandb_that_is_disabled_writes_nothing(
    in_process: Command, tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    done = in_process(tmp_path, "fit", "--logger=wandb", "--trainer.limit_train_batches=1", "--name=x", *TINY_WORLD)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("wandb"))
    assert (tmp_path / "runs" / "x" / "metrics.csv").is_file()


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Path:
    """A folder with a finished run that logged to W&B."""
    folder = tmp_path_factory.mktemp("wandb")
    arguments = [
        "fit",
        "--logger=wandb",
        "--log_checkpoints=true",
        "--loss.tau=3",
        "--trainer.max_epochs=2",
        *TINY_WORLD,
    ]
    done = subprocess.run(
        [sys.executable, "-m", "recsys_topk", *arguments],
        capture_output=True, text=True, check=False, cwd=folder, env=environment, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "wandb sync" in done.stdout
    return folder / "runs" / "dftopk-tau3-neg0-s42"


def read(run: Path) -> list[Any]:
    (file,) = (run / "wandb").glob("offline-run-*/*.wandb")
    return wandb_files.records(file)


def test_config_history_and_axes(logged: Path) -> None:
    found = read(logged)
    assert [r.run.display_name for r in found if r.HasField("run")] == ["dftopk-tau3-neg0-s42"]
    assert len([r for r in found if r.HasField("config")]) == 1
    config = wandb_files.config(found)
    assert config["model"]["loss"]["init_args"]["tau"] == 3.0
    assert config["data"]["init_args"]["eval_negatives"] == 40
    assert config["trainer"]["max_epochs"] == 2
    rows = wandb_files.history(found)
    steps = [row["trainer/global_step"] for row in rows if "train/loss_joint" in row]
    assert steps == list(range(8))
    assert all(row["train/requests_per_second"] > 0 for row in rows if "train/loss" in row)
    defined = wandb_files.metric_definitions(found)
    assert defined["train/*"].step_metric == defined["val/*"].step_metric == "trainer/global_step"
    assert defined["val/*"].summary.max


def test_summary_holds_the_largest_and_the_final_recall(logged: Path) -> None:
    found = read(logged)
    values = [row[JOINT] for row in wandb_files.history(found) if JOINT in row]
    assert len(values) == 2
    assert wandb_files.summary(found)[JOINT] == {"max": max(values), "last": values[-1]}


def test_the_artifact_holds_weights_and_nothing_to_run(logged: Path, environment: dict[str, str]) -> None:
    (model,) = [artifact for artifact in wandb_files.artifacts(read(logged)) if artifact.type == "model"]
    assert model.name == "dftopk-tau3-neg0-s42"
    assert {"best", "last"} <= set(model.aliases)
    files = {entry.path: Path(entry.local_path) for entry in model.manifest.contents}
    assert set(files) == {"best.ckpt", "last.ckpt"}
    for name, path in files.items():
        content = torch.load(path, weights_only=True)
        whole = torch.load(logged / "checkpoints" / name, weights_only=True)
        assert not {"optimizer_states", "callbacks", "loops"} & set(content)
        assert content["hyper_parameters"] == whole["hyper_parameters"]
        assert all(torch.equal(content["state_dict"][key], whole["state_dict"][key]) for key in whole["state_dict"])


def test_test_logs_its_metrics_as_a_table(
    logged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    """From the weights of the artifact: they are all that `test` needs."""
    import wandb

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("RECSYS_TOPK_CACHE", "HOME"):
        monkeypatch.setenv(name, environment[name])
    (model,) = [artifact for artifact in wandb_files.artifacts(read(logged)) if artifact.type == "model"]
    weights = next(entry.local_path for entry in model.manifest.contents if entry.path == "best.ckpt")
    try:
        assert main(["test", "--ckpt_path", weights, "--logger", "wandb", "--name", "t"]) == 0
    finally:
        wandb.teardown()  # when it returns, the file is whole
    run = tmp_path / "runs" / "test-t"
    (file,) = (run / "wandb").glob("offline-run-*/files/media/table/tables/test_*.table.json")
    table = json.loads(file.read_text())
    assert table["columns"] == ["metric", "value"]
    logged_values = wandb_files.history(read(run))[0]
    assert dict(table["data"]) == {name: value for name, value in logged_values.items() if name.startswith("test/")}
    assert "test/joint_recall@10@20/80" in dict(table["data"])
