"""The packaged experiments: complete, consistent with the paper's figures, and made of commands that parse."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from recsys_topk.experiments.definition import SIZES, Size, available, load, paper_figures
from recsys_topk.reports.results import labels_of
from recsys_topk.runs.config import rewrite
from recsys_topk.runs.trials import add_options, plan

FOLDER = Path(__file__).parents[2] / "recsys_topk" / "experiments"


def test_every_file_is_an_experiment() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem != "figures") == sorted(available())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", available())
def test_an_experiment_says_everything_and_its_commands_parse(name: str, size: Size) -> None:
    experiment = load(name)
    texts = [experiment.title, experiment.question, experiment.protocol, experiment.found]
    assert all(isinstance(text, str) and text for text in [*texts, experiment.content["ours"][size]])
    assert experiment.differences(size)
    assert all(isinstance(text, str) for text in experiment.differences(size))
    steps = experiment.steps(size)
    assert steps
    for step in steps:
        if step.command[0] == "bench":
            continue
        parser = argparse.ArgumentParser()
        add_options(parser, out="unused")
        options, further = parser.parse_known_args(step.command[1:])
        trials = plan(options, further, "trials")
        assert len(trials) == step.weight
        for trial in trials:
            rewrite(["fit", *trial.arguments])
        config = "paper-small" if size == "small" else "recflow-2stage"
        assert further[further.index("--config") + 1] == config


def test_curves_know_which_label_stands_where() -> None:
    (step,) = load("negatives").steps("small", seeds=5, only=["lapsum"])
    assert labels_of(step.command) == [f"lapsum, negatives {n}" for n in (0, 5, 10, 15, 20, 25)]
    assert step.points["lapsum, negatives 15"] == ("lapsum", 15.0)
    assert step.weight == 30
    assert "lapsum, negatives 15=--loss lapsum --data.train_negatives 15" in step.command


def test_figures_are_complete_and_as_printed() -> None:
    figures = paper_figures()
    recall, tau, runtime = figures["recall"], figures["tau"], figures["runtime"]
    methods = {"neuralsort", "softsort", "diffsort", "lapsum", "sparse", "dftopk"}
    for kind in ("joint", "ranking", "retrieval"):
        assert set(recall[kind]) == methods
        for name, line in recall[kind].items():
            assert len(line) == (1 if name == "diffsort" and kind != "joint" else len(recall["negatives"]))
        assert len(tau[kind]) == len(tau["tau"]) == 9
    for device in ("cpu", "cuda"):
        assert set(runtime[device]) == methods
        assert all(len(line) == len(runtime["items"]) for line in runtime[device].values())
    # Sums of the printed rows, added by hand from the paper's tables.
    assert sum(recall["joint"]["dftopk"]) == pytest.approx(3.0892)
    assert sum(recall["joint"]["neuralsort"]) == pytest.approx(2.9505)
    assert sum(tau["joint"]) == pytest.approx(2.955)
    assert sum(runtime["cpu"]["dftopk"]) == pytest.approx(200.10)
    assert sum(runtime["cuda"]["softsort"]) == pytest.approx(27.33)


def test_an_unknown_experiment_is_named() -> None:
    with pytest.raises(ValueError, match="did you mean 'main-table'"):
        load("main-tabel")
