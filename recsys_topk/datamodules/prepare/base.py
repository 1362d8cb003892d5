"""The base class of data modules for a user's tables. They are prepared once in a folder and read memory-mapped."""

from __future__ import annotations

import hashlib
import json
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from typing_extensions import Unpack

from recsys_topk.datamodules.base import BatchSize, CascadeDataModule, LoaderOptions, NegativeOptions
from recsys_topk.datamodules.prepare.check import check_prepared
from recsys_topk.datamodules.prepare.columns import find_table, read_table
from recsys_topk.datamodules.prepare.engine.base import Engine
from recsys_topk.datamodules.prepare.engine.duck import DuckEngine
from recsys_topk.datamodules.prepare.plan import PreparationPlan
from recsys_topk.datamodules.prepare.progress import Progress
from recsys_topk.files import cache_home, find_damage, make_once
from recsys_topk.tabular.features.description import DATA_PARTS, Description
from recsys_topk.tabular.features.encoder import FILE, FeatureEncoder
from recsys_topk.tabular.schema import LabelKind, Outline, Part, Schema
from recsys_topk.tabular.tables.times import parse_time
from recsys_topk.types import Array

_MODULE_NAMES: Final = frozenset(dir(nn.ModuleDict()))
"""Names that an embedding table cannot have: it becomes an entry of such a module."""


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
            place = find_table(self.folder, name)
            if place is None:
                raise FileNotFoundError(f"{self.folder} has no table {name!r}; prepare the data again")
            self._tables[name] = read_table(place)
        return self._tables[name]

    def ids(self, name: str) -> Array | None:
        """Return a column of ids as in the source, or None if there is no such column."""
        return None if find_table(self.folder, name) is None else self.table(name)["id"]


class PreparedOptions(LoaderOptions, total=False):
    """Options of all data modules for a user's tables; see `PreparedDataModule`."""

    val_fraction: float
    test_fraction: float
    val_from: str | None
    test_from: str | None
    split_seed: int
    features: str | dict[str, Any] | None
    types: dict[str, str] | None
    batch_size: BatchSize
    history_length: int
    cache_dir: str | None
    memory: str | None
    engine: Literal["duckdb", "spark"]
    spark: dict[str, Any] | None


