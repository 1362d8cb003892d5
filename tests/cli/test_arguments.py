"""From what people type to what LightningCLI reads."""

from __future__ import annotations

import pytest
import yaml

from recsys_topk.runs.config import option_value, rewrite

DFTOPK = "recsys_topk.losses.dftopk.DFTopKLoss"


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        (["--loss", "dftopk"], [f"--model.loss={DFTOPK}"]),
        (["--loss=DFTopKLoss"], [f"--model.loss={DFTOPK}"]),
        (["--loss", DFTOPK, "--loss.tau", "3"], [f"--model.loss={DFTOPK}", "--model.loss.tau", "3"]),
        (["--loss.tau=3", "--loss", "dftopk"], [f"--model.loss={DFTOPK}", "--model.loss.tau=3"]),
        (["--loss.tau", "3"], ["--model.loss.tau", "3"]),
        (
            ["--objective", "joint", "--objective.stage_k", "quota"],
            [
                "--model.objective=recsys_topk.cascades.objectives.joint.JointObjective",
                "--model.objective.stage_k",
                "quota",
            ],
        ),
        (["--data.root", "x", "--trainer.devices=2"], ["--data.root", "x", "--trainer.devices=2"]),
    ],
)
def test_short_options(typed: list[str], read: list[str]) -> None:
    assert rewrite(["fit", *typed]) == ["fit", *read]


def test_a_config_comes_before_what_is_typed_and_its_names_are_resolved() -> None:
    rewritten = rewrite(["fit", "--loss.tau", "3", "--config", "loss: dftopk\nmodel: {lr: 0.1}\n"])
    assert rewritten[2:] == ["--model.loss.tau", "3"]
    config = yaml.safe_load(rewritten[1].removeprefix("--config="))
    assert config == {"model": {"lr": 0.1, "loss": {"class_path": DFTOPK}}}


def test_missing_name_is_said() -> None:
    with pytest.raises(ValueError, match="--loss needs a name"):
        rewrite(["fit", "--loss"])


def test_option_value() -> None:
    assert option_value(["--a", "1", "--b=2"], "--a") == "1"
    assert option_value(["--a", "1", "--b=2"], "--b") == "2"
    assert option_value(["--a"], "--a") is None


def test_a_loss_chosen_by_name_gets_the_options_of_the_config() -> None:
    config = "losses: {lapsum: {tau: 5}, dftopk: {tau: 500}}\nloss: dftopk\n"
    rewritten = rewrite(["fit", "--config", config, "--loss", "lapsum"])
    assert rewritten[2:] == ["--model.loss=recsys_topk.losses.lapsum.LapSumLoss", "--model.loss.tau=5"]
    assert "loss" not in yaml.safe_load(rewritten[1].removeprefix("--config="))["model"]
    typed = rewrite(["fit", "--config", config, "--loss.tau", "7", "--loss", "lapsum"])
    assert typed[-3:] == ["--model.loss.tau=5", "--model.loss.tau", "7"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--config", "recflow-2stage", "--loss", "sigmoid"],
        ["--config", "recflow-2stage", "--config", "loss: sigmoid\n"],
    ],
)
def test_options_of_a_loss_that_is_replaced_do_not_reach_its_successor(arguments: list[str]) -> None:
    """The parser keeps options of the old class that the new one has too: sigmoid trained at DFTopK's tau of 500."""
    rewritten = rewrite(["fit", *arguments])
    assert not any("DFTopKLoss" in part or "500" in part for part in rewritten)
    same = rewrite(["fit", "--config", "recflow-2stage", "--loss", "dftopk"])
    assert yaml.safe_load(same[1].removeprefix("--config="))["model"]["loss"]["init_args"] == {"tau": 500}


def test_graded_losses_read_recflow_labels_as_places() -> None:
    assert rewrite(["fit", "--loss", "lambdaloss"])[-1] == "--model.loss.gain=linear"
    assert rewrite(["fit", "--loss", "listnet"])[-1] == "--model.loss.target=normalised"


def test_a_misspelt_loss_in_a_config_is_named() -> None:
    with pytest.raises(ValueError, match="did you mean 'lapsum'"):
        rewrite(["fit", "--config", "losses: {lapsun: {tau: 5}}\n"])
