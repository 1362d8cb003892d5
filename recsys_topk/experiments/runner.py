"""Runs the unfinished steps of an experiment."""

from __future__ import annotations

import importlib
import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recsys_topk.experiments.definition import Experiment, Size, Step
from recsys_topk.files import write_whole
from recsys_topk.runs.config import as_list
from recsys_topk.runs.provenance import provenance
from recsys_topk.runs.run import LogLine
from recsys_topk.runs.trials import Competition

RECORD = "experiment.json"


@dataclass(frozen=True)
class ExperimentRun:
    """An experiment with the options to run it."""

    experiment: Experiment
    size: Size  # small or full
    steps: Sequence[Step]  # the steps to run
    folder: Path  # folder for the results
    jobs: int  # number of parallel training runs
    further: Mapping[str, Any]  # a config that overrides the config of every training run
    # A function of the name and options of a benchmark. It returns the text to print and the file content.
    bench: Callable[[str, Mapping[str, Any]], tuple[str, str]]

    def check(self) -> None:
        """Check the configs of all runs before the first run starts."""
        for step in self.steps:
            if step.run != "bench":
                self._competition(step).trials("trials")

    def run(self, log_line: LogLine) -> None:
        """Run the unfinished steps, and record all steps in ``experiment.json``."""
        old = read_record(self.folder)
        name = self.experiment.name
        points = {label: list(point) for step in self.steps for label, point in step.points.items()}
        record: dict[str, Any] = {**provenance(["recsys-topk", "experiment", name]), "name": name, "size": self.size}
        record |= {"about": self.experiment.about(self.size), "points": points, "steps": []}
        for step in self.steps:
            entry = self._finished(old, step)
            if entry is not None:
                log_line(f"already finished: {self.folder / step.result}")
                record["steps"].append(entry)
                continue
            entry = self._entry(step)
            log_line(f"$ recsys-topk {shlex.join(entry['command'])}")
            record["steps"].append(entry)
            write_whole(self.folder / RECORD, json.dumps(record, indent=1))
            before = time.monotonic()
            self._run(step, entry["command"], log_line)
            entry["seconds"] = time.monotonic() - before
            write_whole(self.folder / RECORD, json.dumps(record, indent=1))
        record["reference"] = old.get("reference") or reference(self.folder)
        write_whole(self.folder / RECORD, json.dumps(record, indent=1))

    def _entry(self, step: Step) -> dict[str, Any]:
        command = step.command(self.folder, self.jobs, self.further)
        what = {"run": step.run, "labels": list(step.variants), "seeds": step.seeds, "result": step.result}
        return {"command": command, **what, "seconds": None}

    def _finished(self, record: Mapping[str, Any], step: Step) -> dict[str, Any] | None:
        """Return the record of a step if the same command finished and its result file exists, otherwise None."""
        command = self._entry(step)["command"]
        for entry in record.get("steps", []):
            if entry["command"] == command and entry["seconds"] is not None and (self.folder / step.result).is_file():
                return dict(entry)
        return None

    def _run(self, step: Step, command: Sequence[str], log_line: LogLine) -> None:
        if step.run == "bench":
            text, content = self.bench(step.suite, step.common)
            log_line(text)
            write_whole(self.folder / step.result, content)
            return
        execute = getattr(importlib.import_module(f"recsys_topk.experiments.{step.run}"), step.run)
        execute(self._competition(step), provenance(["recsys-topk", *command]), log_line)

    def _competition(self, step: Step) -> Competition:
        further = dict(self.further)
        logger = further.pop("logger", "csv")
        common = {**further, "config": [step.common, *as_list(further.get("config"))]}
        return Competition(step.variants, common, step.seeds, self.folder, self.jobs, logger)


def read_record(folder: Path, name: str = RECORD) -> dict[str, Any]:
    """Return the record of an experiment, or another JSON file in its folder; empty if there is none."""
    path = folder / name
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def reference(folder: Path) -> dict[str, dict[str, float]]:
    """Return the recalls of a random, a popularity and an oracle ranker on the simulated data of a comparison.

    The result is empty if there is no comparison, or if its data is not simulated.
    """
    comparison = read_record(folder, "comparison.json")
    if not comparison:
        return {}
    options = dict(next(iter(comparison["runs"].values()))[0]["config"]["data"]["init_args"])
    if options.get("root") is not None:
        return {}
    from recsys_topk.datamodules import RecFlowDataModule, WorldConfig, reference_recalls

    data = RecFlowDataModule(**{**options, "world": WorldConfig(**options.get("world", {}))})
    data.prepare_data()
    return reference_recalls(data)