class PreparedDataModule(CascadeDataModule):
    """Base class of data modules that prepare tables once. The name of the prepared folder contains a hash.

    A subclass defines what to prepare (`plan`), how (`preparation`), and the meaning of its labels (`label_meaning`).

    Args:
        val_fraction: Share of the data for validation, unless the validation data are given.
        test_fraction: Share of the data for testing, the newest if they are split by time.
        val_from: Date at which validation begins, e.g. ``"2024-02-01"`` (UTC). Use it with `test_from` instead of
            the fractions.
        test_from: Date at which testing begins.
        split_seed: Seed of the random part of the split: which of a user's interactions at the same time is the last,
            which lists are for testing in a split by fraction. `seed` does not change the split.
        features: The description of the features (`Description`): a YAML file or a mapping; or the folder of a saved
            encoder, to use its vocabularies; None = guessed, and reported.
        types: Types of columns of text files that are guessed wrongly, e.g. ``{"user_id": "string"}``.
        batch_size: Requests per training batch and process, or ``"auto"``; see `CascadeDataModule`.
        history_length: Maximum length of the history; the newest items are kept.
        cache_dir: Folder of the prepared data; None = in the user's cache folder.
        memory: Memory of the engine that prepares the data, e.g. ``"4GB"``; None = 100 MB per processor, at most
            a quarter of the machine's. Larger data are sorted on disk.
        engine: What prepares the data: ``"duckdb"`` on one machine, or ``"spark"`` (extra `spark` and Java 17; row
            groups of Parquet files are read in parallel).
        spark: Options of the Spark session: ``{"master": ..., "conf": {...}, "work": FOLDER}``, where `work` is a
            folder that all executors see; None = the running session, or a local one.
        options: Options of every data module; see `CascadeDataModule`.
    """

    files: ClassVar[type[PreparedFiles]]
    preparation: ClassVar[type[Any]]
    """Takes a plan, the folder to prepare and an engine; it has a method `run`."""
    format: ClassVar[int]
    """Version of the prepared files. Increase it if their content changes, so that older files are not read."""
    guess_advice: ClassVar[str]
    """What the user can do about guessed features, for a message."""

    root: Any = None
    given_columns: Mapping[str, str | None]
    """The columns given by the user, by role; None = guess."""

    def __init__(
        self,
        *,
        val_fraction: float = 0.1,
        test_fraction: float = 0.1,
        val_from: str | None = None,
        test_from: str | None = None,
        split_seed: int = 0,
        features: str | dict[str, Any] | None = None,
        types: dict[str, str] | None = None,
        batch_size: BatchSize = 256,
        history_length: int = 50,
        cache_dir: str | None = None,
        memory: str | None = None,
        engine: Literal["duckdb", "spark"] = "duckdb",
        spark: dict[str, Any] | None = None,
        **options: Unpack[NegativeOptions],
    ) -> None:
        super().__init__(batch_size=batch_size, **options)
        if min(val_fraction, test_fraction) <= 0 or val_fraction + test_fraction >= 1:
            raise ValueError(
                f"val_fraction and test_fraction must be above 0 and leave something for training, got {val_fraction} "
                f"and {test_fraction}"
            )
        if (val_from is None) != (test_from is None):
            raise ValueError("val_from and test_from must be given together; give both dates, or neither")
        if split_seed < 0:
            raise ValueError(f"split_seed must not be negative, got {split_seed}")
        if history_length < 1:
            raise ValueError(f"history_length must be at least 1, got {history_length}")
        self.history_length, self.cache_dir, self._memory = history_length, cache_dir, memory
        self._engine, self._spark = engine, spark
        self._fractions, self._split_seed = (val_fraction, test_fraction), split_seed
        self._dates = None if val_from is None or test_from is None else (parse_time(val_from), parse_time(test_from))
        self._described, self._types = features, types
        self._prepared: PreparedFiles | None = None

    @property
    @abstractmethod
    def plan(self) -> PreparationPlan:
        """What to prepare: tables, columns, features and splits. Reads the first rows of the tables at most."""

    @property
    @abstractmethod
    def label_meaning(self) -> tuple[tuple[str, ...], float, LabelKind]:
        """The sample groups, the threshold of positive labels, and the kind of the labels, as in `Schema`."""

    @property
    def outline(self) -> Outline:
        """What is known before the data are prepared."""
        described = self.plan.description if self.given_folder is None else self.encoder.description
        parts: dict[Part, bool] = {
            "request": bool(described.user or described.context),
            "history": bool(described.history),
            "items": bool(described.items),
        }
        return Outline(frozenset(part for part, there in parts.items() if there), *self.label_meaning)

    @property
    def schema(self) -> Schema:
        """The description of the batch columns. It contains the vocabularies, so the data are prepared first."""
        return self.encoder.schema(*self.label_meaning, reserved=_MODULE_NAMES)

    @property
    def given_folder(self) -> Path | None:
        """The folder of data that were prepared elsewhere, if `root` is one: it has facts.json and features/."""
        folder = Path(self.root).expanduser() if isinstance(self.root, (str, Path)) else None
        if folder is None or not (folder / "facts.json").is_file() or not (folder / "features" / FILE).is_file():
            return None
        return folder

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
        if self.given_folder is not None:
            if damage := find_damage(self.given_folder):
                raise ValueError(f"{damage}; copy the folder again, or prepare the data again")
            check_prepared(self.given_folder, self.name)
            self._prepared = self.files(self.given_folder)
            return False
        facts = {"format": self.format, "types": self._types, **self.plan.facts()}
        digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()
        home = cache_home() / "prepared" if self.cache_dir is None else Path(self.cache_dir).expanduser()
        source = self.root[0] if isinstance(self.root, (list, tuple)) and self.root else self.root
        named = re.sub(r"[^\w.-]+", "_", Path(source).name)[:40] if isinstance(source, (str, Path)) else ""
        target = home / f"{named or self.name}-{digest}"

        def write(folder: Path) -> None:
            for older in self._older(target):
                rank_zero_info(f"{older} was prepared by an older version and is not used; it can be deleted")
            rank_zero_info(f"preparing {self.plan.name} in {target} (once)")
            with self.progress_of() as told, self._open_engine(folder, progress or told) as engine:
                self.preparation(self.plan, folder, engine).run()

        made = make_once(target, write, resume=True)
        self._prepared = self.files(target)
        for line in self.facts() if made and self.progress is None else ():  # `recsys-topk prepare` prints them
            rank_zero_info(line)
        return made

    def _open_engine(self, folder: Path, progress: Progress) -> Engine:
        if self._engine == "duckdb":
            return DuckEngine(folder, progress, self._memory)
        from recsys_topk.datamodules.prepare.engine.spark import SparkEngine

        return SparkEngine(folder, progress, self._spark)

    def _older(self, target: Path) -> Iterator[Path]:
        """Yield the folders of the same source that have another format."""
        for folder in target.parent.glob(f"{target.name.rpartition('-')[0]}-{'?' * 16}"):
            facts = folder / "facts.json"
            if facts.is_file() and json.loads(facts.read_text(encoding="utf-8")).get("format") != self.format:
                yield folder

    def guess_lines(self) -> list[str]:
        """Return lines that report the guessed columns and features."""
        if self.given_folder is not None:
            return []
        guessed = [f"{role} = {column}" for role, column in self.plan.roles.items() if not self.given_columns.get(role)]
        lines = [f"columns, guessed: {', '.join(guessed)}"] if guessed else []
        if self._described is None:
            parts = {part: self.plan.description.part(part) for part in DATA_PARTS}
            made = [f"{part}: {', '.join(f'{f.name} ({f.kind})' for f in own)}" for part, own in parts.items() if own]
            lines.append(f"features, guessed: {'; '.join(made)}{self.guess_advice}")
        return lines


def read_features(described: str | Mapping[str, Any]) -> Description | FeatureEncoder:
    """Return the saved encoder if the argument is the folder of one, else the description."""
    if isinstance(described, str) and (Path(described) / FILE).is_file():
        return FeatureEncoder.load(described)
    return Description.read(described)
