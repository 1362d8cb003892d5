"""Tables of a report: columns that know how they are written, and rows of plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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
