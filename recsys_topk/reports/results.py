"""Finds what can be reported: experiments, comparisons, streams, benchmarks and single runs, finished or not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from recsys_topk.runs.documents import read_yaml
from recsys_topk.runs.trials import file_name

LOOKED_FOR = (
    "experiment.json (recsys-topk experiment), comparison.json (compare), stream.json (stream), "
    "a JSON file of bench --json, or metrics.csv beside config.yaml (fit)"
)
Kind = Literal["experiment", "comparison", "stream", "bench", "fit"]


@dataclass(frozen=True)
class Found:
    """One thing to report.

    Attributes:
        kind: What it is.
        path: Where it was found.
        content: What its JSON file holds; for a single run, its configuration.
        parts: For an experiment: the results of its commands.
        missing: What should be there and is not, a sentence each.
    """

    kind: Kind
    path: Path
    content: Mapping[str, Any]
    parts: tuple[Found, ...] = ()
    missing: tuple[str, ...] = field(default=())


def find_all(paths: Sequence[str | Path]) -> list[Found]:
    """Return what there is to report in files and folders, in the order given.

    Raises:
        FileNotFoundError: If a path does not exist, or holds nothing that can be reported.
    """
    found: list[Found] = []
    for path in map(Path, paths):
        if not path.exists():
            raise FileNotFoundError(f"no file or folder {str(path)!r} to report on")
        here = list(_find(path))
        if not here:
            raise FileNotFoundError(f"nothing to report in {str(path)!r}; looked for {LOOKED_FOR}")
        found += here
    return found


def _find(path: Path) -> Iterator[Found]:
    if path.is_file():
        one = _from_file(path)
        if one is not None:
            yield one
        return
    if (path / "experiment.json").is_file():
        yield _experiment(path)
    elif (path / "comparison.json").is_file() or (path / "stream.json").is_file():
        for name in ("comparison.json", "stream.json"):
            if (path / name).is_file():
                yield from _find(path / name)
    elif (path / "trials").is_dir():
        runs = _trials_by_name(path)
        if runs:
            note = "the comparison was not finished: it has no comparison.json, and this shows the runs that it has"
            yield Found("comparison", path, {"runs": runs}, missing=(note,))
    elif (path / "metrics.csv").is_file() and (path / "config.yaml").is_file():
        text = (path / "config.yaml").read_text(encoding="utf-8")
        yield Found("fit", path, {"config": read_yaml(text, str(path / "config.yaml")), "text": text})
    else:
        for entry in sorted(path.iterdir()):
            if not entry.name.startswith(".") and (entry.is_dir() or entry.suffix == ".json"):
                yield from _find(entry)


def _from_file(path: Path) -> Found | None:
    """Return what a JSON file holds, None if it is not one of ours."""
    if path.suffix != ".json":
        return None
    content = read_json(path)
    if not isinstance(content, dict):
        return None
    if "suite" in content and "rows" in content:
        return Found("bench", path, content)
    if path.name == "experiment.json" and "steps" in content:
        return _experiment(path.parent)
    if "runs" in content and "rows" in content:
        return Found("comparison", path, content)
    if "runs" in content:
        return Found("stream", path, content)
    return None


def read_json(path: Path) -> Any:
    """Return what a JSON file holds; raise a ValueError that names it if it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{str(path)!r} is not valid JSON ({error}); delete it or make it again") from error


def _experiment(folder: Path) -> Found:
    record = read_json(folder / "experiment.json")
    parts: list[Found] = []
    missing: list[str] = []
    if "about" not in record:
        raise ValueError(f"{str(folder)!r} was made by an older version; run that experiment again")
    for step in record["steps"]:
        result = folder / step["result"]
        part = _from_file(result) if result.is_file() else None
        if step["run"] != "bench":
            wanted = len(step["labels"]) * step["seeds"]
            there = 0 if part is None else _count(part.content["runs"], step["labels"])
            if there < wanted and step["run"] == "compare":
                runs = _trials(folder, step)  # the file is written when all of them are there
                if _count(runs, step["labels"]) > there:
                    there, part = _count(runs, step["labels"]), Found("comparison", folder, {"runs": runs})
            if there < wanted:
                missing.append(f"{wanted - there} of {wanted} runs are not there yet")
        if part is None:
            missing.append(f"no result yet of `recsys-topk {step['run']}` ({step['result']})")
        else:
            parts.append(part)
    return Found("experiment", folder, record, tuple(parts), tuple(missing))


def _count(runs: Mapping[str, Sequence[Any]], labels: Sequence[str]) -> int:
    return sum(len(runs.get(label, ())) for label in labels)


def _trials(folder: Path, step: Mapping[str, Any]) -> dict[str, list[Any]]:
    runs: dict[str, list[Any]] = {}
    for label in step["labels"]:
        files = [folder / "trials" / f"{file_name(label)}-s{seed}.json" for seed in range(step["seeds"])]
        there = [read_json(file) for file in files if file.is_file()]
        if there:
            runs[label] = there
    return runs


def _trials_by_name(folder: Path) -> dict[str, list[Any]]:
    runs: dict[str, list[Any]] = {}
    for file in sorted((folder / "trials").glob("*-s*.json")):
        content = read_json(file)
        if "metrics" in content:
            runs.setdefault(file.stem.rpartition("-s")[0], []).append(content)
    return runs
