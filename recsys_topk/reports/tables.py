"""Tables of a report: rows of plain values by column, and their formatting."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recsys_topk.reports.verdicts import short

COUNTS = ("seconds", "seeds", "values")  # columns that are shown without decimals


@dataclass(frozen=True)
class ResultTable:
    """A table with a caption above and notes below."""

    caption: str  # caption
    rows: Sequence[Mapping[str, Any]]  # values by column; a row may omit columns
    notes: Sequence[str] = ()  # sentences below the table
    # Number of decimals by column; None = three significant digits. The default is four.
    digits: Mapping[str, int | None] = field(default_factory=dict)
    folded: bool = False  # whether the table is collapsed by default

    @property
    def columns(self) -> list[str]:
        """The columns in which at least one row has a value."""
        filled = {column for row in self.rows for column, value in row.items() if value not in (None, "")}
        named = dict.fromkeys(column for row in self.rows for column in row)
        return [column for column in named if column in filled and column != "#"]  # "#": the anchor of the row

    def kind(self, column: str) -> str:
        """Return ``text``, ``number``, or ``paper`` for a number that the paper reports."""
        if column.startswith("paper, "):
            return "paper"
        return "text" if any(isinstance(row.get(column), str) for row in self.rows) else "number"

    def show(self, column: str, value: Any) -> str:
        """Return a value as text; empty for None.

        Example:
            >>> table = ResultTable("", [], digits={"ms": None})
            >>> table.show("recall", 0.51237), table.show("ms", 1234.5), table.show("seeds", 3), table.show("p", None)
            ('0.5124', '1,230', '3', '')
        """
        if value is None or isinstance(value, str):
            return value or ""
        digits = self.digits.get(column, 0 if column in COUNTS else 4)
        return short(value) if digits is None else f"{value:.{digits}f}"


def short_name(metric: str) -> str:
    """Return the short name of a metric.

    Example:
        >>> short_name("test/joint_recall@10@20/200")
        'joint@10@20'
        >>> short_name("test/joint_recall@10@20/200-in_batch")
        'joint@10@20, in_batch'
    """
    name, _, lists = re.sub("^(test|val)/", "", metric).partition("/")
    source = lists.partition("-")[2]
    return name.replace("_recall", "").replace("_", " ") + (f", {source}" if source else "")


def heading(metric: str) -> str:
    """Return the short name of a metric with a space at which the line can break, for a column heading.

    Example:
        >>> heading("test/retrieval_recall@10@30/200")
        'retrieval @10@30'
    """
    return short_name(metric).replace("@", " @", 1)
