"""Many training runs for one command: who competes, which runs are there already, and a process for each of the rest.

A process is forked from one that has imported everything and computed nothing. It starts in a moment and is otherwise
as fresh as a new interpreter, so a run gives the same numbers as `recsys-topk fit` by itself.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.connection
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from recsys_topk.cli.console import echo, warn

if TYPE_CHECKING:
    from recsys_topk.runs.lightning_cli import CascadeCLI


@dataclass(frozen=True)
class Trial:
    """One run of one competitor.

    Attributes:
        label: The competitor.
        seed: Seed of the weights, the order and the negatives.
        arguments: The options of `fit` that its numbers depend on, as typed.
        resolved: The same with names and config files resolved, so that an edited file is noticed.
        plumbing: Those that they do not depend on: where it writes, what it shows.
        target: The file that holds its numbers.
    """

    label: str
    seed: int
    arguments: tuple[str, ...]
    resolved: tuple[str, ...]
    plumbing: tuple[str, ...]
    target: Path

    def read(self) -> dict[str, Any] | None:
        """Return what the run has measured, None if there is nothing yet; raise if it was another run."""
        if not self.target.is_file():
            return None
        found: dict[str, Any] = json.loads(self.target.read_text(encoding="utf-8"))
        if found["resolved"] != list(self.resolved):
            then, now = difference(found["arguments"], self.arguments)
            what = f"{shlex.join(then) or 'nothing'} where now there is {shlex.join(now) or 'nothing'}"
            raise ValueError(
                f"{self.target} was made with other options: {what if then or now else 'a config file has changed'}; "
                f"give another --out, or delete that file to run it again"
            )
        return found

    def identity(self) -> dict[str, Any]:
        """Return what the file says of the run besides its numbers."""
        return {"seed": self.seed, "arguments": list(self.arguments), "resolved": list(self.resolved)}


Work: TypeAlias = Callable[[Trial, Callable[[Any], None]], None]


def add_options(parser: argparse.ArgumentParser, out: str) -> None:
    """Add the options of a command that trains several competitors."""
    parser.add_argument("--losses", default="", help="names of losses or published objectives, with commas between")
    parser.add_argument(
        "--variant", action="append", default=[], metavar="LABEL=OPTIONS",
        help="a further competitor, e.g. 'dftopk tau 500=--loss dftopk --loss.tau 500'",
    )  # fmt: skip
    parser.add_argument("--seeds", type=int, default=3, help="runs of each (default: %(default)s)")
    parser.add_argument("--out", default=out, help="folder of the results (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each with one thread if more than 1")
    parser.add_argument("--logger", choices=["csv", "wandb"], default="csv", help="wandb: offline without a key")


def plan(options: argparse.Namespace, further: Sequence[str], place: str = "trials") -> list[Trial]:
    """Return the runs that the options ask for, seed by seed; raise on a mistake in any of them.

    Args:
        options: What `add_options` parsed.
        further: Options for every `fit`.
        place: Name of the folder with their files.
    """
    for name in ("seeds", "jobs"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(options, name)}")
    from recsys_topk.runs.config import rewrite

    folder = Path(options.out)
    made = []
    variants = competitors(options.losses, options.variant)
    for seed in range(options.seeds):
        for label, chosen in variants.items():
            name = f"{file_name(label)}-s{seed}"
            arguments = (*further, *chosen, f"--seed_everything={seed}", f"--data.seed={seed}")
            where = ("--out", str(folder / "runs"), "--name", name)
            plumbing = (*where, "--logger", options.logger, "--trainer.enable_progress_bar=false")
            resolved = tuple(rewrite(["fit", *arguments])[1:])
            made.append(Trial(label, seed, arguments, resolved, plumbing, folder / place / f"{name}.json"))
    return made


def competitors(losses: str, variants: Sequence[str]) -> dict[str, list[str]]:
    """Return the options of each competitor, by label.

    Args:
        losses: Names with commas between them: losses, or objectives that have no use for one.
        variants: ``LABEL=OPTIONS`` each.

    Example:
        >>> competitors("dftopk,icc", ["smooth=--loss dftopk --loss.tau 9"])
        {'dftopk': ['--loss', 'dftopk'], 'icc': ['--objective', 'icc'],
         'smooth': ['--loss', 'dftopk', '--loss.tau', '9']}
    """
    from recsys_topk.runs.config import registries

    objectives = registries()["objective"]
    published = [name for name in objectives.available() if not objectives.resolve(name).uses_loss]
    known = registries()["loss"].available()
    made: dict[str, list[str]] = {}
    for name in filter(None, losses.split(",")):
        made[name] = ["--objective" if name in published and name not in known else "--loss", name]
    for text in variants:
        label, equals, chosen = text.partition("=")
        if not equals or not label or not chosen.lstrip().startswith("--"):
            raise ValueError(f"--variant must be LABEL=OPTIONS, with no = in the label, got {text!r}")
        if label in made:
            raise ValueError(f"two competitors are called {label!r}; give one of them another label")
        made[label] = shlex.split(chosen)
    if not made:
        raise ValueError("nothing to compare: give --losses dftopk,listnet or --variant")
    files: dict[str, str] = {}
    for label in made:
        other = files.setdefault(file_name(label), label)
        if other != label:
            raise ValueError(f"{label!r} and {other!r} would be written to the same file; give one another label")
    return made


def difference(old: Sequence[str], new: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return where two lists of options differ: each from the first difference to the last.

    Example:
        >>> difference(["--a", "1", "--b", "2"], ["--a", "3", "--b", "2"])
        (['--a', '1'], ['--a', '3'])
    """
    one, two = list(old), list(new)
    while one and two and one[-1] == two[-1]:
        del one[-1], two[-1]
    start = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    while start and any(part[start : start + 1] and not part[start].startswith("--") for part in (one, two)):
        start -= 1
    return one[start:], two[start:]


