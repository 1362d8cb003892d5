"""Tables of a report: columns that know how they are written, and rows of plain values."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from recsys_topk.reports.verdicts import short

Value = str | int | float | None


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        name: Heading.
        kind: ``text``, ``number``, or ``paper`` for a number that the paper reports.
        digits: Digits after the point; None = three that matter.
    """

    name: str
    kind: Literal["text", "number", "paper"] = "number"
    digits: int | None = 4

    def show(self, value: Value) -> str:
        """Return a value as text; nothing for None.

        Example:
            >>> Column("recall").show(0.51237), Column("ms", digits=None).show(1234.5), Column("p").show(None)
            ('0.5124', '1,230', '')
        """
        if value is None:
            return ""
        if isinstance(value, str):
            return value
        if self.digits is not None:
            return f"{value:.{self.digits}f}"
        return short(value)


@dataclass(frozen=True)
class Table:
    """A table with its caption and notes below; every row has a value for each column."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Value]]
    notes: Sequence[str] = ()


def metric_names(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Return the names of the metrics of runs, the joint recall first."""
    return list(next(iter(runs.values()))[0]["metrics"])


def short_name(metric: str) -> str:
    """Return the name of a metric for people.

    Example:
        >>> short_name("test/joint_recall@10@20/200")
        'joint@10@20'
    """
    return metric.removeprefix("test/").partition("/")[0].replace("_recall", "").replace("_", " ")


def heading(metric: str) -> str:
    """Return the name of a metric with a place to break the line, for the head of a column.

    Example:
        >>> heading("test/retrieval_recall@10@30/200")
        'retrieval @10@30'
    """
    return short_name(metric).replace("@", " @", 1)


def summary_rows(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return a row for each competitor of a comparison, also of one that is not finished.

    ``joint`` is the mean over seeds of the first metric, ``+-`` its standard deviation, ``p`` that of a paired
    two-sided t-test against the first competitor over the seeds that both have, ``alone`` the means of the other
    metrics by name, ``seconds`` and ``seeds`` what they say.
    """
    from recsys_topk.cli.compare import paired_p_value

    joint, *alone = metric_names(runs)
    first = next(iter(runs))
    seeds_of_first = _by_seed(runs[first], joint)
    rows = []
    for label, found in runs.items():
        values = _by_seed(found, joint)
        shared = [values[seed] - seeds_of_first[seed] for seed in values if seed in seeds_of_first]
        rows.append(
            {
                "run": label,
                "joint": statistics.fmean(values.values()),
                "+-": statistics.stdev(values.values()) if len(values) > 1 else None,
                "p": None if label == first else paired_p_value(shared),
                "alone": {name: statistics.fmean(run["metrics"][name] for run in found) for name in alone},
                "seconds": statistics.fmean(run["seconds"] for run in found),
                "seeds": len(values),
            }
        )
    return rows


def _by_seed(runs: Sequence[Mapping[str, Any]], metric: str) -> dict[int, float]:
    return {run.get("seed", number): run["metrics"][metric] for number, run in enumerate(runs)}
