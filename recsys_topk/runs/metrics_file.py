"""metrics.csv: one row per logged step, readable whenever the run is killed."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from recsys_topk.files import csv_text, naming_disk_errors, write_whole


class MetricsFile(Logger):  # type: ignore[misc]  # lightning is untyped here
    """Logs to `metrics.csv` in the run directory, with sorted columns; a missing value is empty.

    Every row is written before the next step starts. A new column rewrites the file atomically. Rows before the step
    `keep_before` are kept, later ones are `dropped` and logged again; None = a new file.
    """

    def __init__(self, folder: Path, keep_before: int | None = None) -> None:
        super().__init__()
        self.path = Path(folder) / "metrics.csv"
        rows = [] if keep_before is None else read_rows(self.path)
        kept = [row for row in rows if row["step"] and int(row["step"]) < (keep_before or 0)]
        self.dropped = len(rows) - len(kept)
        self.columns = sorted({name for row in kept for name, value in row.items() if value})
        if kept:
            write_whole(self.path, csv_text(kept, self.columns))
        elif keep_before is not None:
            self.path.unlink(missing_ok=True)

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.path.parent.name

    @property
    def version(self) -> str:
        """Empty: a run has one version."""
        return ""

    @property
    def save_dir(self) -> str:
        """The run directory."""
        return str(self.path.parent)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Log nothing: config.yaml contains the options."""

    @rank_zero_only  # type: ignore[untyped-decorator]  # lightning is untyped here
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Append a row."""
        row = {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
        row["step"] = step
        if set(row) - set(self.columns):
            rows = read_rows(self.path)
            self.columns = sorted({*self.columns, *row})
            write_whole(self.path, csv_text([*rows, row], self.columns))
        else:
            with naming_disk_errors(self.path), self.path.open("a", newline="", encoding="utf-8") as file:
                file.write(csv_text([row], self.columns, head=False))


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a metrics file, without an incomplete last line. Raise if a value is not a number."""
    if not path.is_file():
        return []
    rows = []
    try:
        text = path.read_text(encoding="utf-8")
        for row in csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1])):
            rows.append({name: value or "" for name, value in row.items()})
            int(row["step"] or 0), [float(value) for value in rows[-1].values() if value]
    except (ValueError, KeyError, TypeError, csv.Error) as error:
        where = f"line {len(rows) + 1} of {path}"
        raise ValueError(f"{where} is damaged ({error}); restore the file, or remove it to continue without") from error
    return rows
