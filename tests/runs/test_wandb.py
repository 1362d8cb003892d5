"""W&B without an account: the content of an offline run, read from its file; names of runs."""

from __future__ import annotations

import json
import os
import subprocess
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recsys_topk.cascades.module import CascadeModule
from recsys_topk.cli.main import main
from recsys_topk.datamodules import InteractionsDataModule, RecFlowDataModule
from recsys_topk.experiments.definition import load
from recsys_topk.experiments.runner import ExperimentRun
from recsys_topk.losses import get
from recsys_topk.runs import TrainingRun
from recsys_topk.runs.directory import RunDirectory, run_name
from recsys_topk.runs.trials import Competition
from recsys_topk.runs.wandb.lineage import data_artifact, linked_run, run_facts, use_data, use_weights
from recsys_topk.runs.wandb.logger import describe_run, make_wandb
from tests import wandb_files
from tests.cascades.test_module import SCHEMA, STAGES
from tests.conftest import TINY_WORLD, Result

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # W&B's package declares its models in pydantic's old way
    from sweeps import SweepRun

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
def test_run_name_contains_loss_objective_negatives_and_seed(
    loss: str, options: dict[str, Any], objective: str | None, negatives: int, seed: int | None, name: str
) -> None:
    model = CascadeModule(SCHEMA, STAGES, get(loss, **options), objective, k=3)
    assert run_name(model, RecFlowDataModule(train_negatives=negatives), seed) == name


def test_resumed_run_keeps_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = RunDirectory(tmp_path, "x")
    first = make_wandb(run)
    run.record(wandb_id=first.version)
    assert make_wandb(RunDirectory.open(run.path)).version == first.version
    assert make_wandb(RunDirectory(tmp_path, "x")).version != first.version


