"""Tuning: the same number of trials per competitor, judged on the validation days, with Optuna."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recsys_topk.experiments.search_space import as_text
from recsys_topk.experiments.study import ROUND, Study, Tuning, with_options
from recsys_topk.experiments.tuning_trial import TuningTrial, run_trial
from recsys_topk.files import csv_text, write_whole
from recsys_topk.runs.config import as_options, merge
from recsys_topk.runs.run import LogLine
from recsys_topk.runs.trials import Competition, Countdown, TrialsFailedError, in_processes
from recsys_topk.text import table


def tune(
    competition: Competition, tuning: Tuning, facts: Mapping[str, Any], log_line: LogLine
) -> dict[str, dict[str, Any]]:
    """Run the trials that have no result yet, then print and write all trials. Return the best config by competitor.

    The `seeds` of the competition are not used.
    """
    competition.check()
    folder = competition.out
    with _locked(folder):
        studies = {label: Study(competition, tuning, label) for label in competition.variants}
        total, failures = tuning.trials * len(studies), list[str]()
        countdown = Countdown(total, sum(study.finished for study in studies.values()), log_line)
        for begin in range(0, tuning.trials, ROUND):
            todo = [trial for study in studies.values() for trial in study.round(begin)]
            countdown.number = sum(study.finished for study in studies.values())
            for trial, failure in in_processes(run_trial, todo, competition.jobs, lambda *_: None):  # type: ignore[arg-type]
                assert isinstance(trial, TuningTrial)
                name = f"{trial.label}, trial {trial.number}"
                if failure is None:
                    countdown.line(f"{name}: {studies[trial.label].tell(trial)}")
                else:
                    failures.append(f"{name}: {failure}")
                    log_line(f"{name}: {failure} (more in {trial.log})")
            if failures:
                raise TrialsFailedError(
                    f"{len(failures)} trials failed; the first: {failures[0]}. Correct it and run the command again"
                )
    records = {label: study.records() for label, study in studies.items()}
    running = sum(record["state"] == "RUNNING" for trials in records.values() for record in trials)
    if running:
        log_line(f"{running} trials are not finished on other machines; run the command again when they are")
    best = {label: _best(label, trials) for label, trials in records.items()}
    rows = [
        {"run": label, "metric": best[label]["value"], "trial": best[label]["number"], **best[label]["options"]}
        for label in best
    ]
    log_line(table(rows))
    spaces = {label: as_text(space) for label, space in tuning.spaces.items()}
    content = {"trials": records, "best": best, "metric": tuning.metric, "seed": tuning.seed, "spaces": spaces, **facts}
    every = [{"run": label, **_flat(record)} for label, trials in records.items() for record in trials]
    write_whole(folder / "tuning.json", json.dumps(content, indent=1))
    write_whole(folder / "tuning.csv", csv_text(every))
    configs = {label: with_options(competition.variants[label], record["options"]) for label, record in best.items()}
    for label, config in configs.items():
        options = as_options(merge(competition.common, config))
        log_line(f"{label}: recsys-topk fit {shlex.join(options)}")
    log_line(f"written: {folder / 'tuning.json'}, {folder / 'tuning.csv'}")
    return configs


def _best(label: str, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    complete = [record for record in records if record["value"] is not None]
    if not complete:
        raise ValueError(f"no trial of {label!r} has a result; every one diverged or is running elsewhere")
    return dict(max(complete, key=lambda record: record["value"]))


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    shown = {key: record[key] for key in ("number", "state", "value", "seconds")}
    return {**shown, **{key: json.dumps(value) for key, value in record["options"].items()}}


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder of results, so that no second process runs its trials."""
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(f"{folder} is being tuned by another process; wait for it, or give another --out") from None
    try:
        yield
    finally:
        lock.release()
