"""Labels of logged items: a column of grades, or a table that maps the stage an item reached to its label."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from recsys_topk.tabular.schema import LabelKind
from recsys_topk.tabular.tables.columns import numbers_of, one_chunk
from recsys_topk.types import Array

LEFT_OUT = -1
_SCORE = "funnel_score_"

_PLACE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*-\s*position\s*")


@dataclass(frozen=True)
class StageLabel:
    """The label of the items whose last stage is this one: `value`, or `value` - position."""

    stage: str
    value: float
    by_position: bool = False

    @classmethod
    def parse(cls, stage: str, given: Any) -> StageLabel:
        """Parse the label of a stage: a number, or text such as ``"30 - position"``."""
        number = given
        if isinstance(given, str):
            match = _PLACE.fullmatch(given)
            if match:
                return cls(stage, float(match[1]), by_position=True)
            try:
                number = float(given)
            except ValueError:
                number = None
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number < float("inf"):
            raise ValueError(
                f"labels maps stage {stage!r} to {given!r}; write a number >= 0, 'N - position', or null to leave such "
                f"items out"
            )
        return cls(stage, float(number))


def funnel_labels(columns: Iterable[str]) -> dict[str, float] | None:
    """Return the label of each stage of a funnel log (`recsys-topk serve --log`), best first; None = it is not one.

    Example:
        >>> funnel_labels(["item_id", "stage", "funnel_score_retrieval", "funnel_score_ranking"])
        {'shown': 3, 'ranking': 2, 'retrieval': 1, 'dropped': 0}
    """
    stages = [name.removeprefix(_SCORE) for name in columns if name.startswith(_SCORE)]
    ordered = ["shown", *reversed(stages), "dropped"]
    return {name: len(stages) + 1 - place for place, name in enumerate(ordered)} if stages else None


class StageTable:
    """Maps stages reached to labels and sample groups.

    Args:
        table: Label of each stage, best stage first: a number, ``"N - position"``, or None to leave its items out.

    Example:
        >>> import pyarrow as pa
        >>> table = StageTable({"shown": "30 - position", "ranked": 7, "recalled": 5, "tested": None})
        >>> stages, positions = pa.array(["ranked", "shown", "tested"]), np.array([0.0, 2.0, 1.0])
        >>> labels, group = table.apply(stages, positions, "stage", "position")
        >>> labels.tolist(), group.tolist()
        ([7.0, 28.0, 0.0], [1, 0, -1])
        >>> table.positive_above, table.kind
        (7.0, 'places')
    """

    def __init__(self, table: Mapping[str, Any]) -> None:
        self.known = [str(stage) for stage in table]
        self.stages = [StageLabel.parse(str(stage), given) for stage, given in table.items() if given is not None]
        if not self.stages:
            raise ValueError("labels maps no stage to a label; write e.g. {shown: '30 - position', ranked: 7}")
        for number, stage in enumerate(self.stages):
            if stage.value < self._floor(number) or (stage.by_position and stage.value <= self._floor(number)):
                raise ValueError(
                    f"labels must name the best stage first: {stage.stage!r} has {stage.value:g}, and a later stage "
                    f"has {self._floor(number):g}"
                )

    @property
    def groups(self) -> tuple[str, ...]:
        """The stages, best first."""
        return tuple(stage.stage for stage in self.stages)

    @property
    def needs_position(self) -> bool:
        """Whether a label depends on the position."""
        return any(stage.by_position for stage in self.stages)

    @property
    def kind(self) -> LabelKind:
        """``"places"`` if a label depends on the position, else ``"grades"``."""
        return "places" if self.needs_position else "grades"

    @property
    def positive_above(self) -> float:
        """The label of the second stage, so that the first one is positive; 0 if there is one stage."""
        return max(self._floor(0), 0.0)

    def apply(self, stage: Any, position: Array | None, stage_column: str, position_column: str) -> tuple[Array, Array]:
        """Return the labels and groups of rows; group -1 = left out.

        Args:
            stage: The stage of each row, a pyarrow array.
            position: The position of each row; None = there is no such column.
            stage_column: The name of the stage column, for error messages.
            position_column: The name of the position column, for error messages.
        """
        coded = one_chunk(stage).cast("string").dictionary_encode()
        names = [str(name).strip() for name in coded.dictionary.to_pylist()]
        unknown = [name for name in names if name not in self.known]
        if unknown or coded.null_count:
            example = unknown[0] if unknown else None
            raise ValueError(
                f"column {stage_column!r} has {'no value' if example is None else repr(example)} in some rows, and "
                f"labels maps only {', '.join(self.known)}; "
                + (
                    "fill in the stage"
                    if example is None
                    else f"add {{{example}: 0}}, or {{{example}: null}} to drop them"
                )
            )
        place = {name: number for number, name in enumerate(self.groups)}
        group = np.array([place.get(name, LEFT_OUT) for name in names], dtype=np.int8)[np.asarray(coded.indices)]
        labels = np.array([stage.value for stage in self.stages] + [0.0])[group]
        ordered = np.array([stage.by_position for stage in self.stages] + [False])[group]
        if ordered.any():
            if position is None:
                raise ValueError(
                    "labels uses the position, and no position column is known; give --data.position COLUMN"
                )
            labels = np.where(ordered, labels - position, labels)
            floor = np.array([self._floor(number) for number in range(len(self.stages))] + [-np.inf])[group]
            wrong = np.flatnonzero(ordered & ~((labels > floor) & (labels >= 0)))
            if wrong.size:
                at = wrong[0]
                own = self.stages[group[at]]
                found = "missing" if np.isnan(position[at]) else f"{position[at]:g}"
                raise ValueError(
                    f"column {position_column!r} is {found} for an item of stage {own.stage!r}, so its label "
                    f"{own.value:g} - position is not above {max(floor[at], 0):g}, the next stage's; check the "
                    f"positions, or increase {own.value:g}"
                )
        return labels.astype(np.float32), group

    def _floor(self, number: int) -> float:
        return max((stage.value for stage in self.stages[number + 1 :]), default=-np.inf)


def graded(column: Any, name: str, first_row: int) -> Array:
    """Return a column of labels; raise if a label is not finite or negative.

    Args:
        column: A pyarrow array.
        name: Its name, for error messages.
        first_row: The number of its first row in the source, for error messages.
    """
    try:
        labels = numbers_of(column, name)
    except ValueError as error:
        text = str(error).partition("; correct it")[0]
        raise ValueError(f"{text}; labels must be numbers, or map stages to labels (--data.labels)") from error
    wrong = np.flatnonzero(~(labels >= 0))
    if wrong.size:
        found = "missing or not finite" if np.isnan(labels[wrong[0]]) else f"{labels[wrong[0]]:g}"
        raise ValueError(
            f"column {name!r} is {found} in row {first_row + wrong[0] + 1} (rows like this in this part of the data: "
            f"{wrong.size}); labels must be finite and >= 0"
        )
    return labels.astype(np.float32)
