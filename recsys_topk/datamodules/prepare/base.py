"""The base class of data modules for a user's tables. They are prepared once in a folder and read memory-mapped."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from lightning.pytorch.utilities import rank_zero_info

from recsys_topk.datamodules.base import CascadeDataModule
from recsys_topk.datamodules.prepare.columns import read_columns
from recsys_topk.datamodules.prepare.progress import Progress
from recsys_topk.files import cache_home, make_once
from recsys_topk.tabular.features.description import DATA_PARTS, Description
from recsys_topk.tabular.features.encoder import FILE, FeatureEncoder
from recsys_topk.tabular.tables.times import parse_time
from recsys_topk.types import Array


class PreparedFiles:
    """The files of prepared tables. They are opened on first use.

    Args:
        folder: The prepared folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tables: dict[str, dict[str, Array]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "_tables": {}}

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Counts of the prepared data and of the rows that were dropped."""
        found: dict[str, Any] = json.loads((self.folder / "facts.json").read_text(encoding="utf-8"))
        return found

    @cached_property
    def encoder(self) -> FeatureEncoder:
        """The encoder of the features."""
        return FeatureEncoder.load(self.folder / "features")

    def table(self, name: str) -> dict[str, Array]:
        """Return the memory-mapped columns of a table. They are opened once."""
        if name not in self._tables:
            self._tables[name] = read_columns(self.folder / f"{name}.arrow")
        return self._tables[name]

    def ids(self, name: str) -> Array | None:
        """Return a column of ids as in the source, or None if there is no such column."""
        return self.table(name)["id"] if (self.folder / f"{name}.arrow").is_file() else None


class PreparedDataModule(CascadeDataModule):
    """Base class of data modules that prepare tables once. The name of the prepared folder contains a hash.

    A subclass defines the identity of the data (`_content`), prepares them (`_write`) and opens them (`files`).
    """

    files: ClassVar[type[PreparedFiles]] = PreparedFiles
    cache_dir: str | None = None
    _prepared: PreparedFiles | None = None

    @abstractmethod
    def _content(self) -> tuple[str, str, Mapping[str, Any]]:
        """Return a name of the data for messages, a folder name, and plain values that change when the data change."""

    @abstractmethod
    def _write(self, folder: Path, progress: Progress) -> None:
        """Prepare the data in a folder: empty, or with the files of an interrupted process (`WorkFolder`)."""

    def prepared_files(self) -> PreparedFiles:
        """Return the prepared files. The data are prepared first if necessary."""
        if self._prepared is None:
            self.prepare_data()
        assert self._prepared is not None
        return self._prepared

    @property
    def encoder(self) -> FeatureEncoder:
        """The encoder of raw features."""
        return self.prepared_files().encoder

    @property
    def prepared_folders(self) -> dict[str, Path]:
        """The folder of the prepared data; it contains all splits."""
        return {"prepared": self.prepared_files().folder}

    def prepare_data(self) -> None:
        """Prepare the data if they are not prepared yet. Lightning calls this in one process."""
        self.prepare()

    def prepare(self, progress: Progress | None = None) -> bool:
        """Prepare the data if they are not prepared yet.

        The folder is renamed to its final name when it is complete. A second process waits for the first.

        Args:
            progress: Receives the progress; None = `self.progress`, or a progress bar on a terminal.

        Returns:
            Whether the data were prepared by this call.
        """
        source, name, facts = self._content()
        digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()
        home = cache_home() / "prepared" if self.cache_dir is None else Path(self.cache_dir).expanduser()
        target = home / f"{name}-{digest}"

        def write(folder: Path) -> None:
            rank_zero_info(f"preparing {source} in {target} (once)")
            with self.progress_of() as told:
                self._write(folder, progress or told)

        made = make_once(target, write, resume=True)
        self._prepared = self.files(target)
        for line in self.facts() if made else ():
            rank_zero_info(line)
        return made


def check_cuts(
    val_fraction: float, test_fraction: float, val_from: str | None, test_from: str | None
) -> tuple[int, int] | None:
    """Check the split options. Return the start of validation and of testing in microseconds, or None for fractions."""
    if min(val_fraction, test_fraction) <= 0 or val_fraction + test_fraction >= 1:
        raise ValueError(
            f"val_fraction and test_fraction must be above 0 and leave something for training, got {val_fraction} "
            f"and {test_fraction}"
        )
    if (val_from is None) != (test_from is None):
        raise ValueError("val_from and test_from must be given together; give both dates, or neither")
    return None if val_from is None or test_from is None else (parse_time(val_from), parse_time(test_from))


def guess_lines(
    roles: Mapping[str, str], given: Mapping[str, str | None], description: Description | None, advice: str
) -> list[str]:
    """Return lines that report the guessed columns and features.

    Args:
        roles: The column of each role.
        given: The columns given by the user, by role.
        description: The guessed features; None = they are given.
        advice: What the user can do about the features.
    """
    guessed = [f"{role} = {column}" for role, column in roles.items() if not given.get(role)]
    lines = [f"columns, guessed: {', '.join(guessed)}"] if guessed else []
    if description is not None:
        parts = {part: description.part(part) for part in DATA_PARTS}
        made = [f"{part}: {', '.join(f'{f.name} ({f.kind})' for f in own)}" for part, own in parts.items() if own]
        lines.append(f"features, guessed: {'; '.join(made)}{advice}")
    return lines


def read_features(described: str | Mapping[str, Any]) -> Description | FeatureEncoder:
    """Return the saved encoder if the argument is the folder of one, else the description."""
    if isinstance(described, str) and (Path(described) / FILE).is_file():
        return FeatureEncoder.load(described)
    return Description.read(described)
