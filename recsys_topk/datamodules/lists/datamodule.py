"""DataModule for logged lists: logs of a recommendation funnel, or queries with graded documents."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Literal, cast

import numpy as np
from typing_extensions import Unpack

from recsys_topk.datamodules.lists.deployment import lists_items, lists_users
from recsys_topk.datamodules.lists.feedback import Feedback
from recsys_topk.datamodules.lists.labels import StageTable, funnel_labels
from recsys_topk.datamodules.lists.plan import COUNTS, SPLITS, ListsPlan, SplitRule
from recsys_topk.datamodules.lists.preparation import FORMAT, ListsPreparation
from recsys_topk.datamodules.lists.roles import guess_columns, require_roles
from recsys_topk.datamodules.lists.shard import ListsShard, PreparedLists
from recsys_topk.datamodules.lists.sources import open_sources, split_files
from recsys_topk.datamodules.lists.svmlight import DESCRIPTION
from recsys_topk.datamodules.negatives.expansion import NegativeMix
from recsys_topk.datamodules.prepare.base import PreparedDataModule, PreparedOptions, read_features
from recsys_topk.tabular.export_tables import ItemTable, UserTable, source_names
from recsys_topk.tabular.features.description import Description, RawFeature
from recsys_topk.tabular.features.encoder import FeatureEncoder
from recsys_topk.tabular.schema import LabelKind, Schema
from recsys_topk.tabular.tables.reader import Source, TableReader, open_table


class ListsDataModule(PreparedDataModule):
    """Logged lists: requests, their candidate items, and a label for each candidate.

    Tables have one row per (request, item), in any order, or one row per request with lists in their columns. They are
    Parquet, CSV, TSV or JSON lines files, data frames, pyarrow tables, Hugging Face data sets, or SVMlight/LETOR files
    with ``qid:`` or a ``.query`` file of list lengths. Data are prepared once, into memory-mapped Arrow files;
    vocabularies and feature statistics come from the training split only. An interrupted preparation is resumed.

    Labels are a column of grades, or are derived from the stage that an item reached::

        labels: {shown: "30 - position", ranked: 7, prerank: 6, recalled: 5}

    The stages are the sample groups, best first; items of stages mapped to null are left out.

    Args:
        root: The table, or a folder with one file per split with train, val (or vali, valid) and test in their names.
        val: The table of validation lists; None = a part of `root`.
        test: The table of test lists; None = a part of `root`.
        request: The column of the request; None = guessed from its name, and reported; "" = there is none. The same
            applies to the other columns.
        item: The column of the item; without one, every row is a separate item.
        label: The column of labels, finite and >= 0; larger is better.
        stage: The column of the stage reached, used with `labels`.
        position: The column of the position, used with `labels`.
        time: The column of the time: seconds, milliseconds, ISO 8601 text, datetimes or dates such as 20231114.
        user: The column of the user.
        history: A column with the list of the user's last items, oldest first.
        split_column: A column with the values train, val and test.
        labels: Label of each stage, best stage first: a number or ``"N - position"``; None = use the column `label`, or
            count the stages of a funnel log (`recsys-topk serve --log`).
        feedback: A table of events with columns for the request, the item and the event; None = there is none.
        events: Label of each event, e.g. ``{"click": 30, "view": 8}``; used with `feedback`. An item has the label of
            its best event, if it has one; events are sample groups as stages are.
        positive_above: Labels above this are positives; None = the label of the second stage of `labels`, else 0.
        label_kind: ``"grades"`` or ``"places"``; None = places if a label depends on the position, else grades.
        split: ``"time"``, ``"fraction"`` (of requests, by a hash of their id), ``"column"`` or ``"files"``; None = the
            given split, else by time if there is a time column, else by fraction.
        max_list_length: Maximum number of items of a list; the best labels are kept. None = all.
        duplicates: ``"error"``, or ``"best"`` to keep the best label of an item that occurs twice in a request.
        counts: Whether items have the columns ``listed_before``, ``positive_before`` (how often the item was in a list,
            or a positive, in earlier requests of any split) and ``seconds_listed`` (since its first request). Guessed
            features include them; a description may. They are left out if there is no column of items or times.
        train_negatives: Sampled negatives per list in training.
        negative_source: Where training negatives come from; see `CascadeDataModule`.
        eval_negatives: Sampled negatives per list in evaluation.
        options: Options of all data modules for a user's tables; see `PreparedDataModule`.

    Example:
        >>> import tempfile
        >>> import pyarrow as pa
        >>> table = pa.table({
        ...     "request": [1, 2, 3, 1, 2],
        ...     "item": [7, 8, 7, 9, 9],
        ...     "stage": ["shown", "recalled", "shown", "recalled", "shown"],
        ...     "split": ["train", "val", "test", "train", "val"],
        ... })
        >>> data = ListsDataModule(table, labels={"shown": 2, "recalled": 1}, cache_dir=tempfile.mkdtemp())
        >>> next(iter(data.train_dataloader())).labels.tolist(), data.schema.groups
        ([[2.0, 1.0]], ('shown', 'recalled'))
    """

    name: ClassVar[str] = "lists"
    files = PreparedLists
    preparation = ListsPreparation
    format = FORMAT
    fewest = 64
    guess_advice = "; use --data.features to leave out what is known only after the request"

    def __init__(
        self,
        root: Source = None,
        val: Source = None,
        test: Source = None,
        request: str | None = None,
        item: str | None = None,
        label: str | None = None,
        stage: str | None = None,
        position: str | None = None,
        time: str | None = None,
        user: str | None = None,
        history: str | None = None,
        split_column: str | None = None,
        labels: dict[str, float | str | None] | None = None,
        feedback: Source = None,
        events: dict[str, float] | None = None,
        positive_above: float | None = None,
        label_kind: LabelKind | None = None,
        split: SplitRule | None = None,
        max_list_length: int | None = None,
        duplicates: Literal["error", "best"] = "error",
        counts: bool = False,
        train_negatives: int = 0,
        negative_source: NegativeMix = "in_batch",
        eval_negatives: int = 0,
        **options: Unpack[PreparedOptions],
    ) -> None:
        super().__init__(
            train_negatives=train_negatives, negative_source=negative_source, eval_negatives=eval_negatives, **options
        )
        if root is None:
            raise ValueError("no lists are given; give --data.root FILE")
        if max_list_length is not None and max_list_length < 1:
            raise ValueError(f"max_list_length must be at least 1, got {max_list_length}")
        self.root = root
        self._sources = {0: root, **(split_files(root) if self.given_folder is None else {})}
        self._sources |= {number: source for number, source in ((1, val), (2, test)) if source is not None}
        self.given_columns = {
            "request": request, "item": item, "label": label, "stage": stage, "position": position, "time": time,
            "user": user, "history": history, "split": split_column,
        }  # fmt: skip
        if (feedback is None) != (not events):
            raise ValueError(
                "feedback and events go together: --data.feedback DIR --data.events '{click: 30, view: 8}'"
            )
        self._feedback, self._events = feedback, dict(sorted((events or {}).items(), key=lambda one: -one[1]))
        self._labels = None if labels is None else {**self._events, **labels}
        if self._labels is not None:
            StageTable(self._labels)  # raises if it is not valid
        self._positive_above, self._label_kind = positive_above, label_kind
        self._split = split
        self._max_list_length, self._duplicates, self._counted = max_list_length, duplicates, counts

    @cached_property
    def _opened(self) -> tuple[dict[int, TableReader], dict[str, str], bool]:
        return open_sources(self._sources, self._types, self.given_columns)

    @cached_property
    def stages(self) -> StageTable | None:
        """The labels of stages and events; None = labels come from a column."""
        labels: Any = self._labels
        if labels is None and self.given_folder is None:
            readers, roles, _ = self._opened
            logged = funnel_labels(readers[0].columns) if "stage" in roles and "label" not in roles else None
            labels = None if logged is None else {**self._events, **logged}
        return None if labels is None else StageTable(labels)

    @cached_property
    def plan(self) -> ListsPlan:
        """What to prepare: tables, columns, features and splits. Reads the first rows of the tables."""
        readers, roles, svmlight = self._opened
        main = readers[0]
        unused = ("label",) if self.stages is not None else ("stage", "position")
        require_roles(main, roles, self.given_columns, self.stages, self._feedback is not None)
        counts = self._counted and {"item", "time"} <= set(roles)
        features = self._features(main, svmlight, roles, counts)
        described = features.description if isinstance(features, FeatureEncoder) else features
        _check_history(described, roles)
        split = self._rule(readers, roles)
        taken = {role: column for role, column in roles.items() if role not in unused}
        if split != "column":
            taken.pop("split", None)
        counts = counts and bool(set(COUNTS) & set(described.columns("items")))
        places = {} if self.stages is None else {name: at for at, name in enumerate(self.stages.groups)}
        told = None
        if self._feedback is not None:
            told = Feedback(
                open_table(self._feedback), self._events, {name: places.get(name, 0) for name in self._events}
            )
        shares = tuple(0.0 if number in readers else share for number, share in enumerate(self._fractions, 1))
        whole = {1, 2} <= set(readers)
        return ListsPlan(
            name=main.name,
            sources=[(reader, number if number or whole else None) for number, reader in readers.items()],
            roles=taken,
            stages=self.stages,
            features=features,
            split=split,
            fractions=(shares[0], shares[1]),
            dates=self._dates,
            split_seed=self._split_seed,
            max_list_length=self._max_list_length,
            duplicates=self._duplicates,
            feedback=told,
            counted_above=self.label_meaning[1] if counts else None,
        )

    @property
    def prepared(self) -> PreparedLists:
        """The prepared files. They are prepared first if they do not exist."""
        return cast("PreparedLists", self.prepared_files())

    @property
    def label_meaning(self) -> tuple[tuple[str, ...], float, LabelKind]:
        """See `PreparedDataModule.label_meaning`. Stages are the groups if they are mapped to labels."""
        stages, above = self.stages, self._positive_above
        return (
            ("listed",) if stages is None else stages.groups,
            above if above is not None else 0.0 if stages is None else stages.positive_above,
            self._label_kind or ("grades" if stages is None else stages.kind),
        )

    @property
    def schema(self) -> Schema:
        """See `PreparedDataModule.schema`. It has the median length of the lists if no negatives are sampled."""
        if self.train_negatives or self.eval_negatives:
            return super().schema
        return replace(super().schema, list_length=int(np.median(self.prepared.table("train")["length"])))

    def facts(self) -> list[str]:
        """Return lines that report the guesses and the prepared data."""
        facts = self.prepared.facts
        requests = ", ".join(f"{facts['requests'][split]:,} {split}" for split in SPLITS)
        longest = {split: self.shard(split).list_length for split in SPLITS}
        lines = self.guess_lines()
        lines += [f"{facts['rows']:,} rows; lists: {requests}; longest: {', '.join(map(str, longest.values()))}"]
        lines += [f"{number:,} {what}" for what, number in facts["counts"].items() if number]
        mean = facts["rows"] / max(sum(facts["requests"].values()), 1)
        if max(longest.values()) > 10 * mean:
            times = max(longest.values()) / mean
            lines.append(
                f"lists are padded to the longest, {times:.0f} times the mean; --data.max_list_length N cuts them"
            )
        return lines

    def open_shard(self, name: str) -> ListsShard:
        """Return a split."""
        history = bool(self.prepared.encoder.description.history)
        return ListsShard(name, self.prepared, self.history_length if history else 0)

    def serving_items(self) -> ItemTable:
        """Return the items of all splits with their ids of the source, and the features of their newest requests."""
        items = lists_items(self.prepared)
        return replace(items, names=self.item_names(items.names))

    def item_names(self, item_id: Any) -> Any:
        """Return the ids of the source for some items."""
        names = self.prepared.item_ids
        return item_id if names is None else source_names(names[item_id])

    def request_names(self, shard: str, request_id: Any) -> Any:
        """Return the ids of the source for some requests of a split."""
        names = self.prepared.request_ids(shard)
        if names is None:
            return request_id
        own = self.prepared.table(shard)["request_id"]
        order = np.argsort(own)
        return source_names(names[order[np.searchsorted(own, request_id, sorter=order)]])

    def serving_users(self, items: ItemTable) -> UserTable | None:
        """Return the newest request of each user, or None if there is no user column."""
        return lists_users({split: self.open_shard(split) for split in SPLITS}, self.prepared, items)

    def _features(
        self, main: TableReader, svmlight: bool, roles: dict[str, str], counts: bool
    ) -> Description | FeatureEncoder:
        if self._described is not None:
            return read_features(self._described)
        if svmlight:
            return Description.from_plain(DESCRIPTION)
        guessed = guess_columns(main, roles).description
        if not counts:
            return guessed
        made = [RawFeature.from_plain(name, {"kind": "numeric", "transform": "log"}) for name in COUNTS]
        return replace(guessed, items=(*guessed.items, *made))

    def _rule(self, readers: dict[int, Any], roles: dict[str, str]) -> SplitRule:
        """Return how to split the requests that no file assigns to a split."""
        given = self._split
        if given is None:
            if {1, 2} <= set(readers):
                return "files"
            if "split" in roles and len(readers) == 1:
                return "column"
            return "time" if "time" in roles or self._dates is not None else "fraction"
        needs = {"time": "time" in roles, "column": "split" in roles, "files": {1, 2} <= set(readers)}
        if not needs.get(given, True):
            options = {
                "time": "--data.time COLUMN",
                "column": "--data.split_column COLUMN",
                "files": "--data.val and --data.test",
            }
            raise ValueError(f"split={given!r} needs {options[given]}")
        return given


def _check_history(described: Description, roles: dict[str, str]) -> None:
    if not described.history:
        return
    if "history" not in roles or "item" not in roles:
        raise ValueError(
            "features describes a history; name its column and the item's: --data.history COLUMN --data.item COLUMN"
        )
    for feature in described.history:
        if feature.columns != (roles["item"],) or feature.kind != "categorical":
            raise ValueError(
                f"the history is a list of items, so its only feature is {roles['item']} (categorical); remove "
                f"{feature.name!r} from the history in the description"
            )
