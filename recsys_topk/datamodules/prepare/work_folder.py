"""The working files of a preparation and its journal, from which a later process resumes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from recsys_topk.datamodules.prepare.growing import GrowingColumns
from recsys_topk.files import write_whole
from recsys_topk.types import Array

JOURNAL: Final = "journal.json"
NAME: Final = "work-2"
"""Name of the folder. Change it if the content of the files changes, so that files of older releases are not used."""


class WorkFolder:
    """The folder of working files in the folder that is being prepared.

    The journal is written after each finished part. Rows that were appended to `columns` after the last `save` are
    dropped when a later process opens the folder. Other files in the folder are results of the last step, which
    runs again, or were written by an older release; they are removed.

    Args:
        folder: The folder to prepare: empty, or with the files of an interrupted process.

    Attributes:
        path: The work folder.
        saved: The state given to the last `save`; empty at the beginning.
        columns: Columns on disk.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> folder = Path(tempfile.mkdtemp())
        >>> work = WorkFolder(folder)
        >>> work.columns.append("train.user", np.array([1, 2]))
        >>> work.save({"parts": 1})
        >>> work.columns.append("train.user", np.array([3]))  # the process ends here
        >>> work.columns.close()
        >>> again = WorkFolder(folder)
        >>> again.saved["parts"], again.table("train")["user"].tolist()
        (1, [1, 2])
        >>> again.finish({"users": 2})
        >>> [path.name for path in folder.iterdir()]
        ['facts.json']
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / NAME
        self.path.mkdir(exist_ok=True)
        for left in folder.iterdir():
            if left != self.path:
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        journal = self.path / JOURNAL
        self.saved: dict[str, Any] = json.loads(journal.read_text(encoding="utf-8")) if journal.is_file() else {}
        self.columns = GrowingColumns(self.path, self.saved.get("columns"))

    def save(self, state: Mapping[str, Any]) -> None:
        """Write the state (plain values) and the lengths of the columns to the journal."""
        self.saved = {**state, "columns": self.columns.state()}
        write_whole(self.path / JOURNAL, json.dumps(self.saved))

    def table(self, name: str) -> dict[str, Array]:
        """Return the columns whose names begin with the name of the table and a dot."""
        found = [column for column in self.columns.names if column.startswith(f"{name}.")]
        return {column.removeprefix(f"{name}."): self.columns.column(column) for column in found}

    def finish(self, facts: Mapping[str, Any]) -> None:
        """Remove the work folder and write the facts of the prepared data."""
        self.columns.close()
        shutil.rmtree(self.path)
        write_whole(self.folder / "facts.json", json.dumps(facts, indent=1) + "\n")
