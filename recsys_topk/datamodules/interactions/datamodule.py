"""DataModule for user-item interactions: reads files or data frames, makes lists of positives and negatives."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Final, cast

import numpy as np
from typing_extensions import Unpack

from recsys_topk.datamodules.interactions.deployment import interactions_items, interactions_users
from recsys_topk.datamodules.interactions.guess import find_roles, guess_description
from recsys_topk.datamodules.interactions.position_shard import PositionShard
from recsys_topk.datamodules.interactions.preparation import FORMAT, InteractionsPlan, InteractionsPreparation
from recsys_topk.datamodules.interactions.sequences import SPLITS, SequenceOptions, SplitMethod
from recsys_topk.datamodules.interactions.shard import InteractionsShard, PreparedInteractions
from recsys_topk.datamodules.interactions.tables import open_tables
from recsys_topk.datamodules.negatives.expansion import NegativeMix
from recsys_topk.datamodules.prepare.base import PreparedDataModule, PreparedOptions, read_features
from recsys_topk.tabular.export_tables import ItemTable, UserTable, source_names
from recsys_topk.tabular.features.description import Description
from recsys_topk.tabular.features.encoder import FeatureEncoder
from recsys_topk.tabular.schema import Feature, Schema
from recsys_topk.tabular.tables.reader import Source, open_table

_DAY_US: Final = 86_400_000_000


class InteractionsDataModule(PreparedDataModule):
    """Interactions of users with items (views, ratings, purchases) as batches of lists.

    A list holds the user's next interactions as positives, and sampled negatives. The history holds the user's
    interactions strictly before the first positive; interactions at the same time are not in it. Data are prepared
    once, into memory-mapped Arrow files. Vocabularies and feature statistics come from the training split only. An
    interrupted preparation is resumed.

    Tables are files (Parquet, CSV, TSV, JSON lines, RecBole's atomic files; paths or addresses), pandas or polars data
    frames, pyarrow tables or Hugging Face data sets. `recsys-topk schema FILES` shows how their columns are used.

    Args:
        root: A file of interactions, or a folder with files of interactions, users and items.
        interactions: The table of interactions, in place of `root`.
        users: The table of users.
        items: The table of items.
        val: The table of validation interactions; with it the split is ``"given"``.
        test: The table of test interactions.
        user: The column of the user; None = guessed from its name, and reported. The same applies to the other columns.
        item: The column of the item.
        time: The column of the time: seconds, milliseconds, ISO 8601 text, datetimes or dates such as 20231114. Without
            one, the rows are taken to be in order.
        rating: The column of the rating, used with `min_rating`.
        weight: A column of weights above 0, which become the labels of positives; None = all are 1.
        split_column: A column with the values train, val and test; with it the split is ``"given"``.
        min_rating: Interactions with a lower rating are left out.
        split: ``"time"``, ``"leave_last"`` or ``"given"``; None = ``"given"`` if a split is given, else ``"time"``.
        leave: For ``leave_last``: number of interactions of each user for testing, and the same number for validation.
        window: Maximum number of positives of a training request; None = no limit.
        eval_window: Maximum number of positives of an evaluation request; None = all of the user in the split.
        window_days: Maximum number of days between the positives of a request; None = no limit.
        repeats: Whether an item that the user had before may be a positive again. If False, it is not a candidate.
            Other items of the user at the time of a positive are never candidates.
        train_negatives: Sampled negatives per list in training.
        negative_source: Where training negatives come from; see `CascadeDataModule`.
        eval_negatives: Sampled negatives per list in evaluation.
        every_position: Whether every interaction of a training sequence is a request of its own (`window` is then 1),
            and the requests of a sequence share one history: an encoder learns from all positions in one pass. The
            batch size counts sequences of up to `history_length` interactions.
        held_out: With `every_position`: share of the users whose requests train the later stages of a cascade and not
            the first one.
        softmax_items: With ``negative_source="catalogue"``: number of items in the softmax of a step, for large
            catalogues: all positives of the batch, and others drawn uniformly, which stand for the rest; None = all.
        ages: Whether the history has the age of each view, in seconds before the newest view (the feature
            `seconds_ago`), which ordered encoders of histories read. Needs times.
        options: Options of all data modules for a user's tables; see `PreparedDataModule`.

    Example:
        >>> import tempfile
        >>> import pyarrow as pa
        >>> table = pa.table({"user": [1] * 9 + [2] * 9, "item": [*range(9), *range(9)], "time": [*range(18)]})
        >>> data = InteractionsDataModule(
        ...     interactions=table, split="leave_last", eval_negatives=3, cache_dir=tempfile.mkdtemp()
        ... )
        >>> batch = data.add_negatives(next(iter(data.test_dataloader())))
        >>> batch.labels.tolist(), batch.history_length.tolist()
        ([[1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]], [8, 8])
    """

    name: ClassVar[str] = "interactions"
    files = PreparedInteractions
    preparation = InteractionsPreparation
    format = FORMAT
    guess_advice = ". `recsys-topk schema` shows them, as YAML to edit"
    label_meaning = ("next",), 0.0, "grades"
    steps_per_epoch = 32

    def __init__(
        self,
        root: str | None = None,
        interactions: Source = None,
        users: Source = None,
        items: Source = None,
        val: Source = None,
        test: Source = None,
        user: str | None = None,
        item: str | None = None,
        time: str | None = None,
        rating: str | None = None,
        weight: str | None = None,
        split_column: str | None = None,
        min_rating: float | None = None,
        split: SplitMethod | None = None,
        leave: int = 1,
        window: int | None = 10,
        eval_window: int | None = None,
        window_days: float | None = None,
        repeats: bool = False,
        train_negatives: int = 100,
        negative_source: NegativeMix = "uniform",
        eval_negatives: int = 160,
        every_position: bool = False,
        held_out: float = 0.0,
        softmax_items: int | None = None,
        ages: bool = False,
        **options: Unpack[PreparedOptions],
    ) -> None:
        super().__init__(
            train_negatives=train_negatives, negative_source=negative_source, eval_negatives=eval_negatives, **options
        )
        if root is None and interactions is None:
            raise ValueError("no interactions are given; give --data.root FOLDER or --data.interactions FILE")
        if (val is None) != (test is None):
            raise ValueError(
                "val and test must be given together; give a table of interactions for each, or for neither"
            )
        given = val is not None or split_column is not None
        if split is None:
            split = "given" if given else "time"
        if split == "given" and not given:
            raise ValueError("split='given' needs the tables val and test, or split_column; give one of them")
        if split != "given" and given:
            raise ValueError(f"split={split!r} does not use val, test and split_column; leave them out, or split")
        for name, count in {"leave": leave, "window": window, "eval_window": eval_window}.items():
            if count is not None and count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}")
        if window_days is not None and window_days <= 0:
            raise ValueError(f"window_days must be above 0, got {window_days}")
        if not 0 <= held_out < 1:
            raise ValueError(f"held_out must be a share from 0 to below 1, got {held_out}")
        if softmax_items is not None and softmax_items < 2:
            raise ValueError(f"softmax_items must be at least 2, got {softmax_items}")
        if held_out and not every_position:
            raise ValueError("held_out needs every_position; add --data.every_position true")
        self.root, self.repeats, self.every_position, self.ages = root, repeats, every_position, ages
        self.held_out, self.softmax_items = held_out, softmax_items
        self._sources = {"interactions": interactions, "users": users, "items": items}
        self._held_out = {"val": val, "test": test} if val is not None else {}
        self.given_columns = {
            "user": user, "item": item, "time": time, "rating": rating, "weight": weight, "split": split_column,
        }  # fmt: skip
        self._min_rating = min_rating
        self._sequences = SequenceOptions(
            split=split,
            leave=leave,
            window=1 if every_position else window,
            eval_window=eval_window,
            span=None if window_days is None else round(window_days * _DAY_US),
            repeats=repeats,
        )

    @cached_property
    def plan(self) -> InteractionsPlan:
        """What to prepare: tables, columns, features and splits. Reads the first rows of the tables."""
        tables = open_tables(self.root, **self._sources, types=self._types, roles=self.given_columns)
        features: Description | FeatureEncoder
        if self._described is None:
            guessed = guess_description(tables.interactions, tables.users, tables.items, self.given_columns)
            roles, features = dict(guessed.roles), guessed.description
        else:
            roles, features = find_roles(tables.interactions, self.given_columns), read_features(self._described)
        if self._sequences.split != "given" or self._held_out:
            roles.pop("split", None)
        if self.given_columns["weight"] is None:
            roles.pop("weight", None)
        if self._min_rating is None:
            roles.pop("rating", None)
        elif "rating" not in roles:
            raise ValueError("min_rating needs a column of ratings; name it: --data.rating COLUMN")
        if self.ages and "time" not in roles:
            raise ValueError("ages needs a column of times; name it: --data.time COLUMN, or use --data.ages false")
        return InteractionsPlan(
            ages=self.ages,
            name=tables.interactions.name,
            roles=roles,
            features=features,
            fractions=self._fractions,
            dates=self._dates,
            split_seed=self._split_seed,
            tables=tables,
            held_out={name: open_table(source, self._types) for name, source in self._held_out.items()},
            sequences=self._sequences,
            min_rating=self._min_rating,
        )

    @property
    def schema(self) -> Schema:
        """See `PreparedDataModule.schema`. With `ages`, the last feature of the history is the age of a view."""
        schema = super().schema
        if not self.ages or not schema.history:
            return schema
        return replace(schema, history=(*schema.history, Feature("seconds_ago", kind="age")))

    @property
    def prepared(self) -> PreparedInteractions:
        """The prepared files. They are prepared first if they do not exist."""
        return cast("PreparedInteractions", self.prepared_files())

    def facts(self) -> list[str]:
        """Return lines that report the guesses and the prepared data."""
        facts = self.prepared.facts
        requests = ", ".join(f"{facts['requests'][split]:,} {split}" for split in SPLITS)
        lines = [
            *self.guess_lines(),
            f"{facts['interactions']:,} interactions of {facts['users']:,} users with {facts['items']:,} items; "
            f"requests: {requests}",
            f"times: {facts['times']}",
        ]
        return lines + [f"left out: {number:,} interactions, {why}" for why, number in facts["left_out"].items()]

    def open_shard(self, name: str) -> InteractionsShard:
        """Return a split."""
        if not self.every_position or name != "train":
            return self._requests(name)
        shard = self._requests(name, PositionShard)
        assert isinstance(shard, PositionShard)
        shard.held_out = self.held_out
        return shard

    def _requests(self, name: str, kind: type[InteractionsShard] = InteractionsShard) -> InteractionsShard:
        return kind(name, self.prepared, self.schema, self.history_length, self.repeats)

    def serving_items(self) -> ItemTable:
        """Return all items with their ids of the source."""
        return interactions_items(self.prepared)

    def item_names(self, item_id: Any) -> Any:
        """Return the ids of the source for some items."""
        return source_names(self.prepared.item_ids[np.searchsorted(self.prepared.items["item_id"], item_id)])

    def serving_users(self, items: ItemTable) -> UserTable:
        """Return the state of each user after the last known interaction."""
        return interactions_users({split: self._requests(split) for split in SPLITS}, self.prepared)
