"""Configs: names, merging and typed options."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from recsys_topk.cli.arguments import parse_options
from recsys_topk.datamodules.simulator.world import PRESETS
from recsys_topk.runs.config import as_options, flatten_config, resolve

DFTOPK = "recsys_topk.losses.DFTopKLoss"
LAPSUM = "recsys_topk.losses.LapSumLoss"


def loss(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = resolve(parse_options(arguments))["model"]["loss"]
    return found


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["--loss", "dftopk"], {}),
        (["--loss=DFTopKLoss"], {}),
        (["--loss", DFTOPK, "--loss.tau", "3"], {"tau": "3"}),
        (["--loss.tau=3", "--loss", "dftopk"], {"tau": "3"}),
        (["--model.loss", "dftopk", "--model.loss.tau", "3"], {"tau": "3"}),
        (["--loss.init_args.tau", "3"], {"tau": "3"}),
    ],
)
def test_loss_may_be_named_in_many_ways(arguments: list[str], options: dict[str, str]) -> None:
    assert loss(*arguments) == {"class_path": DFTOPK, "init_args": options}


def test_typed_options_override_configs() -> None:
    config = resolve(
        parse_options(["--loss.tau", "3", "--config", "loss: dftopk\nmodel: {lr: 0.1, k: 3}\n", "--model.k=5"])
    )
    assert config["model"] == {"lr": 0.1, "k": "5", "loss": {"class_path": DFTOPK, "init_args": {"tau": "3"}}}


@pytest.mark.parametrize("order", [["--loss", "lapsum", "--config", "C"], ["--config", "C", "--loss", "lapsum"]])
def test_loss_by_name_gets_the_options_of_the_config_in_either_order(order: list[str]) -> None:
    config = "losses: {lapsum: {tau: 5}, dftopk: {tau: 500}}\nloss: dftopk\n"
    arguments = [config if argument == "C" else argument for argument in order]
    assert loss(*arguments) == {"class_path": LAPSUM, "init_args": {"tau": 5}}
    assert loss(*arguments, "--loss.tau", "7")["init_args"] == {"tau": "7"}


def test_published_temperature_is_used_in_either_order() -> None:
    one = loss("--loss", "lapsum", "--config", "recflow-2stage")
    assert one == loss("--config", "recflow-2stage", "--loss", "lapsum")
    assert one["init_args"] == {"tau": 5}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--config", "recflow-2stage", "--loss", "sigmoid"],
        ["--config", "recflow-2stage", "--config", "loss: sigmoid\n"],
    ],
)
def test_options_of_a_replaced_loss_are_dropped(arguments: list[str]) -> None:
    """Otherwise sigmoid would train with DFTopK's tau of 500."""
    assert loss(*arguments)["init_args"] == {}
    assert loss("--config", "recflow-2stage", "--loss", "dftopk")["init_args"] == {"tau": 500}


def test_objective_options_without_a_name_apply_to_the_default_objective_of_the_loss() -> None:
    joint = resolve(parse_options(["--loss", "neuralsort", "--loss.eps", "1e-6", "--objective.eps", "1e-6"]))["model"]
    assert joint["objective"]["class_path"].endswith(".JointObjective")
    assert joint["objective"]["init_args"] == joint["loss"]["init_args"] == {"eps": "1e-6"}
    alone = resolve({"loss": "listnet", "objective": {"weighting": "equal"}})["model"]["objective"]
    assert alone["class_path"].endswith(".IndependentObjective")


def test_data_may_be_a_flat_dict_or_a_class_with_options() -> None:
    flat_form = resolve({"data": {"root": "x"}})["data"]
    assert flat_form == resolve({"data": {"class_path": "recflow", "init_args": {"root": "x"}}})["data"]
    assert flat_form == resolve(parse_options(["--data", "recflow", "--data.root", "x"]))["data"]
    assert flat_form["init_args"] == {"root": "x"}


def test_appended_callbacks_get_their_options() -> None:
    config = {"config": {"trainer": {"callbacks": ["a.A"]}}}
    config |= parse_options(
        ["--trainer.callbacks+=b.B", "--trainer.callbacks.every", "3", "--trainer.callbacks+", "c.C"]
    )
    assert resolve(config)["trainer"]["callbacks"] == [
        "a.A", {"class_path": "b.B", "init_args": {"every": "3"}}, "c.C",
    ]  # fmt: skip


def test_resolving_a_resolved_config_changes_nothing() -> None:
    once = resolve(parse_options(["--config", "recflow-3stage", "--objective", "icc", "--data.root", "x"]))
    assert resolve(once) == once


def test_as_options_restores_the_typed_options() -> None:
    arguments = ["--config", "simulated", "--loss", "dftopk", "--loss.tau", "9", "--data.world.users", "40"]
    assert flatten_config(parse_options(as_options(parse_options(arguments)))) == flatten_config(
        parse_options(arguments)
    )
    assert sorted(as_options(parse_options(arguments))) == sorted(arguments)


def test_worlds_have_names_that_options_change(tmp_path: Path) -> None:
    def world(*arguments: str) -> Any:
        return resolve(parse_options(list(arguments)))["data"]["init_args"]["world"]

    small, drift = asdict(PRESETS["small"]), asdict(PRESETS["drift"])
    named = tmp_path / "named.yaml"
    named.write_text("data: {world: small}")
    assert world("--config", str(named)) == small
    assert world("--config", str(named), "--data.world.users", "40") == {**small, "users": "40"}
    assert world("--data.world", "drift", "--data.world.users", "40") == {**drift, "users": "40"}
    assert world("--config", str(named), "--data.world", "drift") == drift


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data.world", "smal"], "unknown world 'smal'; did you mean 'small'"),
        (["--loss"], "--loss needs a value"),
        (["--loss", "--model.k", "3"], "--loss needs a value"),
        (["dftopk"], "'dftopk' is not an option"),
        (["--config", "losses: {lapsun: {tau: 5}}\n"], "did you mean 'lapsum'"),
        (["--config", "config: simulated\n"], "the key 'config'"),
        (["--config", "- 1\n- 2\n"], "must be a mapping"),
        (["--data.rot", "x"], "did you mean --data.root"),
        (["--data", "recflw"], "did you mean 'recflow'"),
    ],
)
def test_invalid_options_raise(arguments: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        resolve(parse_options(arguments))
