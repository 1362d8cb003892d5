"""What a benchmark suite returns: rows with ratios to a named baseline, and the machine they were measured on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recsys_topk.runs.provenance import provenance
from recsys_topk.text import table


def machine() -> dict[str, Any]:
    """Return the facts that a timing depends on."""
    import torch

    facts = provenance([])
    versions = {name: facts["versions"][name] for name in ("python", "torch", "numpy")}
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {**facts["machine"], "load": round(os.getloadavg()[0], 2), **versions, "gpu": gpu}


@dataclass
class BenchResult:
    """The outcome of one suite."""

    suite: str  # name of the suite
    baseline: str  # what a ratio of 1 means
    rows: Sequence[Mapping[str, Any]]  # one measurement each: labels (str), then numbers
    notes: Sequence[str] = ()  # sentences to read beside the table: method, growth exponents, what was skipped and why
    machine: Mapping[str, Any] = field(default_factory=machine)  # see `machine`

    def text(self) -> str:
        """Return the table with its baseline, notes and machine, for a terminal."""
        facts = ", ".join(f"{key} {value}" for key, value in self.machine.items() if value is not None)
        return "\n".join(
            [f"bench {self.suite}: ratio 1 = {self.baseline}", "", table(self.rows), "", *self.notes, facts]
        )

    def to_json(self) -> str:
        """Return everything as JSON."""
        return json.dumps(vars(self), indent=1) + "\n"


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
