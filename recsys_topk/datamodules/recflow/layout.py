"""Columns and sample groups of RecFlow: their names in the files, their ids, and the labels of the groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from recsys_topk.tabular.ids.vocabulary import Vocabulary
from recsys_topk.tabular.schema import Feature, Schema, Table

LayoutChoice: TypeAlias = dict[str, int | dict[str, int | None]] | str
"""A name in `LAYOUTS`, or a layout as plain data; see `find_layout`."""

SLOTS: Final = 10
"""Number of slots of a sample group in a list."""

STAGES: Final = ("rerank_pos", "rerank_neg", "rank_pos", "rank_neg", "coarse_neg", "prerank_neg")
"""The sample groups in `request_id_dict` besides `realshow`."""

ORDERED_STAGES: Final = {"rerank_pos": "rerank_index", "rank_pos": "rank_index"}
"""Groups whose items have a position, and the column of the position in `all_stage`."""

REQUEST_IDS: Final = ("user_id", "device_id", "gender", "age", "province")
ITEM_IDS: Final = ("video_id", "author_id", "category_level_two", "category_level_one", "upload_type")
CLOCK: Final = {"weekday": 9, "hour": 26, "minute": 62}
"""Time features and the number of rows of their tables: row 0 is padding, one row is unused."""

UNSHIFTED: Final = {"category_level_one": 2}
"""Fields whose ids are stored unchanged, with their padding id. All other ids are stored plus one; 0 is padding."""

REQUEST_FEATURES: Final = (*CLOCK, *REQUEST_IDS)
ITEM_FEATURES: Final = (*ITEM_IDS, *(f"upload_{unit}" for unit in CLOCK))
HISTORY_FEATURES: Final = ITEM_IDS

BEST_LABEL: Final = 30
"""The label of an item in an ordered group is this minus the item's position."""


@dataclass(frozen=True)
class Group:
    """A sample group of a layout: its items have `label`, or `BEST_LABEL` minus their position if it is None."""

    stage: str
    label: int | None = None

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise ValueError(f"a group must be one of {', '.join(STAGES)}, got {self.stage!r}")
        if self.label is None and self.stage not in ORDERED_STAGES:
            raise ValueError(f"group {self.stage!r} has no positions in the data, so it needs a label")


@dataclass(frozen=True)
class Layout:
    """The groups of a list, best first, and the threshold of positive labels.

    Any number of groups is allowed. `find_layout` makes a custom layout from plain data.

    Attributes:
        groups: The groups; each takes `SLOTS` columns of the list.
        positive_above: Labels above this are positives.

    Example:
        >>> [group.stage for group in LAYOUTS["two-stage"].groups]
        ['rank_pos', 'rank_neg', 'coarse_neg', 'prerank_neg']
        >>> LAYOUTS["three-stage"].slots
        50
    """

    groups: tuple[Group, ...]
    positive_above: int

    @property
    def slots(self) -> int:
        """Number of columns of a list before negatives are added."""
        return SLOTS * len(self.groups)


LAYOUTS: Final[Mapping[str, Layout]] = {
    "two-stage": Layout(
        (Group("rank_pos"), Group("rank_neg", 7), Group("coarse_neg", 6), Group("prerank_neg", 5)), positive_above=7
    ),
    "three-stage": Layout(
        (
            Group("rerank_pos"),
            Group("rerank_neg", 8),
            Group("rank_neg", 7),
            Group("coarse_neg", 6),
            Group("prerank_neg", 5),
        ),
        positive_above=8,
    ),
}


def find_layout(choice: LayoutChoice) -> Layout:
    """Return the layout with the given name, or the layout described by plain data of a config.

    Args:
        choice: A name in `LAYOUTS`, or ``{"groups": {STAGE: LABEL, ...}, "positive_above": N}``, best group first; the
            label None is `BEST_LABEL` minus the item's position.

    Example:
        >>> find_layout({"groups": {"rank_pos": None, "coarse_neg": 5}, "positive_above": 5}).slots
        20
    """
    if isinstance(choice, str):
        if choice not in LAYOUTS:
            raise ValueError(
                f"unknown layout {choice!r}; available: {', '.join(LAYOUTS)}, "
                "or your own: {groups: {STAGE: LABEL, ...}, positive_above: N}"
            )
        return LAYOUTS[choice]
    groups, above = choice.get("groups"), choice.get("positive_above")
    if set(choice) != {"groups", "positive_above"} or not isinstance(groups, Mapping) or not isinstance(above, int):
        raise ValueError(
            "a layout must be {groups: {STAGE: LABEL, ...}, positive_above: N} with whole numbers (a label may be "
            f"null where the data have positions), got {choice!r}"
        )
    layout = Layout(tuple(Group(stage, label) for stage, label in groups.items()), above)
    if not any(group.label is None or group.label > above for group in layout.groups):
        raise ValueError(f"no group of the layout has a label above positive_above={above}, so nothing is positive")
    return layout


def largest_id(field: str, count: int) -> int:
    """Return the largest raw id of `field` if its count in `id_cnt` is `count`.

    Example:
        >>> largest_id("user_id", 100), largest_id("category_level_one", 100)
        (99, 101)
    """
    return count + 1 if field in UNSHIFTED else count - 1


def padding_id(field: str) -> int:
    """Return the padding id of `field`."""
    return UNSHIFTED.get(field, 0)


def stored_offset(field: str) -> int:
    """Return the offset that is added to an id of `field` before it is stored."""
    return 0 if field in UNSHIFTED else 1


def recflow_schema(
    counts: Mapping[str, int], layout: Layout, vocabularies: Mapping[str, Vocabulary] | None = None
) -> Schema:
    """Return the schema of RecFlow batches.

    Dense tables have count + 2 rows: ids 0..count-1 are stored as 1..count, 0 is padding, one row is unused. The
    request and the upload of an item share the time tables. Items and histories share the id tables.

    Args:
        counts: Number of distinct ids by field, from `read_counts`.
        layout: The groups of a list.
        vocabularies: Vocabularies of the fields whose tables are not dense.

    Example:
        >>> counts = dict.fromkeys((*REQUEST_IDS, *ITEM_IDS), 5)
        >>> schema = recflow_schema(counts, LAYOUTS["two-stage"])
        >>> schema.table("category_level_one")
        Table(name='category_level_one', rows=7, padding=2)
        >>> schema.positive_above
        7.0
    """
    fields, own = (*REQUEST_IDS, *ITEM_IDS), vocabularies or {}
    return Schema(
        tables=(
            *(
                Table(field, own[field].rows, own[field].padding, own[field].fingerprint)
                if field in own
                else Table(field, counts[field] + 2, padding_id(field))
                for field in fields
            ),
            *(Table(unit, rows) for unit, rows in CLOCK.items()),
        ),
        request=tuple(Feature(name, name) for name in REQUEST_FEATURES),
        history=tuple(Feature(name, name) for name in HISTORY_FEATURES),
        items=tuple(
            Feature(name, name.removeprefix("upload_") if name not in ITEM_IDS else name) for name in ITEM_FEATURES
        ),
        groups=tuple(group.stage for group in layout.groups),
        positive_above=float(layout.positive_above),
        labels="places",
    )
