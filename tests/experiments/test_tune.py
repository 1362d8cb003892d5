"""Tuning: search spaces, trials that do not depend on interruptions and jobs, pruning, and the fair protocol."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recsys_topk.cli.compare import make_command_parser, packaged_studies, read_competition, read_study, space_of
from recsys_topk.cli.main import main
from recsys_topk.experiments import tune as tuning_module
from recsys_topk.experiments.search_space import Dimension, parse_spaces
from recsys_topk.experiments.study import ROUND, Tuning
from recsys_topk.experiments.tune import tune
from recsys_topk.experiments.tuned_comparison import with_intervals
from recsys_topk.experiments.tuning_trial import Judge, TuningTrial
from recsys_topk.files import write_whole
from recsys_topk.runs import TrainingRun
from recsys_topk.runs.config import resolve
from recsys_topk.runs.statistics import bootstrap_interval
from recsys_topk.runs.trials import Competition
from tests.conftest import TINY_WORLD, Result

SPACE = ["model.lr=log(1e-4,1e-1)", "b:loss.tau=float(1,9)", "data.batch_size=choice(16,32)"]
LABELS = ["a", "b"]


class KilledError(Exception):
    """The process of the command is killed."""


def quality(trial: TuningTrial) -> float:
    """A smooth function of the options, instead of a training run."""
    model, data = trial.config["model"], trial.config["data"]["init_args"]
    tau = model["loss"]["init_args"].get("tau", 5.0)
    return -abs(math.log10(model["lr"]) + 2.0) - abs(tau - 4.0) - data["batch_size"] / 100


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], list[tuple[str, int]]]:
    """Replace the training processes by `quality`; the given number of runs is finished before the command dies."""
    monkeypatch.setattr(TrainingRun, "options", lambda self: {})

    def install(alive: float = math.inf) -> list[tuple[str, int]]:
        ran: list[tuple[str, int]] = []

        def fake(work: Any, todo: Sequence[TuningTrial], jobs: int, _: Any) -> Iterator[tuple[TuningTrial, None]]:
            for trial in todo if jobs == 1 else reversed(todo):  # parallel runs end in any order
                if len(ran) == alive:
                    raise KilledError
                ran.append((trial.label, trial.number))
                value = quality(trial)
                pruned = value / 2 < trial.thresholds.get(1, -math.inf)
                values = [value / 2] if pruned else [value / 2, value]
                result = {"number": trial.number, "value": max(values), "values": values, "pruned": pruned}
                write_whole(trial.target, json.dumps({**trial.identity(), **result, "seconds": 1.0}))
                if len(ran) == alive:  # killed between the end of the run and the storage of its result
                    raise KilledError
                yield trial, None

        monkeypatch.setattr(tuning_module, "in_processes", fake)
        return ran

    return install


def run(
    out: Path, jobs: int = 1, trials: int = 9, labels: Sequence[str] = ("b",), **options: Any
) -> tuple[dict[str, Any], list[str]]:
    """Tune competitors; return tuning.json and the printed lines."""
    variants = {"a": {"loss": "listnet"}, "b": {"loss": "dftopk"}}
    competition = Competition({label: variants[label] for label in labels}, {"model": {"k": 5}}, out=out, jobs=jobs)
    lines: list[str] = []
    spaces = parse_spaces(SPACE, LABELS)
    given = {"spaces": {label: spaces[label] for label in labels}, "trials": trials, **options}
    tune(competition, Tuning(**given), {}, lines.append)
    content: dict[str, Any] = json.loads((out / "tuning.json").read_text())
    return content, lines


def test_killed_and_resumed_tuning_has_the_trials_of_an_uninterrupted_one(
    tmp_path: Path, trainer: Callable[..., list[tuple[str, int]]]
) -> None:
    """Nine trials: the last one is proposed from the results of the others."""
    ran = trainer()
    whole, lines = run(tmp_path / "whole" / "study")
    assert len(ran) == len(set(ran)) == 9
    assert lines[0].startswith("[1/9] b, trial 0: ")
    assert "left" in lines[0]
    for jobs, kills in ((1, (3, 2)), (2, (1,))):
        out = tmp_path / f"jobs{jobs}" / "study"
        done: list[tuple[str, int]] = []
        for alive in kills:
            one = trainer(alive)
            with pytest.raises(KilledError):
                run(out, jobs=jobs)
            done += one
        rest = trainer()
        resumed, lines = run(out, jobs=jobs)
        done += rest
        assert len(done) == len(set(done)) == 9, "no finished trial runs again"
        assert resumed["trials"] == whole["trials"]
        assert resumed["best"] == whole["best"]
        assert any(line.startswith("[9/9] b, trial ") for line in lines)


def test_results_are_the_trials_of_the_study(tmp_path: Path, trainer: Callable[..., list[tuple[str, int]]]) -> None:
    trainer()
    content, lines = run(tmp_path / "study", labels=LABELS)
    for label in LABELS:
        trials = content["trials"][label]
        assert [trial["number"] for trial in trials] == list(range(9))
        assert {trial["state"] for trial in trials} == {"COMPLETE", "PRUNED"}
        assert all(1e-4 <= trial["options"]["model.lr"] <= 0.1 for trial in trials)
        assert {trial["options"]["data.batch_size"] for trial in trials} == {16, 32}
        assert ("loss.tau" in trials[0]["options"]) == (label == "b")
        complete = [trial for trial in trials if trial["state"] == "COMPLETE"]
        assert content["best"][label] == max(complete, key=lambda trial: trial["value"])
        for trial in trials[ROUND:]:  # the rule of the median over the complete trials of earlier rounds
            first = trial["number"] // ROUND * ROUND
            earlier = [one["values"][0] for one in trials[:first] if one["state"] == "COMPLETE"]
            below = len(earlier) >= 3 and trial["values"][0] < float(np.median(earlier))
            assert (trial["state"] == "PRUNED") == below
    assert any(line.startswith("b: recsys-topk fit --model.k 5 --model.lr ") for line in lines)
    without = run(tmp_path / "all", prune=False, seed=1, trials=6)[0]["trials"]["b"]
    assert {trial["state"] for trial in without} == {"COMPLETE"}
    assert without[0]["options"] != content["trials"]["b"][0]["options"]


def test_two_machines_share_a_database(tmp_path: Path, trainer: Callable[..., list[tuple[str, int]]]) -> None:
    """A folder of the same name elsewhere is another machine: it does not run the trials of the first."""
    storage = f"sqlite:///{tmp_path / 'shared.db'}"
    first, second = tmp_path / "one" / "study", tmp_path / "two" / "study"
    ran = trainer(3)
    with pytest.raises(KilledError):
        run(first, storage=storage, trials=6)
    others = trainer()
    _, lines = run(second, storage=storage, trials=6)
    assert not set(ran) & set(others)
    assert any("not finished on other machines" in line for line in lines)
    rest = trainer()
    content, _ = run(first, storage=storage, trials=6)
    assert len({*ran, *others, *rest}) == len(ran) + len(others) + len(rest) == 6
    assert all(trial["state"] != "RUNNING" for trial in content["trials"]["b"])


def test_study_with_other_options_is_refused(tmp_path: Path, trainer: Callable[..., list[tuple[str, int]]]) -> None:
    trainer()
    run(tmp_path / "study", trials=1)
    with pytest.raises(ValueError, match="was tuned with other options: seed was 0 and is 1 now; give another --out"):
        run(tmp_path / "study", trials=1, seed=1)
    run(tmp_path / "study", trials=2)  # more trials continue the study


def test_judge_stops_a_run_below_the_median() -> None:
    from types import SimpleNamespace

    trainer: Any = SimpleNamespace(
        sanity_checking=False, state=SimpleNamespace(fn="fit"), callback_metrics={}, should_stop=False
    )
    module: Any = SimpleNamespace(monitor="recall")
    judge = Judge({2: 0.5})
    for value, stopped in ((0.1, False), (0.6, False), (0.2, False)):
        trainer.callback_metrics["val/recall"] = value
        judge.on_validation_end(trainer, module)
        assert trainer.should_stop == judge.pruned == stopped
    judge = Judge({2: 0.7})
    for value in (0.1, 0.6):
        trainer.callback_metrics["val/recall"] = value
        judge.on_validation_end(trainer, module)
    assert judge.pruned
    assert judge.values == [0.1, 0.6]


def test_spaces_are_read_from_options_files_and_mappings(tmp_path: Path) -> None:
    file = tmp_path / "space.yaml"
    file.write_text(
        "model.lr: log(1e-4, 1e-2)\nmodel.optimizer: [adam, sgd]\nvariants:\n  b:\n    loss.tau: int(1, 9)\n"
    )
    spaces = parse_spaces([str(file), "a:model.lr=float(0,1)", "data.history_length=logint(5,50)"], LABELS)
    assert spaces["a"]["model.lr"] == Dimension("float", (0, 1))
    assert spaces["b"]["model.lr"] == Dimension("log", (1e-4, 1e-2))
    assert spaces["b"]["loss.tau"] == Dimension("int", (1, 9))
    assert spaces["a"]["model.optimizer"] == Dimension("choice", ("adam", "sgd"))
    assert spaces["a"]["data.history_length"] == Dimension("logint", (5, 50))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["model.lr"], "must be OPTION=VALUES or a YAML file, got 'model.lr'"),
        (["model.lr=lgo(1,2)"], r"unknown 'lgo'; did you mean 'log'"),
        (["model.lr=log(0,2)"], "lower bound of log must be above 0, got 0"),
        (["model.lr=log(2,1)"], r"must be log\(LOW,HIGH\) with LOW below HIGH"),
        (["model.lr=int(1,2.5)"], r"must be int\(LOW,HIGH\)"),
        (["model.lr=0.1"], "the space of model.lr must be log"),
        (["c:model.lr=log(1,2)"], "no competitor 'c'; there are a, b"),
        (["b:model.lr=log(1,2)"], "nothing to tune for 'a'; give --space"),
        ([{"model.lr": []}], "has no choices"),
    ],
)
def test_invalid_spaces_raise(given: list[Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_spaces(given, LABELS)


def test_bootstrap_covers_seeds_and_requests() -> None:
    """With one seed the interval is that of a mean; the spread between seeds widens it."""
    generator = np.random.default_rng(0)
    values = generator.normal(0.1, 1.0, (1, 4000))
    low, high = bootstrap_interval(values)
    expected = 1.96 * values.std() / math.sqrt(4000)
    assert low == pytest.approx(values.mean() - expected, abs=0.004)
    assert high == pytest.approx(values.mean() + expected, abs=0.004)
    seeds = values + np.array([-0.5, 0.0, 0.5])[:, None]
    wide = bootstrap_interval(seeds)
    spread = 1.96 * math.sqrt(values.var() / 4000 + np.var([-0.5, 0.0, 0.5]) / 3)
    assert wide[1] - wide[0] == pytest.approx(2 * spread, rel=0.15)


def test_verdict_is_no_difference_if_the_interval_contains_zero() -> None:
    generator = np.random.default_rng(1)
    reference = generator.random((5, 300)).astype(np.float32)
    reference[:, :20] = np.nan  # requests without positives
    noise = generator.normal(0.0, 0.1, (5, 300))
    values = {"a": reference, "b": reference + noise, "c": reference + noise + 0.1, "d": reference + noise - 0.1}
    rows = with_intervals([{"run": name} for name in values], values)
    assert [row["verdict"] for row in rows] == ["", "no difference", "better", "worse"]
    assert rows[2]["low"] < rows[2]["difference"] < rows[2]["high"]
    assert rows[2]["difference"] == pytest.approx(float(np.nanmean(values["c"] - reference)), abs=1e-6)


def option_of(label: str) -> str:
    """Return the option that sets the scale of the scores in a loss."""
    return "loss.sigma" if label.startswith("lambdaloss") else "loss.tau"


def test_packaged_studies_have_the_same_competitors_and_their_configs_parse(tmp_path: Path) -> None:
    first, second = (read_study(name) for name in ("objectives", "objectives-drift"))
    assert packaged_studies() == ["objectives", "objectives-drift", "pool", "temperature"]
    pool = read_study("pool")
    for label, variant in pool["variants"].items():
        objective = resolve({"config": [pool["common"], variant]})["model"].get("objective", {}).get("init_args", {})
        given = str(objective.get("pool", "catalogue")) if variant.keys() > {"loss"} else None
        assert given == (label.split()[2] if label.count(" ") == 2 else "catalogue" if "objective" in variant else None)
    everything = parse_spaces([pool["space"]], list(pool["variants"]))
    assert all(set(everything[label]) == {"model.lr", option_of(label)} for label in pool["variants"])
    assert {**second, "about": "", "common": ""} == {**first, "about": "", "common": ""}
    assert first["common"]["data"]["world"] != second["common"]["data"]["world"]
    arguments = ["--study", "objectives", "--only", "quota,softmax pool", "--out", str(tmp_path)]
    options, further = make_command_parser("compare").parse_known_args([*arguments, "--data.world", "small"])
    competition = read_competition(options, further, "compare", first)
    assert (list(competition.variants), competition.seeds) == (["quota", "softmax pool"], 5)
    assert competition.common["data"]["world"] == "small"
    assert competition.common["data"]["train_negatives"] == 25
    spaces = parse_spaces(space_of(first, competition), list(competition.variants))
    assert [list(spaces[label]) for label in ("quota", "softmax pool")] == [["model.lr", "loss.tau"]] * 2
    everything = parse_spaces([first["space"]], list(first["variants"]))
    for label, variant in first["variants"].items():
        resolve({"config": [first["common"], variant]})
        assert set(everything[label]) == {"model.lr", *([] if label == "bce" else [option_of(label)])}
    named = first["variants"]["softmax pool"]
    model = TrainingRun({"config": [first["common"], named]}).options()["model"]
    assert model["objective"]["init_args"]["pool"] == "catalogue"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("variants: 3", "must be a mapping with variants"),
        ("variants: {a: {loss: dftopk}}\nspaces: 1", "must be a mapping with variants"),
        ("variants: {a: {loss: {class_path: os.system}}}", "os.system"),
    ],
)
def test_invalid_studies_raise(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text(text)
    with pytest.raises(ValueError, match=words):
        read_study(str(tmp_path / "study.yaml"))
    with pytest.raises(FileNotFoundError, match="did you mean 'objectives'"):
        read_study("objective")


def test_mistakes_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    space = "--space=model.lr=log(1e-3,1e-2)"
    for arguments, words in (
        (["tune"], "nothing to tune for 'config'; give --space"),
        (["tune", "--trials=0", space], "--space needs --tune N"),
        (["compare", "--losses=dftopk", space], "--space needs --tune N"),
        (["tune", space, "--metric=recall@20"], "must be a metric over the whole catalogue, e.g. recall@20/corpus"),
        (["tune", "--space=model.lrr=log(1,2)"], "no option --model.lrr; did you mean --model.lr?"),
    ):
        assert main(arguments) == 2
        assert words in capsys.readouterr().err


def test_tuned_comparison_on_the_command_line(
    in_process: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tunes two competitors with one trial each over the whole catalogue, then tests them with one seed.

    The runs train in this process; tests/experiments/test_compare.py tests the processes.
    """

    def here(work: Any, todo: Sequence[Any], jobs: int, _: Any) -> Iterator[tuple[Any, None]]:
        for trial in todo:
            work(trial, print)
            yield trial, None

    monkeypatch.setattr(tuning_module, "in_processes", here)
    monkeypatch.setattr("recsys_topk.runs.trials.in_processes", here)
    options = ["--losses=listnet,bce", "--tune=1", "--seeds=1", "--metric=recall@20/corpus"]
    space = ["--space=model.lr=log(1e-3,1e-2)", "--trainer.limit_train_batches=1", "--trainer.limit_val_batches=1"]
    done = in_process(tmp_path, "compare", *options, *space, *TINY_WORLD)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "compare"
    content = json.loads((folder / "comparison.json").read_text())
    lists = np.load(folder / "tuned" / "listnet-s0.npy")
    assert lists.shape == (120,)
    mean = content["runs"]["listnet"][0]["metrics"]["test/recall@20/corpus"]
    assert float(np.nanmean(lists)) == pytest.approx(mean, abs=1e-6)
    assert next(iter(content["rows"][0])) == "run"
    assert list(content["rows"][0])[1] == "test/recall@20/corpus"
    assert content["rows"][1]["low"] <= content["rows"][1]["difference"] <= content["rows"][1]["high"]
    tuned = json.loads((folder / "tuning.json").read_text())
    best = tuned["best"]["bce"]["options"]["model.lr"]
    assert content["runs"]["bce"][0]["given"]["model"]["lr"] == best
    assert 0.0 <= tuned["best"]["bce"]["value"] <= 1.0
    assert not list(folder.glob("runs/*-t0/checkpoints/*.ckpt"))
