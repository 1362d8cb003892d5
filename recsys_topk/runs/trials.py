"""Many training runs: finished ones are read from their files, the others run in one process each.

Each process is forked from a server that has imported all modules and computed nothing. It starts quickly, and a run
gives the same numbers as in a new interpreter.
"""

from __future__ import annotations

import copy
import itertools
import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from recsys_topk.runs.config import flatten_config, registry_of, resolve
from recsys_topk.runs.run import LogLine, TrainingRun
from recsys_topk.runs.wandb.environment import with_wandb_environment
from recsys_topk.trust import reading
from recsys_topk.trust.typed import trusted_by


class TrialsFailedError(ValueError):
    """Some runs of a command failed; the results of the others are kept."""

    exit_status = 1


@dataclass(frozen=True)
class Trial:
    """One run of one competitor."""

    label: str  # the competitor
    seed: int  # seed of the weights, the order and the negatives
    config: Mapping[str, Any]  # the options that determine the results, in their long form
    place: Mapping[str, Any]  # the options that do not: folder, name, logger and output
    target: Path  # the file with the results
    trust: tuple[str, ...] = ()  # packages whose classes its files may name
    tests: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # the options of each further test, by name

    def read(self) -> dict[str, Any]:
        """Return the results, empty if there are none; raise if the file was written with other options."""
        if not self.target.is_file():
            return {}
        results: dict[str, Any] = json.loads(self.target.read_text(encoding="utf-8"))
        before, now = flatten_config(results.get("given", {})), flatten_config(self.identity()["given"])
        changed = [key for key in {**before, **now} if str(before.get(key)) != str(now.get(key))]
        if changed:
            shown = ", ".join(f"--{key} was {before.get(key)!r} and is {now.get(key)!r} now" for key in changed[:3])
            more = f" (and {len(changed) - 3} more)" if len(changed) > 3 else ""
            raise ValueError(
                f"{self.target} was made with other options: {shown}{more}; give another --out, or delete that file to "
                f"run it again"
            )
        return results

    def identity(self) -> dict[str, Any]:
        """Return the entries of the file that identify the run."""
        given = {**self.config, **({"tests": self.tests} if self.tests else {})}
        return {"seed": self.seed, "given": json.loads(json.dumps(given))}

    def run(self, test: str | None = None, **trainer: Any) -> TrainingRun:
        """Return the run, not trained yet; with the options and the name of a further test if one is given."""
        place = self.place if test is None else {**self.place, "name": f"{self.place['name']}-{file_name(test)}"}
        above = {"wandb": self.place["wandb"]}  # above the environment, which overrides configs
        config = copy.deepcopy(dict(self.config))  # the parser writes into the lists that it is given
        further = {} if test is None else self.tests[test]
        run = TrainingRun({"config": [config, further, place, {"trainer": trainer}], **above}, trust=self.trust)
        if run.trainer.world_size > 1:
            raise ValueError(f"each run trains on one device, got {run.trainer.world_size}; use --trainer.devices 1")
        return run

    @property
    def log(self) -> Path:
        """The file with the output of the run."""
        return self.target.with_suffix(".log")


@dataclass(frozen=True)
class Competition:
    """Several configs, each trained with the same seeds on the same data and batches."""

    variants: Mapping[str, Mapping[str, Any]]  # the config of each competitor, by label
    common: Mapping[str, Any] = field(default_factory=dict)  # a config that the competitors override
    seeds: int = 3  # number of runs per competitor
    out: Path = Path("runs/compare")  # folder of the results
    jobs: int = 1  # number of parallel runs; with more than one, each has one thread
    logger: Literal["csv", "wandb"] = "csv"  # "csv", or "wandb" (offline without a key)
    # Further tests of every trained run: the options that differ from those of the run, by name.
    tests: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def check(self) -> None:
        """Raise if there is nothing to run, or if two competitors would write to the same file."""
        for name in ("seeds", "jobs"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}")
        if not self.variants:
            raise ValueError("nothing to compare: give --losses dftopk,listnet or --variant")
        files: dict[str, str] = {}
        for label in self.variants:
            other = files.setdefault(file_name(label), label)
            if other != label:
                raise ValueError(f"{label!r} and {other!r} would be written to the same file; give one another label")

    def trials(self, place: str, job: str = "train") -> list[Trial]:
        """Return the runs, seed by seed; raise on a mistake in any of them.

        `place` is the folder of their files, `job` the job type of their W&B runs. The group of the W&B runs has the
        name of the folder of the results.
        """
        self.check()
        return [
            replace(self.trial(label, variant, seed, f"{file_name(label)}-s{seed}", place, job), tests=self.tests)
            for seed in range(self.seeds)
            for label, variant in self.variants.items()
        ]

    def trial(self, label: str, variant: Mapping[str, Any], seed: int, name: str, place: str, job: str) -> Trial:
        """Return one run; `name` is that of the run and of its file, `place` and `job` are as in `trials`."""
        seeded = {"seed_everything": seed, "data": {"seed": seed}}
        grouped = {"wandb": {"group": self.out.resolve().name, "job_type": job}}
        given = {"config": [grouped, with_wandb_environment(self.common), variant, seeded]}
        with reading(trusted_by(given)) as trust:
            config = resolve(given)
        wandb = {**config.pop("wandb"), "name": None}  # each run has the name of its directory
        where = {"out": str(self.out / "runs"), "name": name, "logger": self.logger, "wandb": wandb}
        output = {**where, "baselines": False, "trainer": {"enable_progress_bar": False}}
        return Trial(label, seed, config, output, self.out / place / f"{name}.json", trust)


