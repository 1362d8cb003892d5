"""`TrainingRun` in Python gives the metrics of the command line; its errors."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recsys_topk.runs import TrainingRun
from recsys_topk.runs.summary import best_metrics
from tests.conftest import TINY_WORLD, Result

WORLD = {"users": 40, "items": 300, "days": 4, "requests": 120}
CONFIG: dict[str, Any] = {
    "loss": {"class_path": "lapsum", "tau": 3},
    "data": {"world": WORLD, "batch_size": 60, "eval_negatives": 40, "train_negatives": 5},
    "trainer": {"log_every_n_steps": 1, "enable_progress_bar": False},
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> Path:
    """An empty folder to work in, within this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RECSYS_TOPK_CACHE", environment["RECSYS_TOPK_CACHE"])
    return tmp_path


def rows(run: Path) -> list[dict[str, str]]:
    """Return the rows of metrics.csv without timings."""
    with (run / "metrics.csv").open() as file:
        return [{k: v for k, v in row.items() if k != "train/requests_per_second"} for row in csv.DictReader(file)]


def test_run_in_python_gives_the_weights_and_metrics_of_the_command_line(
    here: Path, recsys_topk: Callable[..., Result]
) -> None:
    run = TrainingRun({**CONFIG, "name": "python"})
    last = run.fit()
    options = [*TINY_WORLD, "--data.train_negatives=5", "--trainer.enable_progress_bar=false"]
    done = recsys_topk("fit", "--loss", "lapsum", "--loss.tau", "3", "--name", "typed", *options)
    assert done.returncode == 0, done.stderr
    assert rows(here / "runs" / "python") == rows(here / "runs" / "typed")
    assert last["val/joint_recall@10@20"] == pytest.approx(
        float(rows(here / "runs" / "typed")[-1]["val/joint_recall@10@20"]), abs=1e-6
    )
    one, two = (
        torch.load(here / "runs" / name / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for name in ("python", "typed")
    )
    assert list(one) == list(two)
    assert all(torch.equal(one[key], two[key]) for key in one)

    tested = run.test()
    best = {"ckpt_path": str(here / "runs" / "typed" / "checkpoints" / "last.ckpt"), "name": "typed"}
    assert TrainingRun(best).test() == pytest.approx(tested, abs=1e-6)
    assert (here / "runs" / "test-typed").is_dir()
    assert not (here / "runs" / "test-python").exists()


def test_best_metrics_are_those_of_the_step_of_the_best_checkpoint(tmp_path: Path) -> None:
    """The value of the checkpoint is float32; the catalogue is logged in a row of its own at the same step."""
    head = "step,train/loss,val/a,val/b/corpus"
    (tmp_path / "metrics.csv").write_text(
        f"{head}\n9,1.0,,\n9,,0.2,\n19,,0.30000001192092896,\n19,,,0.7\n29,,0.1,0.9\n"
    )
    run: Any = SimpleNamespace(directory=SimpleNamespace(path=tmp_path))
    best: Any = SimpleNamespace(best_model_score=torch.tensor(0.3), monitor="val/a")
    assert best_metrics(run, best) == pytest.approx({"val/a": 0.3, "val/b/corpus": 0.7})
    (tmp_path / "metrics.csv").unlink()
    assert best_metrics(run, best) == {}


@pytest.mark.parametrize(("name", "cls"), [("mlflow", "MLFlowLogger"), ("tensorboard", "TensorBoardLogger")])
def test_loggers_by_name_are_those_of_lightning(
    name: str, cls: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stand-ins, because neither package is installed."""
    from recsys_topk.runs import lightning_cli

    made: list[dict[str, Any]] = []
    monkeypatch.setattr(lightning_cli, cls, lambda *args, **options: made.append({"args": args, **options}))
    directory = SimpleNamespace(path=tmp_path / "mine")
    options: Any = SimpleNamespace(config=SimpleNamespace(logger=name), directory=directory, resumption=None)
    file, _ = lightning_cli.CascadeCLI.loggers(options)
    assert file.name == "mine"  # metrics.csv is always written
    assert made in (
        [{"args": (), "experiment_name": "recsys-topk", "run_name": "mine"}],
        [{"args": (tmp_path / "mine",), "name": "", "version": "tensorboard"}],
    )


def test_notebook_shows_the_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    TrainingRun(CONFIG).log_line("logged")
    monkeypatch.setattr("builtins.__IPYTHON__", True, raising=False)
    TrainingRun(CONFIG).log_line("epoch 1/3")
    assert capsys.readouterr().out == "epoch 1/3\n"


def test_nothing_is_written_to_the_standard_streams(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    capfd.readouterr()
    TrainingRun({**CONFIG, "trainer": {"limit_train_batches": 1, "limit_val_batches": 1}}, log_line=lines.append).fit()
    assert capfd.readouterr().out == ""
    assert any("lapsum under joint" in line for line in lines)


def test_options_equal_the_saved_config(here: Path) -> None:
    run = TrainingRun({**CONFIG, "trainer": {"limit_train_batches": 1, "limit_val_batches": 1}, "name": "x"})
    options = run.options()
    assert options["model"]["loss"]["init_args"]["tau"] == 3.0
    assert not Path("runs").exists()
    run.fit()
    again = TrainingRun({"config": "runs/x/config.yaml"}).options()
    # The default stages depend on the data, so they are known only after the data is opened.
    assert options["model"].pop("stages") is None
    assert [stage["kind"] for stage in again["model"].pop("stages")] == ["two_tower", "din"]
    assert {**again, "name": "x"} == options


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"loss": "dftpk"}, "did you mean 'dftopk'"),
        ({"trainer": {"max_epoch": 1}}, "did you mean --trainer.max_epochs"),
        ({"model": {"lrr": 1}}, "no option --model.lrr"),
        ({"data": {"rot": "x"}}, "did you mean --data.root"),
        ({"name": "../x"}, "plain name"),
        ({"name": "a\\b"}, "plain name"),
    ],
)
def test_mistakes_raise_one_line(config: dict[str, Any], words: str, here: Path) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        TrainingRun(config).fit()
    assert len(str(caught.value).splitlines()) == 1
    assert not list(here.rglob("*.ckpt"))
