"""The fair protocol: tune every competitor on the validation days, then test the best options once, with seeds.

Every competitor has the same number of trials. The test days are read once, by the checkpoints that the monitored
validation metric selects. The difference to the first competitor has a bootstrap interval over seeds and requests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from recsys_topk.experiments.compare import comparison_rows, device, further_tests, outcome, publish
from recsys_topk.experiments.study import Tuning
from recsys_topk.experiments.tune import tune
from recsys_topk.experiments.tuning_trial import load_best
from recsys_topk.files import whole_file, write_whole
from recsys_topk.runs.run import LogLine, TrainingRun
from recsys_topk.runs.statistics import bootstrap_interval
from recsys_topk.runs.trials import Competition, Send, Trial, by_label, measure_seconds, run_all


@dataclass(frozen=True)
class FinalTrial(Trial):
    """One run of the final comparison; `metric` is that of `Tuning`."""

    metric: str | None = None

    @property
    def lists(self) -> Path:
        """The file with the metric of each request."""
        return self.target.with_suffix(".npy")


def compare_tuned(competition: Competition, tuning: Tuning, facts: Mapping[str, Any], log_line: LogLine) -> None:
    """Tune the competitors, train the best options with each seed, test them, and print and write the comparison."""
    best = tune(competition, tuning, facts, log_line)
    tuned = replace(competition, variants=best)
    trials = [FinalTrial(**vars(trial), metric=tuning.metric) for trial in tuned.trials("tuned", job="test")]
    todo = [trial for trial in trials if not trial.read()]
    log_line(f"testing the best options of {len(best)} competitors with {competition.seeds} seeds")
    run_all(train_and_test_best, todo, len(trials), tuned, outcome, log_line)  # type: ignore[arg-type]
    results = {label: [trial.read() for trial in runs] for label, runs in by_label(trials).items()}
    values = {label: np.stack([np.load(trial.lists) for trial in runs]) for label, runs in by_label(trials).items()}
    rows = with_intervals(comparison_rows(results), values)
    protocol = {"tuning": {"trials": tuning.trials, "metric": tuning.metric}}
    publish(tuned, rows, {"runs": results, **protocol, **facts}, trials[0], log_line)


def train_and_test_best(trial: FinalTrial, send: Send) -> None:
    """Train one run, test its best checkpoint, and write its metrics and the metric of each request."""
    run = trial.run()
    run.data.prepare_data()
    seconds = measure_seconds(run.fit)
    load_best(run)
    metrics, lists = measure_requests(run, trial.metric)
    metrics |= further_tests(trial, run)
    with whole_file(trial.lists) as file:
        np.save(file, lists)
    result = {"seconds": seconds, "metrics": metrics, "device": device(run), "lists": run.data.lists_text("test")}
    write_whole(trial.target, json.dumps({**trial.identity(), **result}, indent=1))


def measure_requests(run: TrainingRun, metric: str | None) -> tuple[dict[str, float], npt.NDArray[np.float32]]:
    """Test a run; return its metrics, the chosen one first, and the chosen one for each request, NaN if skipped."""
    import torch

    first = next(iter(run.model.metrics["test"].values()))
    first.lists = []
    metrics = {name: value for name, value in run.test().items() if name.startswith("test/")}
    if metric is None:
        return metrics, torch.cat(first.lists).float().numpy()
    from recsys_topk.evaluation.corpus_metrics import corpus_options, evaluate_corpus

    evaluation = evaluate_corpus(run.model, run.data, "test", keep=True, **corpus_options(metric))
    over_catalogue = {f"test/{name}": value for name, value in evaluation.compute().items()}
    chosen = {f"test/{metric}": over_catalogue[f"test/{metric}"]}
    return {**chosen, **over_catalogue, **metrics}, evaluation.lists.per_request(metric).float().numpy()


def with_intervals(
    rows: Sequence[Mapping[str, Any]], values: Mapping[str, npt.NDArray[np.float32]]
) -> list[dict[str, Any]]:
    """Return the rows of a comparison with the difference to the first competitor, its interval and a verdict.

    `values` has the metric for each seed and request, (S, R), by competitor.

    Example:
        >>> worse, better = np.zeros((2, 50)), np.full((2, 50), 0.5)
        >>> [row["verdict"] for row in with_intervals([{"run": "a"}, {"run": "b"}], {"a": worse, "b": better})]
        ['', 'better']
    """
    reference = next(iter(values))
    extended = []
    for row in rows:
        label = str(row["run"])
        added: dict[str, Any] = {"difference": None, "low": None, "high": None, "verdict": ""}
        if label != reference:
            differences = values[label].astype(float) - values[reference].astype(float)
            differences = differences[:, ~np.isnan(differences).any(axis=0)]
            low, high = bootstrap_interval(differences)
            verdict = "no difference" if low <= 0.0 <= high else "better" if low > 0.0 else "worse"
            added = {"difference": float(differences.mean()), "low": low, "high": high, "verdict": verdict}
        extended.append({**row, **added})
    return extended
