"""What a benchmark suite returns: rows with ratios to a named baseline, and the machine they were measured on."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recsys_topk.cli.console import table
from recsys_topk.runs.provenance import cpu_model


def machine() -> dict[str, Any]:
    """Return the facts that a timing depends on."""
    import numpy
    import torch

    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
    }


@dataclass
class BenchResult:
    """The outcome of one suite.

    Attributes:
        suite: Name of the suite.
        baseline: What a ratio of 1 means.
        rows: One measurement each: labels (str), then numbers.
        notes: Sentences to read beside the table: method, growth exponents, what was skipped and why.
        machine: See `machine`.
    """

    suite: str
    baseline: str
    rows: Sequence[Mapping[str, Any]]
    notes: Sequence[str] = ()
    machine: Mapping[str, Any] = field(default_factory=machine)

    def text(self) -> str:
        """Return the table with its baseline, notes and machine, for a terminal."""
        facts = ", ".join(f"{key} {value}" for key, value in self.machine.items() if value is not None)
        return "\n".join(
            [f"bench {self.suite}: ratio 1 = {self.baseline}", "", table(self.rows), "", *self.notes, facts]
        )

    def to_json(self) -> str:
        """Return everything as JSON."""
        plain = {
            "suite": self.suite,
            "baseline": self.baseline,
            "rows": [dict(row) for row in self.rows],
            "notes": list(self.notes),
            "machine": dict(self.machine),
        }
        return json.dumps(plain, indent=1)