def test_run_is_offline_even_if_wandb_was_set_up_before(tmp_path: Path, warm_python: list[str]) -> None:
    """Regression: W&B reads its environment at first use, and later runs asked for an API key."""
    code = (
        "import os, sys, wandb; wandb.setup(); os.environ['WANDB_MODE'] = 'offline'\n"
        "from pathlib import Path\n"
        "from recsys_topk.runs.directory import RunDirectory\n"
        "from recsys_topk.runs.wandb.logger import make_wandb\n"
        "make_wandb(RunDirectory(Path('runs'), 'x')).experiment.finish()\n"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    environment = {**kept, "HOME": str(tmp_path)}
    done = subprocess.run(
        [*warm_python, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("runs/x/wandb/offline-run-*"))


def test_typed_wandb_options_override_the_environment_which_overrides_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").write_text("wandb: {project: file, notes: file}\nname: file\n")
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


def test_runs_of_a_comparison_are_one_group_unless_a_group_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").write_text("wandb: {project: file, group: file}\n")

    def options(job: str = "train", **common: Any) -> dict[str, Any]:
        (trial,) = Competition({"bce": {"loss": "bce"}}, common, 1, tmp_path / "taus").trials("trials", job)
        assert "wandb" not in trial.identity()["given"], "the numbers do not depend on it"
        given: dict[str, Any] = TrainingRun({"config": [trial.config], "wandb": trial.place["wandb"]}).options()[
            "wandb"
        ]
        return {name: value for name, value in given.items() if value is not None}

    assert options("stream") == {"group": "taus", "job_type": "stream"}
    file = str(tmp_path / "mine.yaml")
    assert options(config=file) == {"group": "file", "job_type": "train", "project": "file"}
    monkeypatch.setenv("WANDB_RUN_GROUP", "environment")
    monkeypatch.setenv("WANDB_NAME", "environment")  # a name is for one run
    assert options(config=file)["group"] == "environment"
    assert options(config=file, wandb={"group": "typed"})["group"] == "typed"
    assert "name" not in options(config=file)


def test_experiment_uses_the_given_logger(tmp_path: Path) -> None:
    experiment = load("tau")
    for further, logger in (({}, "csv"), ({"logger": "wandb", "wandb": {"project": "p"}}, "wandb")):
        steps = experiment.steps("small", 1, [])
        run = ExperimentRun(experiment, "small", steps, tmp_path / experiment.name, 1, further, lambda *_: ("", ""))
        competition = run._competition(steps[0])
        assert competition.logger == logger
        trial = competition.trials("trials")[0]
        assert trial.place["wandb"]["group"] == "tau"
        assert trial.place["logger"] == logger
        assert trial.place["wandb"].get("project") == ("p" if further else None)


def test_disabled_wandb_writes_nothing(
    in_process: Command, tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    done = in_process(tmp_path, "fit", "--logger=wandb", "--trainer.limit_train_batches=1", "--name=x", *TINY_WORLD)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("wandb"))
    assert (tmp_path / "runs" / "x" / "metrics.csv").is_file()


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str], warm_python: list[str]) -> Path:
    """A folder with a finished run that logged to W&B."""
    folder = tmp_path_factory.mktemp("wandb")
    arguments = [
        "fit",
        "--logger=wandb",
        "--log_checkpoints=true",
        "--wandb.group=mine",
        "--loss.tau=3",
        "--trainer.max_epochs=2",
        *TINY_WORLD,
    ]
    done = subprocess.run(
        [*warm_python, "-m", "recsys_topk", *arguments],
        capture_output=True, text=True, check=False, cwd=folder, env=environment, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "wandb sync" in done.stdout
    return folder / "runs" / "dftopk-tau3-neg0-s42"


def read(run: Path) -> list[Any]:
    (file,) = (run / "wandb").glob("offline-run-*/*.wandb")
    return wandb_files.records(file)


def test_run_logs_config_history_and_axes(logged: Path) -> None:
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
    assert defined[JOINT].step_metric == "trainer/global_step"
    assert not defined[JOINT].summary.max, "W&B would write {'max': value}, and a sweep finds no number there"


def test_summary_holds_the_best_recall_as_a_number_for_sweeps(logged: Path) -> None:
    found = read(logged)
    values = [row[JOINT] for row in wandb_files.history(found) if JOINT in row]
    assert len(values) == 2
    summary = wandb_files.summary(found)
    assert summary[JOINT] == max(values)
    assert SweepRun(name="r", summaryMetrics=summary).metric_extremum(JOINT, "maximum") == max(values)
    recalls = {name for name in summary if name.startswith("val/")}
    assert recalls == {name for row in wandb_files.history(found) for name in row if name.startswith("val/")}


def test_summary_of_a_resumed_run_covers_all_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    run = RunDirectory(tmp_path, "x")
    (run.path / "metrics.csv").write_text("step,val/a,val/b\n3,0.5,\n7,0.4,0.1\n")
    logger = make_wandb(run)
    expected = {"val/a": 0.5, "val/b": 0.2, "val/c": None, "train/loss": 0.5}
    try:
        describe_run(logger, {}, ["val/a", "val/b", "val/c"])
        logger.log_metrics({"val/a": 0.45, "val/b": 0.2, "train/loss": 1.0}, 9)
        logger.log_metrics({"val/b": 0.15, "train/loss": 0.5}, 12)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:  # the summary comes from another process
            answer = {name: logger.experiment.summary.get(name) for name in expected}
            if answer == expected:
                break
            time.sleep(0.1)
    finally:
        logger.experiment.finish()
        wandb.teardown()  # completes the file
    assert answer == expected
    summary = wandb_files.summary(read(run.path))
    assert {name: summary.get(name) for name in expected} == expected


def test_best_and_last_are_artifact_versions_with_weights_only(logged: Path) -> None:
    models = [artifact for artifact in wandb_files.artifacts(read(logged)) if artifact.type == "model"]
    facts = json.loads((logged / "run.json").read_text())
    assert {model.name for model in models} == {f"model-{facts['wandb_id']}"} == {facts["wandb_artifact"]}
    assert [set(model.aliases) for model in models] == [{"best", "latest"}, {"last", "latest"}]
    for model, label in zip(models, ("best", "last"), strict=True):
        (entry,) = model.manifest.contents
        assert entry.path == f"{label}.ckpt"
        content = torch.load(entry.local_path, weights_only=True)
        whole = torch.load(logged / "checkpoints" / entry.path, weights_only=True)
        assert not {"optimizer_states", "callbacks", "loops"} & set(content)
        assert content["hyper_parameters"] == whole["hyper_parameters"]
        assert all(torch.equal(content["state_dict"][key], whole["state_dict"][key]) for key in whole["state_dict"])


def test_data_are_an_input_artifact_by_reference(logged: Path, environment: dict[str, str]) -> None:
    (data,) = [artifact for artifact in wandb_files.artifacts(read(logged)) if artifact.type == "dataset"]
    assert data.use_after_commit, "an input of the run, not an output"
    description, *files = sorted(data.manifest.contents, key=lambda entry: bool(entry.ref))
    description_content = json.loads(Path(description.local_path).read_text())
    assert description_content["options"]["world"]["users"] == 40
    assert "batch_size" not in description_content["options"]
    days = sorted({day for split in description_content["splits"].values() for day in split})
    assert len(files) == 4 * len(days) == 16  # two tables, the facts and the checksums
    for entry in files:
        assert not entry.local_path, "nothing is uploaded"
        path = Path(entry.ref.removeprefix("file://"))
        assert path.is_file()
        assert path.is_relative_to(environment["RECSYS_TOPK_CACHE"])
        assert entry.size == path.stat().st_size


def test_data_have_one_version_per_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user,item,time\n" + "".join(f"{n % 9},{n % 7},{n}\n" for n in range(90)))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "wandb-cache"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "wandb-data"))

    def version(**options: Any) -> tuple[str, str]:
        data = InteractionsDataModule(str(tmp_path / "log.csv"), cache_dir=str(tmp_path), repeats=True, **options)
        data.prepare_data()
        artifact = data_artifact(data)
        return artifact.name, artifact.digest

    first = version()
    assert first[0] == "interactions-log.csv"
    assert version(batch_size=7, seed=1) == first
    assert version(history_length=3) != first
    (tmp_path / "log.csv").write_text("user,item,time\n" + "".join(f"{n % 9},{n % 8},{n}\n" for n in range(90)))
    changed = version()
    assert changed[0] == first[0]
    assert changed[1] != first[1]


def test_data_that_cannot_be_linked_only_warn(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    monkeypatch.setenv("RECSYS_TOPK_CACHE", environment["RECSYS_TOPK_CACHE"])

    class Unprepared(RecFlowDataModule):
        @property
        def prepared_folders(self) -> dict[str, Path]:
            raise OSError("the disk is read-only")

    use_data(
        SimpleNamespace(_log_artifact=None), Unprepared(world={"users": 40, "items": 300, "days": 4, "requests": 120})
    )
    assert "read-only" in caplog.text


def test_test_run_is_linked_to_the_training_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    trained = RunDirectory(tmp_path, "trained")
    theirs = {"project": "p", "entity": "e", "group": "g", "tags": "a"}
    trained.record(**run_facts(make_wandb(trained, theirs)))
    number = trained.facts["wandb_id"]
    checkpoint = trained.path / "checkpoints" / "best.ckpt"
    expected = {"id": number, "project": "p", "entity": "e", "group": "g", "name": "trained"}
    expected |= {"path": f"e/p/{number}", "checkpoint": "best.ckpt"}
    assert linked_run(checkpoint) == expected
    logger = make_wandb(RunDirectory(tmp_path, "t"), {"group": "typed"}, "test", checkpoint)
    assert logger.version != number
    made = {"project": "p", "entity": "e", "group": "typed", "job_type": "test", "name": "t"}
    assert made.items() <= logger._wandb_init.items()
    assert logger.linked == expected
    assert make_wandb(RunDirectory(tmp_path, "f"))._wandb_init["job_type"] == "train"


def test_weights_are_an_input_artifact_of_an_online_test_run(caplog: pytest.LogCaptureFixture) -> None:
    artifacts_used: list[tuple[str, str]] = []

    class Online:
        offline = False

        def use_artifact(self, name: str, type: str) -> None:
            artifacts_used.append((name, type))
            if len(artifacts_used) == 2:
                raise ValueError("no such artifact")

    linked = {"project": "p", "entity": "e", "artifact": "model-7", "checkpoint": "last.ckpt"}
    for _ in range(2):
        use_weights(Online(), linked)
    assert artifacts_used == [("e/p/model-7:last", "model")] * 2
    assert "no such artifact" in caplog.text
    use_weights(Online(), {name: value for name, value in linked.items() if name != "artifact"})
    assert len(artifacts_used) == 2, "nothing was uploaded, so nothing is looked up"


def test_test_command_logs_its_metrics_as_a_table(
    logged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    """The command reads the weights of the artifact."""
    import wandb

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("RECSYS_TOPK_CACHE", "HOME"):
        monkeypatch.setenv(name, environment[name])
    models = [artifact for artifact in wandb_files.artifacts(read(logged)) if artifact.type == "model"]
    weights = next(entry.local_path for m in models for entry in m.manifest.contents if entry.path == "best.ckpt")
    try:
        assert main(["test", "--ckpt_path", weights, "--logger", "wandb", "--name", "t"]) == 0
    finally:
        wandb.teardown()  # completes the file
    run = tmp_path / "runs" / "test-t"
    (file,) = (run / "wandb").glob("offline-run-*/files/media/table/tables/test_*.table.json")
    table = json.loads(file.read_text())
    assert table["columns"] == ["metric", "value"]
    logged_values = wandb_files.history(read(run))[0]
    assert dict(table["data"]) == {name: value for name, value in logged_values.items() if name.startswith("test/")}
    assert "test/joint_recall@10@20/80" in dict(table["data"])
    # The file of weights names its training run, even on another machine.
    facts = json.loads((logged / "run.json").read_text())
    link = wandb_files.config(read(run))["training_run"]
    assert (link["id"], link["name"], link["artifact"]) == (facts["wandb_id"], logged.name, facts["wandb_artifact"])
    about = next(record.run for record in read(run) if record.HasField("run"))
    assert (about.job_type, about.project, about.run_group) == ("test", "recsys-topk", "mine")
    (data,) = [artifact for artifact in wandb_files.artifacts(read(run)) if artifact.type == "dataset"]
    (same,) = [artifact for artifact in wandb_files.artifacts(read(logged)) if artifact.type == "dataset"]
    assert data.digest == same.digest
