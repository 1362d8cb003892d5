"""What an experiment is: its question, the paper's protocol and figures, ours, the differences, and the runs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml

from recsys_topk.registry import suggest
from recsys_topk.reports.paper import EXPERIMENTS
from recsys_topk.runs.config import as_options, set_option

Size = Literal["small", "full"]
SIZES: tuple[Size, ...] = ("small", "full")


@dataclass(frozen=True)
class Step:
    """One part of an experiment: a comparison, a stream or a benchmark.

    Attributes:
        run: ``"compare"``, ``"stream"`` or ``"bench"``.
        result: The file that it leaves in the experiment's folder.
        common: The config of every run; for a benchmark, its options.
        variants: The competitors: a config each, by label.
        seeds: Runs of each.
        points: For a curve: which competitor and which x a label stands for.
        suite: For a benchmark: which one.
    """

    run: str
    result: str
    common: Mapping[str, Any]
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    seeds: int = 1
    points: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    suite: str = ""

    def command(self, folder: Path, jobs: int, further: Mapping[str, Any]) -> list[str]:
        """Return the command that does the same, as a person would type it after ``recsys-topk``."""
        if self.run == "bench":
            options = [f"--{key}={value}" for key, value in self.common.items() if not isinstance(value, (list, bool))]
            options += [f"--{key}" for key, value in self.common.items() if value is True]
            lists = {key: value for key, value in self.common.items() if isinstance(value, list)}
            options += [part for key, value in lists.items() for part in (f"--{key}", *value)]
            return ["bench", self.suite, *options, "--json", str(folder / self.result)]
        variants = [
            part
            for label, config in self.variants.items()
            for part in ("--variant", f"{label}={shlex.join(as_options(config))}")
        ]
        common = [*as_options(self.common), "--seeds", str(self.seeds)]
        return [self.run, *common, *variants, *as_options(further), "--jobs", str(jobs), "--out", str(folder)]


@dataclass(frozen=True)
class Experiment:
    """One of the paper's experiments, as its file tells it.

    Attributes:
        name: Name of the file.
        content: What it holds: title, question, the paper's protocol and ours, the differences, and the steps.
    """

    name: str
    content: Mapping[str, Any]

    def about(self, size: Size) -> dict[str, Any]:
        """Return what a report says of it besides its numbers.

        ``subject`` is the competitor that the question is about, ``show`` how it is shown (``table``, ``curve``,
        ``stream`` or ``runtime``), ``figures`` which of the paper's figures stand beside it, ``protocol`` and ``found``
        the paper's, ``ours`` how it is run here, ``differences`` in what that differs.
        """
        content = self.content
        shown = {key: content.get(key) for key in ("title", "question", "subject", "show", "figures", "xlabel", "logx")}
        differences = [*content["differences"]["both"], *content["differences"][size]]
        return {**shown, **content["paper"], "ours": content["ours"][size], "differences": differences}

    def steps(self, size: Size, seeds: int | None = None, only: Sequence[str] = ()) -> list[Step]:
        """Return the parts of the experiment that have something to run.

        Args:
            size: ``small`` for a simulated world, ``full`` as in the paper.
            seeds: Runs of each competitor; None = as many as the file says.
            only: Competitors to run; all if empty.
        """
        if seeds is not None and seeds < 1:
            raise ValueError(f"--seeds must be at least 1, got {seeds}")
        made = [_step(entry, seeds, only) for entry in self.content["sizes"][size]["steps"]]
        return [step for step in made if step.variants or step.run == "bench"]

    def competitors(self, size: Size) -> list[str]:
        """Return the names that `only` may hold."""
        entries = self.content["sizes"][size]["steps"]
        return list(dict.fromkeys(name for entry in entries for name in entry.get("variants", ())))


def _step(entry: Mapping[str, Any], seeds: int | None, only: Sequence[str]) -> Step:
    if entry["run"] == "bench":
        return Step("bench", entry["result"], entry["options"], suite=entry["suite"])
    each: dict[str, Any] = entry.get("each") or {}
    points: dict[str, tuple[str, float]] = {}
    made: dict[str, dict[str, Any]] = {}
    for name, config in entry["variants"].items():
        if only and name not in only:
            continue
        for value in each["values"] if each else [None]:
            label = name if value is None else f"{name}, {each['label']} {value:g}"
            made[label] = deepcopy(config)
            if value is not None:
                set_option(made[label], each["option"], value)
                points[label] = (name, float(value))
    result = "comparison.json" if entry["run"] == "compare" else "stream.json"
    return Step(entry["run"], result, entry["common"], made, entry["seeds"] if seeds is None else seeds, points)


@cache
def load(name: str) -> Experiment:
    """Return an experiment by name."""
    if name not in EXPERIMENTS:
        known = ", ".join(EXPERIMENTS)
        raise ValueError(f"unknown experiment {name!r}; {suggest(name, EXPERIMENTS)}experiments: {known}, all")
    text = resources.files("recsys_topk.experiments").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return Experiment(name, yaml.safe_load(text))
