"""The definition of an experiment: question, protocol of the paper, protocol here, differences, and runs."""

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
    """One part of an experiment: a comparison, a stream or a benchmark."""

    run: str  # "compare", "stream" or "bench"
    result: str  # name of the result file in the folder of the experiment
    common: Mapping[str, Any]  # the config of every run; for a benchmark, its options
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # the config of each variant, by label
    seeds: int = 1  # number of runs per variant
    # For a curve, the variant name and the x value of each label.
    points: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    suite: str = ""  # for a benchmark, the name of the suite

    def command(self, folder: Path, jobs: int, further: Mapping[str, Any]) -> list[str]:
        """Return the equivalent command line, without ``recsys-topk``."""
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
    """An experiment of the paper, from its YAML file."""

    name: str  # name of the file
    # Content of the file: title, question, protocol of the paper, protocol here, differences, and steps.
    content: Mapping[str, Any]

    def about(self, size: Size) -> dict[str, Any]:
        """Return the texts and settings of the report.

        ``subject`` is the variant that the question is about, ``show`` the kind of presentation (``table``, ``curve``,
        ``stream`` or ``runtime``), ``figures`` the figures of the paper to compare with, ``protocol`` and ``found`` the
        protocol and the finding of the paper, ``ours`` the protocol here, and ``differences`` the differences.
        """
        content = self.content
        shown = {key: content.get(key) for key in ("title", "question", "subject", "show", "figures", "xlabel", "logx")}
        differences = [*content["differences"]["both"], *content["differences"][size]]
        return {**shown, **content["paper"], "ours": content["ours"][size], "differences": differences}

    def steps(self, size: Size, seeds: int | None = None, only: Sequence[str] = ()) -> list[Step]:
        """Return the steps that have something to run, with `seeds` runs per variant (None = as in the file).

        Only the variants in `only` are run; empty = all. ``small`` is a simulated world, ``full`` the protocol of the
        paper.
        """
        if seeds is not None and seeds < 1:
            raise ValueError(f"--seeds must be at least 1, got {seeds}")
        steps = [_step(entry, seeds, only) for entry in self.content["sizes"][size]["steps"]]
        return [step for step in steps if step.variants or step.run == "bench"]

    def competitors(self, size: Size) -> list[str]:
        """Return the allowed names for `only`."""
        entries = self.content["sizes"][size]["steps"]
        return list(dict.fromkeys(name for entry in entries for name in entry.get("variants", ())))


def _step(entry: Mapping[str, Any], seeds: int | None, only: Sequence[str]) -> Step:
    if entry["run"] == "bench":
        return Step("bench", entry["result"], entry["options"], suite=entry["suite"])
    each: dict[str, Any] = entry.get("each") or {}
    points: dict[str, tuple[str, float]] = {}
    variants: dict[str, dict[str, Any]] = {}
    for name, config in entry["variants"].items():
        if only and name not in only:
            continue
        for value in each["values"] if each else [None]:
            label = name if value is None else f"{name}, {each['label']} {value:g}"
            variants[label] = deepcopy(config)
            if value is not None:
                set_option(variants[label], each["option"], value)
                points[label] = (name, float(value))
    result = "comparison.json" if entry["run"] == "compare" else "stream.json"
    return Step(entry["run"], result, entry["common"], variants, entry["seeds"] if seeds is None else seeds, points)


@cache
def load(name: str) -> Experiment:
    """Return an experiment by name."""
    if name not in EXPERIMENTS:
        known = ", ".join(EXPERIMENTS)
        raise ValueError(f"unknown experiment {name!r}; {suggest(name, EXPERIMENTS)}experiments: {known}, all")
    text = resources.files("recsys_topk.experiments").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return Experiment(name, yaml.safe_load(text))
