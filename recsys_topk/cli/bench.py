"""`recsys-topk bench SUITE`: measure, print, save, plot, and compare with an earlier run."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from recsys_topk.bench.result import BenchResult
from recsys_topk.cli.console import echo, warn
from recsys_topk.runs.files import write_whole

SUITES = {
    "operators": "every top-k operator, forward and backward",
    "losses": "every loss, forward and backward",
    "data": "batches from disk, negatives",
    "step": "a training step of the cascade",
    "paper": "a pass with a model around it, as the paper timed operators",
}
PLOTTED = ("operators", "losses")


def main(argv: list[str]) -> int:
    """Run one suite; return 0, 1 if `--check` found a row that is slower than the baseline file, or 2 on misuse."""
    parser = argparse.ArgumentParser(prog="recsys-topk bench", description="Measure how long things take.")
    commands = parser.add_subparsers(dest="suite", required=True, metavar="SUITE")
    chosen = argv[0] if argv and argv[0] in SUITES else None
    for name, summary in SUITES.items():
        command = commands.add_parser(name, help=summary, description=f"Measure {summary}.")
        if name == chosen:
            _suite(name).add_arguments(command)
        command.add_argument("--json", type=Path, metavar="FILE", help="write the result, for --check and reports")
        command.add_argument(
            "--check", type=Path, metavar="FILE", help="fail where a ratio exceeds that of this result"
        )
        command.add_argument("--tolerance", type=float, default=0.5, help="by more than this share (default 0.5)")
        if name in PLOTTED:
            command.add_argument("--plot", type=Path, metavar="FILE.png", help="time over size, both logarithmic")
    args = parser.parse_args(argv)
    try:
        result = _suite(args.suite).run(args)
        echo(result.text())
        if args.json is not None:
            write_whole(args.json, result.to_json() + "\n")
        if getattr(args, "plot", None) is not None:
            plot(result, args.plot)
        if args.check is None:
            return 0
        slower = regressions(json.loads(args.check.read_text())["rows"], result.rows, args.tolerance)
    except (ValueError, OSError, ImportError) as error:
        warn(f"recsys-topk bench: {error}")
        return 2
    for line in slower:
        warn(line)
    if not slower:
        echo(f"check: no ratio exceeds {args.check} by more than {args.tolerance:.0%}")
    return 1 if slower else 0


def _suite(name: str) -> ModuleType:
    return importlib.import_module(f"recsys_topk.bench.{name}")


def regressions(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], tolerance: float) -> list[str]:
    """Return a sentence for every row whose ratio has grown by more than `tolerance`, and for none that is new.

    Rows are matched by all their text. Ratios to a baseline of the same run travel between machines; times do not.

    Example:
        >>> regressions([{"name": "a", "ratio": 2.0}], [{"name": "a", "ratio": 3.2}], 0.5)
        ['slower: a, ratio 3.20 against 2.00 (+60%)']
    """
    known = {_key(row): float(row["ratio"]) for row in before if row.get("ratio") is not None}
    if not known:
        raise ValueError("the file given to --check holds no row with a ratio; write one with --json")
    lines = []
    for row in after:
        old = known.get(_key(row))
        if old is not None and row.get("ratio") is not None and row["ratio"] > old * (1.0 + tolerance):
            growth = row["ratio"] / old - 1.0
            lines.append(f"slower: {' '.join(_key(row))}, ratio {row['ratio']:.2f} against {old:.2f} (+{growth:.0%})")
    return lines


def _key(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(value for value in row.values() if isinstance(value, str))


def plot(result: BenchResult, path: Path) -> None:
    """Draw milliseconds over the number of scores, one line a name, both axes logarithmic."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install 'recsys-topk[plot]'") from error
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    points: dict[str, dict[int, float]] = {}
    for row in result.rows:
        lists, items, _ = (int(part) for part in str(row["shape"]).split("x"))
        points.setdefault(str(row["name"]), {})[lists * items] = float(row["ms"])
        points.setdefault("plain cross-entropy", {})[lists * items] = float(row["baseline ms"])
    for name, line in sorted(points.items()):
        style = "k--" if name == "plain cross-entropy" else "o-"
        axes.loglog(sorted(line), [line[size] for size in sorted(line)], style, label=name, markersize=3)
    axes.set_xlabel("scores in the batch (lists x items)")
    axes.set_ylabel("forward + backward, ms of CPU time")
    axes.set_title(f"bench {result.suite}: {result.machine.get('cpu', '')}")
    axes.legend(fontsize="small", ncols=2)
    figure.savefig(path, dpi=150)
