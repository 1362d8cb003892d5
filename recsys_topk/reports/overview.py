"""The first table of a report: one row per run, so that the best one is found."""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recsys_topk.reports.results import Result
from recsys_topk.reports.tables import ResultTable, short_name
from recsys_topk.runs.metrics_file import read_rows
from recsys_topk.runs.statistics import summarise

CAPTION = "A click on a heading sorts. ★: the best run of those with the same data and the same measure."

FIRST, LAST = ("run", "joint recall", "random", "popularity", "oracle"), ("seconds", "command", "#")


def overview(results: Sequence[tuple[str, Result]]) -> tuple[ResultTable, list[str]] | None:
    """Return the table of all runs and comparisons by their anchors, and the best ones; None if there are none."""
    rows = [row for anchor, one in results for row in _rows(one, anchor)]
    rows.sort(key=lambda row: (row["data"], row["measure"] or "", -(row["joint recall"] or 0.0)))
    order = dict.fromkeys([*FIRST, *(key for row in rows for key in row if key not in LAST)])
    rows = [{key: row.get(key) for key in (*order, *LAST)} for row in rows]
    best: list[str] = []
    for (data, measure), group in itertools.groupby(rows, lambda row: (row["data"], row["measure"])):
        top, *others = group
        if measure and others:
            best.append(f"Best of {len(others) + 1} on {data}, {measure}: {top['run']}, {top['joint recall']:.4f}.")
            top["run"] = f"★ {top['run']}"
    return (ResultTable(CAPTION, rows), best) if rows else None


def _rows(result: Result, anchor: str) -> list[dict[str, Any]]:
    if result.kind == "comparison":
        rows: list[dict[str, Any]] = []
        for found in summarise(result.content["runs"]):
            first = result.content["runs"][found["run"]][0]
            name = f"{result.name.partition(': ')[2]}: {found['run']}"
            own = {"joint recall": found["joint"], "measure": measure_of(next(iter(first["metrics"])))}
            about = described(first.get("config") or {})
            command = shlex.join(result.content.get("command", ()))
            rows.append({"run": name, **own, **about, "seconds": found["seconds"], "command": command, "#": anchor})
        return rows
    if result.kind != "fit":
        return []
    known, values = facts_of(result.path), best_values(result.path)
    joint = next((name for name in values if re.search(r"/joint_recall@[^/]*/\d", name)), None) or next(
        (name for name in values if "joint_recall@" in name), None
    )
    metric = (joint or "//").split("/")[1]
    baselines = {name: found.get(metric) for name, found in known.get("baselines", {}).items()}
    catalogue = [name for name in values if re.search(r"/joint_recall@[^/]*/[a-z]", name)]
    shown = {f"all items: {name.rpartition('/')[2]}".replace(": corpus", ""): values[name] for name in catalogue}
    own = {"run": result.path.name, "joint recall": values.get(joint or ""), **baselines}
    own |= {"measure": measure_of(joint) if joint else None, **described(result.content["config"] or {})}
    own |= dict(sorted(shown.items()))
    own["objective"] = known.get("objective") or own["objective"]
    return [{**own, "seconds": known.get("seconds"), "command": command_of(result), "#": anchor}]


def measure_of(metric: str) -> str:
    """Return what a logged metric measures, and in lists of which length: runs with the same text are compared.

    Example:
        >>> measure_of("test/joint_recall@10@20/200"), measure_of("val/joint_recall@10@20")
        ('test joint@10@20 of 200', 'val joint@10@20')
    """
    split, name, *lists = metric.split("/")
    return f"{split} {short_name(name)}{''.join(f' of {length}' for length in lists)}"


def logged_values(folder: Path) -> dict[str, dict[int, float]]:
    """Return the finite values in a run's metrics.csv, by name and step."""
    logged: dict[str, dict[int, float]] = {}
    for row in read_rows(folder / "metrics.csv"):
        for name, text in row.items():
            if name not in ("epoch", "step") and text and math.isfinite(float(text)):
                logged.setdefault(name, {})[int(row["step"])] = float(text)
    return logged


def best_values(folder: Path) -> dict[str, float]:
    """Return the values of a run at its best validation; the last ones of a run of `test` or without a best."""
    logged = logged_values(folder)
    monitored = logged.get(f"val/{facts_of(folder).get('monitor')}") or {}
    best = max(monitored, key=lambda step: monitored[step], default=None)
    return {name: line[best] if best in line else [*line.values()][-1] for name, line in logged.items()}


def facts_of(folder: Path) -> dict[str, Any]:
    """Return the content of a run's run.json and result.json; a file that is missing or broken has none."""
    found: dict[str, Any] = {}
    for file in (folder / "run.json", folder / "result.json"):
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        found |= content if isinstance(content, dict) else {}
    return found


def command_of(result: Result) -> str:
    """Return the command of a run as it was typed; for a run from Python, the one that repeats it."""
    typed, config = facts_of(result.path).get("command"), result.content["config"] or {}
    if isinstance(typed, str) and typed:
        return typed
    if not config.get("ckpt_path"):
        return f"recsys-topk fit --config {shlex.quote(str(result.path / 'config.yaml'))}"
    command = "validate" if any(name.startswith("val/") for name in logged_values(result.path)) else "test"
    return f"recsys-topk {command} --ckpt_path {shlex.quote(str(config['ckpt_path']))}"


def described(config: Mapping[str, Any]) -> dict[str, str]:
    """Return data, loss and objective of a run by name, from its resolved options.

    Example:
        >>> described({"data": {"root": "clicks.csv", "class_path": "recsys_topk.datamodules.lists.datamodule.Lists"}})
        {'data': 'lists in clicks.csv', 'loss': '', 'objective': ''}
    """
    model, data = config.get("model") or {}, config.get("data") or {}
    options, path = data.get("init_args", data), str(data.get("class_path", "recsys_topk.datamodules.recflow."))
    parts, world = path.split("."), options.get("world") or {}
    kind = parts[2] if path.startswith("recsys_topk.datamodules.") else parts[-1]
    if options.get("root"):
        text = f"{'RecFlow layout' if kind == 'recflow' else kind} in {options['root']}"
    else:
        size = f"{world.get('users')} users, {world.get('items')} items, {world.get('days')} days"
        text = f"a simulated world: {size} of {world.get('requests')} requests (seed {world.get('seed')})"
        text = text if world else "not recorded"
    loss, objective = (model.get(key) or {} for key in ("loss", "objective"))
    tau = (loss.get("init_args") or {}).get("tau") if isinstance(loss, Mapping) else None
    named = [str(one.get("class_path", "") if isinstance(one, Mapping) else one) for one in (loss, objective)]
    short = [name.rpartition(".")[2].removesuffix("Loss").removesuffix("Objective") for name in named]
    return {"data": text, "loss": short[0] + (f" (tau {tau:g})" if tau is not None else ""), "objective": short[1]}
