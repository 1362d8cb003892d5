"""Finds results to report: experiments, comparisons, streams, benchmarks and single runs, finished or not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from recsys_topk.runs.trials import file_name
from recsys_topk.trust.documents import read_text, read_yaml

LOOKED_FOR = (
    "experiment.json (recsys-topk experiment), comparison.json (compare), stream.json (stream), "
    "a JSON file of bench --json, or metrics.csv next to config.yaml (fit)"
)
Kind = Literal["experiment", "comparison", "stream", "bench", "fit"]


@dataclass(frozen=True)
class Result:
    """A result to report."""

    kind: Kind  # kind of the result
    path: Path  # path of the result
    content: Mapping[str, Any]  # content of its JSON file; for a single run, its configuration
    parts: tuple[Result, ...] = ()  # for an experiment, the results of its steps
    missing: tuple[str, ...] = ()  # missing parts, one sentence each

    @property
    def name(self) -> str:
        """Name of the result in a report."""
        if self.kind == "experiment":
            return f"experiment {self.content['name']} ({self.content['size']})"
        if self.kind == "bench":
            return f"bench {self.content['suite']}: {self.path.name}"
        return f"{self.kind}: {self.path.parent.name if self.path.is_file() else self.path.name}"


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raise one line with the path if the content of a result is not as it should be."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(
            f"{path} is damaged, or was written by another version ({type(error).__name__}: {error}); delete it, or "
            f"create it again"
        ) from error


def find_all(paths: Sequence[str | Path]) -> list[Result]:
    """Return all results in files and folders, in the given order; raise if a path has none."""
    results: list[Result] = []
    for path in map(Path, paths):
        if not path.exists():
            raise FileNotFoundError(f"no file or folder {str(path)!r} to report on; check the path")
        here = list(_find(path))
        if not here:
            raise FileNotFoundError(f"nothing to report in {str(path)!r}; looked for {LOOKED_FOR}")
        results += here
    return results


def _find(path: Path) -> Iterator[Result]:
    records = [path / f"{kind}.json" for kind in ("experiment", "comparison", "stream")]
    if path.is_file():
        yield from _from_file(path)
    elif any(file.is_file() for file in records):
        for file in records:
            if file.is_file():
                yield from _from_file(file)
                if file.name == "experiment.json":
                    return
    elif (path / "trials").is_dir():
        runs = _trials(path)
        if runs:
            note = "the comparison is not finished (there is no comparison.json); this section shows the finished runs"
            yield Result("comparison", path, {"runs": runs}, missing=(note,))
    elif (path / "metrics.csv").is_file() and (path / "config.yaml").is_file():
        text = read_text(path / "config.yaml")
        yield Result("fit", path, {"config": read_yaml(text, str(path / "config.yaml")), "text": text})
    else:
        for entry in sorted(path.iterdir()):
            if not entry.name.startswith(".") and (entry.is_dir() or entry.suffix == ".json"):
                yield from _find(entry)


def _from_file(path: Path) -> Iterator[Result]:
    """Yield the results of a JSON file; nothing if it is a file of another kind."""
    content = _read_json(path) if path.suffix == ".json" else {}
    keys = set(content if isinstance(content, dict) else ())
    if {"suite", "rows"} <= keys:
        yield Result("bench", path, content)
    elif path.name == "experiment.json" and "steps" in keys:
        with naming(path):
            yield _experiment(path.parent, content)
    elif "runs" in keys:
        yield Result("comparison" if "rows" in keys else "stream", path, content)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{str(path)!r} is not valid JSON ({error}); delete it, or create it again") from error


def _experiment(folder: Path, record: Mapping[str, Any]) -> Result:
    parts: list[Result] = []
    missing: list[str] = []
    if "about" not in record:
        raise ValueError(f"{str(folder)!r} was written by an older version; run the experiment again")
    for step in record["steps"]:
        result = folder / step["result"]
        here = list(_from_file(result)) if result.is_file() else []
        if step["run"] != "bench":
            labels, wanted = step["labels"], len(step["labels"]) * step["seeds"]
            finished = _count(here[0].content["runs"], labels) if here else 0
            if finished < wanted and step["run"] == "compare":  # comparison.json is written after the last run
                by_file = _trials(folder)
                runs = {label: by_file[file_name(label)] for label in labels if file_name(label) in by_file}
                if _count(runs, labels) > finished:
                    finished, here = _count(runs, labels), [Result("comparison", folder, {"runs": runs})]
            if finished < wanted:
                missing.append(f"{wanted - finished} of {wanted} runs are not finished")
        if not here:
            missing.append(f"`recsys-topk {step['run']}` has no result yet ({step['result']})")
        parts += here
    return Result("experiment", folder, record, tuple(parts), tuple(missing))


def _count(runs: Mapping[str, Sequence[Any]], labels: Sequence[str]) -> int:
    return sum(len(runs.get(label, ())) for label in labels)


def _trials(folder: Path) -> dict[str, list[Any]]:
    """Return the runs of a comparison by file name without the seed."""
    runs: dict[str, list[Any]] = {}
    for file in sorted((folder / "trials").glob("*-s*.json")):
        content = _read_json(file)
        if "metrics" in content:
            runs.setdefault(file.stem.rpartition("-s")[0], []).append(content)
    return runs
