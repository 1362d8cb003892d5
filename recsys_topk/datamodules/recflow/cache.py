"""The Arrow cache: each day of a data set as three memory-mapped Hugging Face `datasets` files, prepared once."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from recsys_topk.datamodules.prepare.columns import read_columns
from recsys_topk.datamodules.recflow.files import RecFlowFiles
from recsys_topk.datamodules.recflow.layout import (
    HISTORY_FEATURES,
    ITEM_FEATURES,
    REQUEST_IDS,
    padding_id,
    stored_offset,
)
from recsys_topk.files import find_damage, make_once
from recsys_topk.tabular.arrow import write_columns
from recsys_topk.tabular.ids.vocabulary import Vocabulary
from recsys_topk.tabular.locations import version_of
from recsys_topk.tabular.schema import VARIANT
from recsys_topk.types import Array

_FORMAT: Final = 1
"""Version of the cache. Increase it if the content changes, so that older caches are not read."""

_TABLES: Final = ("requests", "items", "views")


class DayCache:
    """The prepared days of a data set.

    The folder name of a day contains a fingerprint of its source files (name, size, modification time), of the id
    counts and of the format. A changed source is therefore prepared again, and a new day does not affect the others.

    Args:
        files: The source files.
        folder: Folder for the caches of all data sets.
    """

    def __init__(self, files: RecFlowFiles, folder: str | Path) -> None:
        self.files = files
        source = files.folder.resolve()
        name = source.parent.name if source.name == "data" else source.name
        key = hashlib.blake2b(str(source).encode(), digest_size=4).hexdigest()
        self.folder = Path(folder).expanduser() / f"{name}-{key}"

    def path(self, day: str) -> Path:
        """Return the folder of a prepared day, which may not exist yet."""
        facts = {
            "format": _FORMAT,
            "counts": self.files.counts,
            "files": {name: version_of(path) for name, path in self.files.paths(day).items()},
        }
        digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()
        return self.folder / f"{day}-{digest}"

    def missing(self, days: Sequence[str]) -> list[str]:
        """Return those of `days` that are not prepared yet, or damaged."""
        paths = {day: self.path(day) for day in days}
        return [day for day, path in paths.items() if not path.is_dir() or find_damage(path)]

    def prepare(self, days: Sequence[str], progress: Callable[[str, Path], None] | None = None) -> None:
        """Prepare the missing days, one at a time. Memory holds one day.

        A day is renamed into place when it is complete, so a killed or failed process loses only the day that it was
        preparing. A second process waits for the day that the first one prepares and continues with the next.

        Args:
            days: The days to prepare.
            progress: Called with each day and its folder when it is ready.
        """
        for day in days:
            target = self.path(day)
            if make_once(target, partial(self._write, day)):
                for older in self.folder.glob(f"{day}-*"):
                    if older != target:
                        shutil.rmtree(older, ignore_errors=True)
            if progress is not None:
                progress(day, target)

    def open(self, day: str, vocabularies: Mapping[str, Vocabulary] | None = None) -> PreparedDay:
        """Return a prepared day. Ids are mapped by `vocabularies` where given. Raise if the day is not prepared."""
        path = self.path(day)
        if not path.is_dir():
            raise FileNotFoundError(f"day {day} is not prepared ({path} is missing); call prepare_data() first")
        return PreparedDay(path, day, vocabularies)

    def _write(self, day: str, folder: Path) -> None:
        columns = self.files.read(day)
        for name in _TABLES:
            write_columns(folder / f"{name}.arrow", getattr(columns, name))


class PreparedDay:
    """A day of the cache. Columns are views of the memory-mapped files, opened at first use.

    Args:
        folder: The prepared folder.
        day: Its date.
        vocabularies: Vocabularies by field. Ids of these fields are mapped to table rows when the day is opened; all
            other ids are stored as table rows.
    """

    def __init__(self, folder: Path, day: str, vocabularies: Mapping[str, Vocabulary] | None = None) -> None:
        self.folder = folder
        self.day = day
        self.vocabularies = dict(vocabularies or {})

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "day": self.day, "vocabularies": self.vocabularies}

    def __len__(self) -> int:
        return len(self.requests["request_id"])

    @cached_property
    def stored_requests(self) -> dict[str, Array]:
        """The columns of the requests, with stored ids; see `files.DayColumns`."""
        return read_columns(self.folder / "requests.arrow")

    @cached_property
    def requests(self) -> dict[str, Array]:
        """The columns of the requests, with ids as table rows."""
        stored = self.stored_requests
        return {**stored, **{name: self._rows(name, stored[name]) for name in REQUEST_IDS if name in self.vocabularies}}

    @cached_property
    def catalogue(self) -> dict[str, Array]:
        """The columns of the day's items, sorted by `item_id`, with stored ids."""
        return read_columns(self.folder / "items.arrow")

    @cached_property
    def stored_views(self) -> dict[str, Array]:
        """The columns of the distinct views, with stored ids."""
        return read_columns(self.folder / "views.arrow")

    @cached_property
    def first_rows(self) -> Array:
        """(C,) int64, the first catalogue row of the same item; differs from the row only for variants."""
        item_id = self.catalogue["item_id"]
        return np.searchsorted(item_id[: np.searchsorted(item_id, VARIANT)], item_id % VARIANT)

    @cached_property
    def item_rows(self) -> Array:
        """(C, F_i) int32, the features of the catalogue as table rows, for gathering."""
        rows = np.empty((len(self.catalogue["item_id"]), len(ITEM_FEATURES)), dtype=np.int32)
        for i, name in enumerate(ITEM_FEATURES):
            rows[:, i] = self._rows(name, self.catalogue[name])
        return rows

    @cached_property
    def view_rows(self) -> Array:
        """(V + 1, F_h) int64, the distinct views, and the padding row last, so that index -1 selects it."""
        views = self.stored_views
        rows = np.empty((len(views[HISTORY_FEATURES[0]]) + 1, len(HISTORY_FEATURES)), dtype=np.int64)
        for i, name in enumerate(HISTORY_FEATURES):
            rows[:-1, i] = self._rows(name, views[name])
            rows[-1, i] = self.vocabularies[name].padding if name in self.vocabularies else padding_id(name)
        return rows

    def release(self) -> None:
        """Free the tables of items and views, which are copies in memory. They are loaded again when needed."""
        for name in ("first_rows", "item_rows", "view_rows"):
            self.__dict__.pop(name, None)

    def _rows(self, field: str, stored: Array) -> Array:
        """Return stored ids as rows of the table of `field`."""
        if field not in self.vocabularies:
            return stored
        return self.vocabularies[field].encode(stored.astype(np.int64) - stored_offset(field))

    @property
    def nbytes(self) -> int:
        """Size on disk in bytes."""
        return sum(path.stat().st_size for path in self.folder.glob("*.arrow"))
