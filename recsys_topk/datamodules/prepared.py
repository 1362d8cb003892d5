"""What data modules of a user's own tables share: prepared once into a folder, read through mapped files."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from lightning.pytorch.utilities import rank_zero_info

from recsys_topk.datamodules.arrow_files import read_columns
from recsys_topk.datamodules.base import CascadeDataModule
from recsys_topk.datamodules.encoding import FILE, FeatureEncoder
from recsys_topk.datamodules.features import Description
from recsys_topk.datamodules.folders import cache_home, make_once
from recsys_topk.datamodules.progress import Progress
from recsys_topk.datamodules.times import parse_time

Array = npt.NDArray[Any]


class PreparedFiles:
    """The files of prepared tables, opened when they are first used.

    Args:
        folder: The prepared folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder}

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Counts, and what was left out."""
        found: dict[str, Any] = json.loads((self.folder / "facts.json").read_text(encoding="utf-8"))
        return found

    @cached_property
    def encoder(self) -> FeatureEncoder:
        """How the features are encoded."""
        return FeatureEncoder.load(self.folder / "features")

    def table(self, name: str) -> dict[str, Array]:
        """Return the columns of a table."""
        return read_columns(self.folder / f"{name}.arrow")

    def ids(self, name: str) -> Array | None:
        """Return a column of ids as the source has them; None = there is none."""
        return self.table(name)["id"] if (self.folder / f"{name}.arrow").is_file() else None


class PreparedDataModule(CascadeDataModule):
    """Base class of data modules that prepare tables once, into a folder named after what is prepared.

    A subclass says what is prepared (`_content`), prepares it (`_write`) and opens it (`files`).
    """

    files: ClassVar[type[PreparedFiles]] = PreparedFiles
    resumes: ClassVar[bool] = False
    """Whether `_write` goes on where an interrupted process stopped."""

    cache_dir: str | None = None
    _prepared: PreparedFiles | None = None

    @abstractmethod
    def _content(self) -> tuple[str, str, Mapping[str, Any]]:
        """Return what messages call the data, a name for the folder, and plain values that change if the data do."""

    @abstractmethod
    def _write(self, folder: Path, progress: Progress) -> None:
        """Prepare the data in a folder."""

    def prepared_files(self) -> PreparedFiles:
        """Return the prepared files; they are made first if they are not there."""
        if self._prepared is None:
            self.prepare_data()
        assert self._prepared is not None
        return self._prepared

    @property
    def encoder(self) -> FeatureEncoder:
        """How raw features become ids and values."""
        return self.prepared_files().encoder

    @property
    def prepared_folders(self) -> dict[str, Path]:
        """The one folder of all splits."""
        return {"prepared": self.prepared_files().folder}

    def prepare_data(self) -> None:
        """Prepare the data if they are not prepared yet; called by Lightning in one process."""
        self.prepare()

    def prepare(self, progress: Progress | None = None) -> bool:
        """Prepare the data if they are not prepared yet.

        The folder appears by a rename when it is whole, and a second process waits for the first.

        Args:
            progress: Told how far it is; None = `self.progress`, or a progress bar on a terminal.

        Returns:
            Whether something had to be prepared.
        """
        source, name, facts = self._content()
        digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()
        home = cache_home() / "prepared" if self.cache_dir is None else Path(self.cache_dir).expanduser()
        target = home / f"{name}-{digest}"

        def write(folder: Path) -> None:
            rank_zero_info(f"preparing {source} in {target} (once)")
            with self.progress_of() as told:
                self._write(folder, progress or told)

        made = make_once(target, write, resume=self.resumes)
        self._prepared = self.files(target)
        for line in self.facts() if made else ():
            rank_zero_info(line)
        return made


def check_cuts(
    val_fraction: float, test_fraction: float, val_from: str | None, test_from: str | None
) -> tuple[int, int] | None:
    """Return the dates at which validation and testing begin, in microseconds, or None for fractions; check both."""
    if min(val_fraction, test_fraction) <= 0 or val_fraction + test_fraction >= 1:
        raise ValueError(
            f"val_fraction and test_fraction must be above 0 and leave something for training, got {val_fraction} "
            f"and {test_fraction}"
        )
    if (val_from is None) != (test_from is None):
        raise ValueError("val_from and test_from go together: give both dates, or neither")
    return None if val_from is None or test_from is None else (parse_time(val_from), parse_time(test_from))


def read_features(described: str | Mapping[str, Any]) -> Description | FeatureEncoder:
    """Return what `features` says: a saved encoder, if it is the folder of one, or a description."""
    if isinstance(described, str) and (Path(described) / FILE).is_file():
        return FeatureEncoder.load(described)
    return Description.read(described)


def gather(table: Mapping[str, Array], kind: str, rows: Array, dtype: Any) -> Array:
    """Return some rows of the ids or values of a table; width 0 if it has none."""
    if kind not in table:
        return np.empty((rows.size, 0), dtype=dtype)
    return np.ascontiguousarray(table[kind][rows], dtype=dtype)
