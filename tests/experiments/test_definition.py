"""The packaged experiments are complete, match the paper's figures, and their commands parse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recsys_topk.bench.suites import SUITES
from recsys_topk.cli.compare import make_command_parser, read_competition
from recsys_topk.experiments.definition import SIZES, Size, load
from recsys_topk.reports.paper import EXPERIMENTS, paper_figures
from recsys_topk.runs.config import flatten_config
from recsys_topk.runs.trials import Competition

FOLDER = Path(__file__).parents[2] / "recsys_topk" / "experiments"


def plain(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the values as text: typed values are strings, values in a file have types."""
    return {key: str(value).lower() for key, value in flatten_config(config).items()}


def test_every_file_is_a_listed_experiment() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.yaml")) == sorted(EXPERIMENTS)


@pytest.mark.parametrize("size", [SIZES[0], *(pytest.param(size, marks=pytest.mark.long) for size in SIZES[1:])])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment_is_complete_and_its_commands_parse(name: str, size: Size) -> None:
    experiment = load(name)
    about = experiment.about(size)
    for key in ("title", "question", "subject", "show", "protocol", "found", "ours"):
        assert isinstance(about[key], str)
        assert about[key]
    assert about["differences"]
    assert all(isinstance(text, str) for text in about["differences"])
    steps = experiment.steps(size, seeds=1)  # one seed is enough, and parsing is slow
    assert len(steps) == len(experiment.steps(size)) > 0
    for step in steps:
        if step.run == "bench":
            assert step.suite in SUITES
            continue
        assert step.common["config"] == ("paper-small" if size == "small" else "recflow-2stage")
        # The shown command must give the same runs. Parsing is slow, so only some variants are compared.
        options, further = make_command_parser(step.run).parse_known_args(step.command(Path("unused"), 1, {})[1:])
        shown = read_competition(options, further, step.run)
        assert list(shown.variants) == list(step.variants)
        some = list(step.variants)[:: max(1, len(step.variants) // 4)]
        shown = replace(shown, variants={label: shown.variants[label] for label in some})
        expected = Competition({label: step.variants[label] for label in some}, step.common, step.seeds, Path("unused"))
        for one, two in zip(expected.trials("trials"), shown.trials("trials"), strict=True):
            assert (one.label, one.seed, one.target) == (two.label, two.seed, two.target)
            assert plain(one.config) == plain(two.config)


def test_labels_of_curves_map_to_points() -> None:
    (step,) = load("negatives").steps("small", seeds=5, only=["lapsum"])
    assert list(step.variants) == [f"lapsum, negatives {n}" for n in (0, 5, 10, 15, 20, 25)]
    assert step.points["lapsum, negatives 15"] == ("lapsum", 15.0)
    assert len(step.variants) * step.seeds == 30
    command = step.command(Path("p"), 1, {})
    assert "lapsum, negatives 15=--loss lapsum --data.train_negatives 15" in command


def test_paper_figures_are_complete_and_as_printed() -> None:
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


def test_unknown_experiment_raises() -> None:
    with pytest.raises(ValueError, match="did you mean 'main-table'"):
        load("main-tabel")
