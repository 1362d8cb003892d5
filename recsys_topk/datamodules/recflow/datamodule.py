"""DataModule for RecFlow: prepared once, read as columns, negatives added on the device."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import ClassVar

from lightning.pytorch.utilities import rank_zero_info
from tqdm import tqdm
from typing_extensions import Unpack

from recsys_topk.datamodules.base import CascadeDataModule, DataOptions, Split
from recsys_topk.datamodules.recflow.batch_maker import BatchMaker
from recsys_topk.datamodules.recflow.cache import DayCache
from recsys_topk.datamodules.recflow.days import DayOptions
from recsys_topk.datamodules.recflow.deployment import recflow_encoder, recflow_users
from recsys_topk.datamodules.recflow.files import RecFlowFiles
from recsys_topk.datamodules.recflow.layout import ITEM_IDS, REQUEST_IDS, LayoutChoice, find_layout, recflow_schema
from recsys_topk.datamodules.recflow.shard import DayShard
from recsys_topk.datamodules.recflow.vocabularies import recflow_vocabularies
from recsys_topk.datamodules.simulator.embedded import DEFAULT_WORLD, embedded_root
from recsys_topk.datamodules.simulator.world import WorldConfig, as_world
from recsys_topk.files import cache_home
from recsys_topk.tabular.export_tables import ItemTable, UserTable
from recsys_topk.tabular.features.encoder import FeatureEncoder
from recsys_topk.tabular.ids.options import VocabularyChoice, vocabulary_options
from recsys_topk.tabular.ids.vocabulary import VOCABULARIES, Vocabulary, load_vocabularies
from recsys_topk.tabular.locations import version_of
from recsys_topk.tabular.schema import Outline, Schema


class RecFlowDataModule(CascadeDataModule):
    """RecFlow, or a simulated world with the same layout, as batches of lists.

    Lists hold the groups of the layout (10 columns each) and, after transfer to the device, sampled negatives. Each
    day is a shard. Negatives of an evaluation request come from the catalogue of its day.

    Args:
        root: Folder or URL (any file system of fsspec) of the data set; None = a simulated world, made once in the
            user's cache folder.
        world: The simulated world used if `root` is None.
        layout: The sample groups of a list: ``"two-stage"``, ``"three-stage"``, or a custom layout as plain data
            (`find_layout`).
        train_days: A date or "FIRST:LAST" (inclusive); None = all days before the validation and test days.
        val_days: A date or "FIRST:LAST"; None = the second to last day; ``"none"`` = no validation.
        test_days: A date or "FIRST:LAST"; None = the last day. `predict` uses the same days.
        history_length: Maximum length of the history; the newest views are kept.
        cache_dir: Folder of the prepared data; None = in the user's cache folder.
        vocabulary: How ids are mapped to rows: ``"dense"``, ``"compact"``, ``"hash:rows=1000000"`` or ``"auto"``, for
            all tables or by table name (`VocabularyOptions`). None = ``"auto"``: dense up to 2,000,000 rows, above that
            compact, which needs the training days. ``"growing:min_count=5"``: new ids get rows from part to part of
            `recsys-topk online`. Or the folder of saved vocabularies (`save_vocabularies`).
        days: The days of the data set that may be used, a date or "FIRST:LAST"; None = all.
        options: Options of every data module; see `CascadeDataModule`.

    Example:
        >>> import tempfile
        >>> from recsys_topk.datamodules import WorldConfig, simulate
        >>> folder = tempfile.mkdtemp()
        >>> root = simulate(f"{folder}/world", WorldConfig(users=20, items=200, days=3, requests=30))
        >>> data = RecFlowDataModule(str(root), eval_negatives=20, cache_dir=folder)
        >>> data.prepare_data()
        >>> batch = data.add_negatives(next(iter(data.test_dataloader())))
        >>> tuple(batch.candidates.shape)
        (30, 60)
    """

    name: ClassVar[str] = "recflow"
    without_validation: ClassVar[str] = "val_days is none: give --data.val_days DATE, or use test"

    def __init__(
        self,
        root: str | None = None,
        world: WorldConfig = DEFAULT_WORLD,
        layout: LayoutChoice = "two-stage",
        train_days: str | None = None,
        val_days: str | None = None,
        test_days: str | None = None,
        history_length: int = 50,
        cache_dir: str | None = None,
        vocabulary: VocabularyChoice | None = None,
        days: str | None = None,
        **options: Unpack[DataOptions],
    ) -> None:
        super().__init__(**options)
        self.root = root
        self.world = as_world(world)
        self.layout = find_layout(layout)
        self.day_options = DayOptions(days, train_days, val_days, test_days)
        self.cache_dir = cache_dir
        self._vocabularies: dict[str, Vocabulary] | None = None
        if isinstance(vocabulary, str) and (Path(vocabulary) / VOCABULARIES).is_file():
            self._vocabularies, vocabulary = load_vocabularies(vocabulary), None
        self.vocabulary_options = vocabulary_options(vocabulary, (*REQUEST_IDS, *ITEM_IDS))
        self._maker = BatchMaker(self.layout, history_length)
        self._cache: DayCache | None = None

    @property
    def available_days(self) -> tuple[str, ...]:
        """All days of the data set. Those of a simulated world are known before it is simulated."""
        return self.world.day_names if self.root is None else self.cache.files.days

    @property
    def cache(self) -> DayCache:
        """The prepared days. Simulates the embedded world first if there is no root.

        Raise if the data do not have the chosen days, before anything is simulated or prepared.
        """
        if self._cache is None:
            if self.root is None:
                self.day_options.used(self.world.day_names)
            root = self.root if self.root is not None else embedded_root(self.world, rank_zero_info)
            files = RecFlowFiles(root)
            self.day_options.used(files.days)
            self._cache = DayCache(files, Path(self.cache_dir) if self.cache_dir else cache_home() / "prepared")
        return self._cache

    @property
    def vocabularies(self) -> dict[str, Vocabulary]:
        """The vocabulary of each id table. Compact ones are built from the training days at first use."""
        if self._vocabularies is None:
            self._vocabularies = recflow_vocabularies(
                self.cache, self.vocabulary_options, lambda: self.splits["train"], rank_zero_info
            )
        return self._vocabularies

    @property
    def outline(self) -> Outline:
        """What is known before the data are prepared, or a world is simulated."""
        return recflow_schema(dict.fromkeys((*REQUEST_IDS, *ITEM_IDS), 1), self.layout).outline

    @property
    def schema(self) -> Schema:
        """The description of the batch columns. Reads only the id counts of the data set, unless a table is compact.

        A world has to be simulated first.
        """
        return recflow_schema(self.cache.files.counts, self.layout, self._mapped)

    @property
    def splits(self) -> dict[str, tuple[str, ...]]:
        """The days used for ``"train"``, ``"val"`` and ``"test"``."""
        return self.day_options.splits(self.available_days)

    def prepare_data(self) -> None:
        """Prepare the days that are used and not prepared yet. Lightning calls it in one process.

        Each day appears when it is complete, so an interrupted run resumes at the unfinished day.
        """
        cache = self.cache
        used = self.day_options.used(cache.files.days)
        source = {day: sum(version_of(path)[0] for path in cache.files.paths(day).values()) for day in used}
        missing = cache.missing(used)
        if not missing:
            return
        total, done, written = sum(source[day] for day in missing), 0, 0
        rank_zero_info(
            f"preparing {len(missing)} of {len(used)} days of {cache.files.folder} in {cache.folder} (once); "
            f"{tqdm.format_sizeof(total, 'B')} of source"
        )
        with self.progress_of("B") as progress:
            progress("prepare", 0, total)

            def ready(day: str, folder: Path) -> None:
                nonlocal done, written
                done += source[day]
                written += sum(path.stat().st_size for path in folder.iterdir())
                progress(
                    "prepare",
                    source[day],
                    total,
                    f"{day}, about {tqdm.format_sizeof(written / done * total, 'B')} in all",
                )

            cache.prepare(missing, progress=ready)

    def facts(self) -> list[str]:
        """Return lines that report the prepared days and their folder."""
        used = self.day_options.used(self.cache.files.days)
        size = sum(path.stat().st_size for day in used for path in self.cache.path(day).iterdir())
        return [f"{len(used)} days, {used[0]} to {used[-1]}, {tqdm.format_sizeof(size, 'B')} in {self.cache.folder}"]

    @property
    def prepared_folders(self) -> dict[str, Path]:
        """The folder of each day that is used."""
        return {day: self.cache.path(day) for days in self.splits.values() for day in days}

    def open_shard(self, name: str) -> DayShard:
        """Return a prepared day."""
        return DayShard(self.cache.open(name, self._mapped), self._maker)

    def list_length(self, split: Split) -> int:
        """Return the number of columns of the layout plus the sampled negatives. The data need not be prepared."""
        return self.layout.slots + (self.train_negatives if split == "train" else self.eval_negatives)

    def serving_users(self, items: ItemTable) -> UserTable:
        """Return the newest request of each user."""
        days = sorted({day for days in self.splits.values() for day in days})
        return recflow_users([self.open_shard(day) for day in days], items)

    @property
    def encoder(self) -> FeatureEncoder:
        """The encoder of raw features: ids as in RecFlow's files, and the clock in UTC+8."""
        return recflow_encoder(self.vocabularies)

    def for_day(self, day: str) -> RecFlowDataModule:
        """Return a data module that trains, validates and tests on one day. It shares the opened files."""
        _ = self.cache, self.vocabularies  # all days of a stream use the same vocabularies
        data = copy.copy(self)
        data.day_options = DayOptions(None, day, day, day)
        data._train_loader = data._state = None
        return data

    @property
    def _mapped(self) -> dict[str, Vocabulary]:
        """The vocabularies of the fields that are not stored as table rows in the cache."""
        return {name: own for name, own in self.vocabularies.items() if own.kind != "dense"}