def file_name(label: str) -> str:
    """Return a label as a part of a file name."""
    return "".join(c if c.isalnum() or c in "-." else "-" for c in label)


def by_label(trials: Sequence[Trial]) -> dict[str, list[Trial]]:
    """Return the runs of each competitor, in the order of their seeds."""
    found: dict[str, list[Trial]] = {}
    for trial in trials:
        found.setdefault(trial.label, []).append(trial)
    return found


def run_all(
    work: Work, todo: Sequence[Trial], total: int, jobs: int, group: str, done: Callable[[Trial], str],
    heard: Callable[[Trial, Any], None] | None = None,
) -> None:  # fmt: skip
    """Run `todo` with a line for each; raise at the end if some failed.

    Args:
        work: What a process does.
        todo: The runs to do.
        total: The number of runs with those that are there already.
        jobs: Processes at a time.
        group: The name under which W&B groups the runs.
        done: Returns what to say of a run that is over.
        heard: Called with what a process has to tell.
    """
    if len(todo) < total:
        echo(f"{total - len(todo)} of {total} runs are there already")
    failures = []
    outcomes = run(work, todo, jobs, group, heard or (lambda trial, message: None))
    for number, (trial, failure) in enumerate(outcomes, start=total - len(todo) + 1):
        head = f"[{number}/{total}] {trial.label}, seed {trial.seed}"
        if failure is None:
            echo(f"{head}: {done(trial)}")
        else:
            failures.append(f"{trial.label}, seed {trial.seed}: {failure}")
            warn(f"{head}: {failure} (more in {log_of(trial)})")
    if failures:
        raise ValueError(
            f"{len(failures)} runs failed; the first: {failures[0]}. Mend it and run the same command again"
        )


def run(
    work: Work, todo: Sequence[Trial], jobs: int, group: str, heard: Callable[[Trial, Any], None]
) -> Iterator[tuple[Trial, str | None]]:
    """Do `work` for each run in a process of its own; yield each when it is over, with the reason if it failed."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["recsys_topk.runs.lightning_cli", "numba"])
    environment = {"WANDB_RUN_GROUP": group, **os.environ}
    environment.pop("WANDB_SERVICE", None)  # W&B's helper of this process, if any, knows nothing of the others
    waiting = list(todo)
    running: dict[Any, tuple[Trial, Any]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                trial = waiting.pop(0)
                trial.target.parent.mkdir(parents=True, exist_ok=True)
                ours, theirs = context.Pipe(duplex=False)
                threads = 1 if jobs > 1 else None
                method = multiprocessing.get_start_method(allow_none=True)
                process = context.Process(target=_enter, args=(work, trial, theirs, environment, threads, method))
                process.start()
                theirs.close()
                running[ours] = trial, process
            ready: list[Any] = multiprocessing.connection.wait(list(running))
            for connection in ready:
                trial, process = running[connection]
                try:
                    heard(trial, connection.recv())
                except EOFError:
                    del running[connection]
                    process.join()
                    yield trial, None if process.exitcode == 0 else _last_words(trial, process.exitcode)
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.join(10)
            process.kill()


def build(trial: Trial, *further: str) -> CascadeCLI:
    """Return the parts of a run, not trained yet: trainer, model and data."""
    from recsys_topk.cli.training import run as training

    cli = training(["fit", *trial.arguments, *trial.plumbing, *further], execute=False)
    if cli.trainer.world_size > 1:
        raise ValueError(f"each run trains on one device, got {cli.trainer.world_size}; use --trainer.devices 1")
    return cli


def train(cli: CascadeCLI, fit: Callable[[], None]) -> float:
    """Call what trains and return the seconds it took; an interrupted training is no result."""
    start = time.perf_counter()
    fit()
    if cli.trainer.interrupted:
        raise KeyboardInterrupt
    return time.perf_counter() - start


def log_of(trial: Trial) -> Path:
    """Return the file with what a run wrote to its standard output and error."""
    return trial.target.with_suffix(".log")


def _enter(
    work: Work, trial: Trial, connection: Any, environment: Mapping[str, str], threads: int | None, method: str | None
) -> None:
    """Do `work` in a new process: with the environment of the command, output to a file, and no life after it."""
    multiprocessing.set_start_method(method, force=True)  # that of this process is not for the workers of its loaders
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    with log_of(trial).open("wb") as log:
        for number in (1, 2):  # standard output and error
            os.dup2(log.fileno(), number)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    try:
        work(trial, connection.send)
    finally:
        if "wandb" in sys.modules:
            sys.modules["wandb"].finish()  # forked processes end without the clean-up that does it


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _last_words(trial: Trial, status: int) -> str:
    log = log_of(trial)
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.is_file() else []
    said = [line.strip() for line in lines if line.strip()]
    if status < 0 or not said:
        return f"its process ended with status {status}"
    return said[-1].removeprefix("recsys-topk: ")
