"""Runs an experiment through the public commands, keeps what is finished, and says how long it will take."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recsys_topk.experiments.definition import Experiment, Size, Step
from recsys_topk.runs.files import write_whole
from recsys_topk.runs.provenance import provenance

RECORD = "experiment.json"


@dataclass
class Clock:
    """Says how much time is left, from what the part done so far took.

    Attributes:
        total: Weight of everything that is to be run.
        done: Weight of what has been run.
        start: When it began.
    """

    total: float
    done: float = 0.0
    start: float = field(default_factory=time.monotonic)

    def left(self, part: float = 0.0) -> str:
        """Return the time left as text; `part` is the weight done of the step at hand."""
        done = self.done + part
        if done <= 0:
            return ""
        seconds = (time.monotonic() - self.start) * (self.total - done) / done
        return f"about {seconds / 60:.0f} min left" if seconds > 90 else f"about {seconds:.0f} s left"


def command_line(step: Step, folder: Path, jobs: int, further: Sequence[str]) -> list[str]:
    """Return the whole command of a step, as a person would type it after ``recsys-topk``.

    Args:
        step: The step.
        folder: Folder of the experiment.
        jobs: Training runs at a time.
        further: Options for every `fit`; benchmarks take none.
    """
    if step.command[0] == "bench":
        return [*step.command, "--json", str(folder / step.result)]
    return [*step.command, *further, "--jobs", str(jobs), "--out", str(folder)]


def read_record(folder: Path) -> dict[str, Any]:
    """Return what was recorded of an experiment, or nothing."""
    path = folder / RECORD
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def is_finished(record: Mapping[str, Any], command: Sequence[str], folder: Path, step: Step) -> bool:
    """Return whether exactly this command has been run to its end, and left its result."""
    finished = [entry["command"] for entry in record.get("steps", []) if entry["seconds"] is not None]
    return list(command) in finished and (folder / step.result).is_file()


def run_experiment(
    experiment: Experiment,
    size: Size,
    steps: Sequence[Step],
    folder: Path,
    jobs: int,
    further: Sequence[str],
    clock: Clock,
    say: Callable[[str], None],
) -> None:
    """Run the steps that are not finished, and record what was run in ``experiment.json``.

    Raises:
        ValueError: If a command failed; what was finished before is kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    old = read_record(folder)
    facts = provenance(["recsys-topk", "experiment", experiment.name])
    points = {label: list(point) for step in steps for label, point in step.points.items()}
    record: dict[str, Any] = {**facts, "name": experiment.name, "size": size, "points": points, "steps": []}
    for step in steps:
        command = command_line(step, folder, jobs, further)
        if is_finished(old, command, folder, step):
            say(f"kept: {folder / step.result}")
            record["steps"].append(next(entry for entry in old["steps"] if entry["command"] == command))
            continue
        say(f"$ recsys-topk {shlex.join(command)}")
        entry: dict[str, Any] = {"command": command, "result": step.result, "seconds": None}
        record["steps"].append(entry)
        write_whole(folder / RECORD, json.dumps(record, indent=1))
        before = time.monotonic()
        run_step(command, step.weight, clock, say)
        entry["seconds"] = time.monotonic() - before
        clock.done += step.weight
        write_whole(folder / RECORD, json.dumps(record, indent=1))
    record["reference"] = old.get("reference") or reference(folder)
    write_whole(folder / RECORD, json.dumps(record, indent=1))


def run_step(command: Sequence[str], weight: float, clock: Clock, say: Callable[[str], None]) -> None:
    """Run one command in a process of its own, passing its lines on with the time left; it does not outlive us."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    process = subprocess.Popen(
        [sys.executable, "-m", "recsys_topk", *command], stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdout is not None
    first: int | None = None
    try:
        for line in process.stdout:
            text = line.rstrip("\n")
            counted = re.match(r"\[(\d+)/(\d+)\]", text)
            if counted:
                number, total = int(counted[1]), int(counted[2])
                first = number if first is None else first
                clock.total -= weight - weight * (total - first + 1) / total if number == first else 0.0
                text += f" | {clock.left(weight * (number - first + 1) / total)}"
            say(text)
        status = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
        signal.signal(signal.SIGTERM, before)
    if status == 130:
        raise KeyboardInterrupt
    if status != 0:
        raise ValueError(f"`recsys-topk {shlex.join(command)}` failed (status {status}); see above, mend it, run again")


def reference(folder: Path) -> dict[str, dict[str, float]]:
    """Return the recalls of a random, a popularity and an all-knowing ranker on the simulated world of a comparison.

    Nothing if there is no comparison, or its data are not simulated.
    """
    path = folder / "comparison.json"
    if not path.is_file():
        return {}
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    options = dict(next(iter(runs.values()))[0]["config"]["data"])
    if options.get("root") is not None:
        return {}
    from recsys_topk.datamodules import RecFlowDataModule, WorldConfig, reference_recalls

    data = RecFlowDataModule(**{**options, "world": WorldConfig(**options.get("world", {}))})
    data.prepare_data()
    return reference_recalls(data)
