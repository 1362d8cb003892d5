"""What an experiment is: its question, the paper's protocol and figures, ours, the differences, and the commands."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal, cast

import yaml

from recsys_topk.registry import nearest

Size = Literal["small", "full"]
SIZES: tuple[Size, ...] = ("small", "full")
# The quick ones first, so that a report has something to show early.
ORDER = ("main-table", "runtime", "tau", "negatives", "streaming")


@dataclass(frozen=True)
class Step:
    """One command of an experiment.

    Attributes:
        command: ``compare``, ``stream`` or ``bench``, with its options.
        result: The file that it leaves in the experiment's folder.
        points: For a curve: which competitor and which x a label stands for.
        weight: How long it takes relative to others: the number of training runs.
    """

    command: tuple[str, ...]
    result: str
    points: Mapping[str, tuple[str, float]]
    weight: int


@dataclass(frozen=True)
class Experiment:
    """One of the paper's experiments, as its file tells it.

    Attributes:
        name: Name of the file.
        title: Heading.
        question: What it asks.
        subject: The competitor that the question is about.
        show: How it is shown: ``table``, ``curve``, ``stream`` or ``runtime``.
        figures: Which of the paper's figures stand beside it (`paper_figures`); None = none.
        protocol: How the paper ran it.
        found: What the paper found.
        content: Everything else in the file.
    """

    name: str
    title: str
    question: str
    subject: str
    show: str
    figures: str | None
    protocol: str
    found: str
    content: Mapping[str, Any]

    def differences(self, size: Size) -> list[str]:
        """Return in what our protocol differs from the paper's, a sentence or two each."""
        return [*self.content["differences"]["both"], *self.content["differences"][size]]

    def steps(self, size: Size, seeds: int | None = None, only: Sequence[str] = ()) -> list[Step]:
        """Return the commands of the experiment, without where they write.

        Args:
            size: ``small`` for a simulated world, ``full`` as in the paper.
            seeds: Runs of each competitor; None = as many as the file says.
            only: Competitors to run; all if empty.
        """
        made = [_step(entry, seeds, only) for entry in self.content["sizes"][size]["steps"]]
        return [step for step in made if step.weight]

    def competitors(self, size: Size) -> list[str]:
        """Return the names that `only` may hold."""
        return list(dict.fromkeys(name for entry in self.content["sizes"][size]["steps"] for name in variants(entry)))


def variants(entry: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the competitors of a step: their options, by name."""
    return cast("Mapping[str, str]", entry.get("variants", {}))


def _step(entry: Mapping[str, Any], seeds: int | None, only: Sequence[str]) -> Step:
    command = shlex.split(entry["command"])
    if command[0] == "bench":
        return Step(tuple(command), entry["result"], {}, 10)
    if seeds is not None:
        command[command.index("--seeds") + 1] = str(seeds)
    each = entry.get("each")
    points: dict[str, tuple[str, float]] = {}
    number = 0
    for name, options in variants(entry).items():
        if only and name not in only:
            continue
        if each is None:
            command += ["--variant", f"{name}={options}"]
            number += 1
            continue
        for value in each["values"]:
            label = f"{name}, {each['label']} {value:g}"
            command += ["--variant", f"{label}={options} {each['option']} {value:g}"]
            points[label] = (name, float(value))
            number += 1
    runs = number * int(command[command.index("--seeds") + 1])
    result = "comparison.json" if command[0] == "compare" else "stream.json"
    return Step(tuple(command), result, points, runs)


def available() -> list[str]:
    """Return the names of the experiments, in the order in which `all` runs them.

    Example:
        >>> available()
        ['main-table', 'runtime', 'tau', 'negatives', 'streaming']
    """
    return list(ORDER)


@cache
def load(name: str) -> Experiment:
    """Return an experiment by name."""
    if name not in ORDER:
        close = nearest(name, ORDER)
        hint = f"did you mean {close!r}? " if close else ""
        raise ValueError(f"unknown experiment {name!r}; {hint}experiments: {', '.join(ORDER)}, all")
    content = _read(f"{name}.yaml")
    return Experiment(
        name=name,
        title=content["title"],
        question=content["question"],
        subject=content["subject"],
        show=content["show"],
        figures=content["figures"],
        protocol=content["paper"]["protocol"],
        found=content["paper"]["found"],
        content=content,
    )


@cache
def paper_figures() -> Mapping[str, Any]:
    """Return what the paper reports.

    Example:
        >>> paper_figures()["recall"]["joint"]["dftopk"][0]
        0.404
    """
    return _read("figures.yaml")


def _read(name: str) -> dict[str, Any]:
    text = resources.files("recsys_topk.experiments").joinpath(name).read_text(encoding="utf-8")
    return cast("dict[str, Any]", yaml.safe_load(text))
