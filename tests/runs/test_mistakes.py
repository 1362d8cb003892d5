"""Typical mistakes fail with one line that names the option, the given and the expected value."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recsys_topk.cascades import CascadeModule
from recsys_topk.cli.main import main
from recsys_topk.losses.base import registry as losses
from recsys_topk.runs import TrainingRun
from tests.conftest import TINY_WORLD, Result

TINY: dict[str, Any] = {
    "world": {"users": 40, "items": 300, "days": 4, "requests": 120},
    "batch_size": 60,
    "eval_negatives": 40,
}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"trainer": {"max_epochs": "two"}}, "--trainer.max_epochs: expected int, got two"),
        ({"trainer": {"precision": 8}}, "--trainer.precision: expected one of 64, 32, 16 or one of .*, got 8"),
        ({"model": {"metrics": "ndcg"}}, "--model.metrics: expected Sequence, got ndcg"),
        ({"model": {"lr": "fast"}}, "--model.lr: expected float, got fast"),
        ({"loss": {"class_path": "dftopk", "tau": "x"}}, "--loss.tau: expected float or 'auto', got x"),
    ],
)
def test_wrong_value_raises_one_line_without_parser_types(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        TrainingRun(config).options()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"data": {"layout": "x"}}, "unknown layout 'x'; available: two-stage, three-stage, or your own: .*"),
        ({"data": {"batch_size": 0}}, "batch_size must be at least 1, got 0"),
        ({"data": {"world": {"users": 0}}}, "a world needs at least 1 users, got 0"),
        (
            {"data": TINY, "loss": {"class_path": "listmle", "k": 0}},
            "the k of the loss must be at least 1, got 0; set --loss.k",
        ),
        ({"data": TINY, "model": {"warmup_steps": -1}}, "warmup_steps must not be negative, got -1"),
    ],
)
def test_value_that_a_class_refuses_raises_one_line(
    config: dict[str, Any], message: str, tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECSYS_TOPK_CACHE", environment["RECSYS_TOPK_CACHE"])
    with pytest.raises(ValueError, match=f"^{message}$"):
        TrainingRun({"out": str(tmp_path), **config}).parts()
    assert not list(tmp_path.iterdir())


def test_too_long_run_name_exits_with_status_2(in_process: Callable[..., Result], tmp_path: Path) -> None:
    done = in_process(tmp_path, "fit", *TINY_WORLD, "--name", "x" * 300)
    assert done.returncode == 2
    assert "at most 200 characters" in done.stderr


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--trainer.devices=5x"], ["`devices`", "should be an int"]),
        (
            ["--data.train_days=2020-01-01", "--data.test_days=2030-01-01:2030-01-02"],
            ["train_days='2020-01-01' asks for 2020-01-01", "asks for 2030-01-01, 2030-01-02"],
        ),
    ],
)
def test_refused_start_prints_one_line_and_leaves_no_directory(
    options: list[str], parts: list[str], in_process: Callable[..., Result], tmp_path: Path
) -> None:
    done = in_process(tmp_path, "fit", *TINY_WORLD, *options)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert all(part in line for part in parts)
    assert not list(tmp_path.glob("runs/*"))


def test_training_goes_on_when_its_output_is_closed(
    in_process: Callable[..., Result], tmp_path: Path, environment: dict[str, str], warm_python: list[str]
) -> None:
    # The world is simulated before: the first command that simulates it says so on standard error.
    in_process(tmp_path, "prepare", *(option for option in TINY_WORLD if option.startswith("--data.")))
    process = subprocess.Popen(
        [*warm_python, "-m", "recsys_topk", "fit", *TINY_WORLD, "--trainer.accelerator=cpu"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        assert process.stdout.readline()
        process.stdout.close()  # as `head -1` does
        (line,) = process.stderr.read().splitlines()
    assert line == "standard output cannot be written (Broken pipe); the command goes on without it"
    assert process.returncode == 0
    (run,) = tmp_path.glob("runs/*")
    assert '"status": "finished"' in (run / "run.json").read_text()


def test_misspelt_option_suggests_short_options_too() -> None:
    with pytest.raises(ValueError, match=r"no option --los; did you mean --loss\?"):
        TrainingRun({"los": "dftopk"}).options()


def test_class_in_the_working_directory_is_found_only_if_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loss_of_mine.py").write_text(
        "from recsys_topk.losses import DFTopKLoss\nclass Mine(DFTopKLoss):\n    name = 'of_mine'\n"
    )
    (tmp_path / "theirs.yaml").write_text("loss: loss_of_mine.Mine\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    assert main(["fit", "--config", "theirs.yaml", "--print_config"]) == 2
    assert "--trust loss_of_mine" in capsys.readouterr().err
    assert str(tmp_path) not in sys.path
    assert main(["fit", "--loss", "loss_of_mine.Mine", "--print_config"]) == 0
    losses._classes.pop("of_mine")  # other tests of this process take every registered loss
    assert "class_path: loss_of_mine.Mine" in capsys.readouterr().out
    assert sys.path[-1] == str(tmp_path)


def test_help_of_an_option_names_the_option(in_process: Callable[..., Result], tmp_path: Path) -> None:
    assert "--data.help NAME" in in_process(tmp_path, "fit", "--data.help").stdout


def test_resume_last_skips_a_run_without_checkpoint(in_process: Callable[..., Result], tmp_path: Path) -> None:
    """The run without checkpoint is newer than the interrupted run."""
    import shutil

    from tests.test_old_files import FIXTURES

    shutil.copytree(FIXTURES / "v0_1" / "plain", tmp_path / "runs" / "plain")
    refused = tmp_path / "runs" / "refused"
    refused.mkdir()
    (refused / "run.json").write_text('{"status": "failed"}')
    done = in_process(tmp_path, "fit", "--resume", "last", "--trainer.enable_progress_bar=false")
    assert done.returncode == 0, done.stderr
    assert "runs/plain" in done.stdout


def test_test_command_loads_a_cascade_trained_in_python_with_an_operator(
    in_process: Callable[..., Result], tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is `TopKLoss` with an operator, which has no registered name."""
    from lightning.pytorch import Trainer

    from recsys_topk.datamodules import RecFlowDataModule, WorldConfig
    from recsys_topk.losses import TopKLoss
    from recsys_topk.operators import LapSum

    monkeypatch.setenv("RECSYS_TOPK_CACHE", environment["RECSYS_TOPK_CACHE"])
    data = RecFlowDataModule(world=WorldConfig(**TINY["world"]), batch_size=60, eval_negatives=40)
    data.prepare_data()
    model = CascadeModule(data.schema, loss=TopKLoss(LapSum(2.0)))
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = Trainer(max_steps=1, limit_val_batches=0, accelerator="cpu", default_root_dir=tmp_path, **quiet)
    trainer.fit(model, data)
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    done = in_process(tmp_path, "test", "--ckpt_path", "own.ckpt")
    assert done.returncode == 0, done.stderr
    assert "test 2024-01-16: lists of 80 with 40 uniform negatives;" in done.stdout


@pytest.mark.parametrize("loss", ["lambdaloss", "lambdarank", "approx_ndcg", "listnet", "dftopk"])
def test_loss_by_name_is_the_same_in_python_and_on_the_command_line(
    loss: str, tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setenv("RECSYS_TOPK_CACHE", environment["RECSYS_TOPK_CACHE"])
    typed = TrainingRun({"loss": loss, "data": TINY, "out": str(tmp_path)})
    built = CascadeModule(typed.model.schema, loss=loss)
    generator = torch.Generator().manual_seed(0)
    scores = [torch.randn(6, 40, generator=generator) for _ in typed.model.cascade.quotas]
    labels = torch.randint(0, 30, (6, 40), generator=generator).float()
    groups = torch.zeros(6, 40, dtype=torch.int64)
    quotas = typed.model.cascade.quotas
    one, two = (m.objective(scores, labels, groups=groups, quotas=quotas, k=10).total for m in (typed.model, built))
    assert torch.equal(one, two)
    assert built.loss.positive_above == typed.model.schema.positive_above