def by_name(losses: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return a competitor per name of a loss, or of an objective that uses no loss.

    Example:
        >>> by_name(["dftopk", "icc"])
        {'dftopk': {'loss': 'dftopk'}, 'icc': {'objective': 'icc'}}
    """
    published = [name for name, cls in registry_of("objective").classes().items() if not cls.uses_loss]
    known = registry_of("loss").available()
    return {name: {"objective" if name in published and name not in known else "loss": name} for name in losses}


def file_name(label: str) -> str:
    """Return a label as a part of a file name."""
    return "".join(c if c.isalnum() or c in "-." else "-" for c in label)


AnyTrial = TypeVar("AnyTrial", bound=Trial)


def by_label(trials: Sequence[AnyTrial]) -> dict[str, list[AnyTrial]]:
    """Return the runs of each competitor, in the order of their seeds."""
    return {
        label: [trial for trial in trials if trial.label == label] for label in dict.fromkeys(t.label for t in trials)
    }


Send: TypeAlias = Callable[[Any], None]
Work: TypeAlias = Callable[[Trial, Send], None]


def run_all(
    work: Work,
    todo: Sequence[Trial],
    total: int,
    competition: Competition,
    done: Callable[[Trial], str],
    log_line: LogLine,
    on_message: Callable[[Trial, Any], None] = lambda trial, message: None,
) -> None:
    """Run trials, and log one line per finished trial with the remaining time; raise at the end if some failed.

    A process runs `work`. `total` counts all trials, finished ones included. `done` returns the summary of a finished
    trial, and `on_message` is called with each message of a process.
    """
    failures: list[str] = []
    countdown = Countdown(total, total - len(todo), log_line)
    for trial, failure in in_processes(work, todo, competition.jobs, on_message):
        name = f"{trial.label}, seed {trial.seed}"
        countdown.line(f"{name}: {done(trial) if failure is None else f'{failure} (more in {trial.log})'}")
        failures += [] if failure is None else [f"{name}: {failure}"]
    if failures:
        raise TrialsFailedError(
            f"{len(failures)} runs failed; the first: {failures[0]}. Correct it and run the same command again"
        )


class Countdown:
    """Logs one line per finished run, with its number among all and the estimated remaining time."""

    def __init__(self, total: int, finished: int, log_line: LogLine) -> None:
        self.total, self.number, self.log_line = total, finished, log_line
        self._before, self._start = finished, time.monotonic()
        if finished:
            log_line(f"{finished} of {total} runs are finished already")

    def line(self, text: str) -> None:
        """Log a finished run."""
        self.number += 1
        left = (time.monotonic() - self._start) / (self.number - self._before) * (self.total - self.number)
        shown = f" | about {left / 60:.0f} min left" if left > 90 else f" | about {left:.0f} s left"
        self.log_line(f"[{self.number}/{self.total}] {text}{shown if self.number < self.total else ''}")


def in_processes(
    work: Work, todo: Sequence[Trial], jobs: int, on_message: Callable[[Trial, Any], None]
) -> Iterator[tuple[Trial, str | None]]:
    """Run `work` for each trial in a separate process; yield each finished trial with the error if it failed."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["recsys_topk.runs.lightning_cli"])
    environment = dict(os.environ)
    environment.pop("WANDB_SERVICE", None)  # the W&B service of this process does not serve the others
    settings = (environment, 1 if jobs > 1 else None, multiprocessing.get_start_method(allow_none=True))
    waiting, running, reasons = iter(todo), dict[Any, tuple[Trial, Any]](), dict[Any, str]()
    try:
        while True:
            for trial in itertools.islice(waiting, jobs - len(running)):
                trial.target.parent.mkdir(parents=True, exist_ok=True)
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_enter, args=(work, trial, theirs, *settings))
                process.start()
                theirs.close()
                running[ours] = trial, process
            if not running:
                return
            ready: list[Any] = multiprocessing.connection.wait(list(running))
            for connection in ready:
                trial, process = running[connection]
                try:
                    kind, message = connection.recv()
                except EOFError:  # the process has ended
                    process.join()
                    del running[connection]
                    ended = f"its process ended with status {process.exitcode}"
                    yield trial, None if process.exitcode == 0 else reasons.get(connection, ended)
                    continue
                if kind == "failed":
                    reasons[connection] = message
                else:
                    on_message(trial, message)
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.join(10)
            process.kill()


def measure_seconds(train: Callable[..., Any], *arguments: Any) -> float:
    """Call a function; return its duration in seconds."""
    start = time.perf_counter()
    train(*arguments)
    return time.perf_counter() - start


def _enter(
    work: Work, trial: Trial, connection: Any, environment: Mapping[str, str], threads: int | None, method: str | None
) -> None:
    """Run `work` in a new process, with the environment of the command and output to a file; exit with the parent."""
    multiprocessing.set_start_method(method, force=True)  # for the workers of its loaders
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    with trial.log.open("wb") as log:
        for number in (1, 2):  # standard output and error
            os.dup2(log.fileno(), number)
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    try:
        work(trial, lambda message: connection.send(("told", message)))
    except Exception as error:
        traceback.print_exc()
        connection.send(("failed", " ".join(str(error).split()) or type(error).__name__))
        raise SystemExit(1) from None
    finally:
        if "wandb" in sys.modules:
            sys.modules["wandb"].finish()  # forked processes do not run exit handlers


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)
