"""From what people type to what LightningCLI reads."""

from __future__ import annotations

import pytest
import yaml

from recsys_topk.cli.arguments import option_value, rewrite

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


def test_a_config_comes_before_what_is_typed_and_its_names_are_resolved(tmp_path: object) -> None:
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
