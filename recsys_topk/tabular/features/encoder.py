"""Encode tables of raw columns as ids and values in the layout of a schema. Needs numpy and pyarrow, not torch."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recsys_topk.files import write_whole
from recsys_topk.registry import suggest
from recsys_topk.tabular.features.description import DATA_PARTS, TIME_ROWS, DataPart, Description, RawFeature
from recsys_topk.tabular.ids.vocabulary import Vocabulary, load_vocabularies, save_vocabularies
from recsys_topk.tabular.schema import Feature, LabelKind, Schema, Table
from recsys_topk.tabular.tables.columns import keys_of, lists_of, numbers_of, one_chunk
from recsys_topk.tabular.tables.times import guess_unit, microseconds, time_part
from recsys_topk.types import Array

State = dict[str, Any]

FILE: Final = "features.json"
_FORMAT: Final = 1


class Encoded(NamedTuple):
    """Encoded rows of a part: ids (n, F) int64 and values (n, V) float32, in the order of the schema."""

    ids: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]


class FeatureEncoder:
    """Encodes tables of raw features with the vocabularies and statistics of the training data.

    `FeatureFitter` makes an encoder, and `load` reads a saved one. Each row is encoded independently of the others.

    Args:
        description: The features.
        states: The fitted statistics by part and feature: means, sizes, bucket edges, units of time.
        vocabularies: The vocabulary of each table of categorical features and bags.

    Example:
        >>> from recsys_topk.tabular.features.fitter import fit_features
        >>> described = Description.from_plain({"items": {"film": "categorical", "price": "numeric"}})
        >>> encoder = fit_features(described, {"items": {"film": ["a", "b"], "price": [1.0, 3.0]}})
        >>> ids, values = encoder.encode("items", {"film": ["b", "new"], "price": [3.0, None]})
        >>> values.tolist()
        [[1.0], [0.0]]
    """

    def __init__(
        self,
        description: Description,
        states: Mapping[Any, Mapping[str, State]],
        vocabularies: Mapping[str, Vocabulary],
    ) -> None:
        self.description = description
        self.states = {part: dict(states.get(part, {})) for part in DATA_PARTS}
        self.vocabularies = dict(vocabularies)

    def encode(self, part: DataPart, rows: Any, *, partial: bool = False) -> Encoded:
        """Return the ids and values of rows of a part.

        Args:
            part: The part of the description: ``"user"``, ``"context"``, ``"items"`` or ``"history"``.
            rows: A pyarrow table or record batch, a mapping from column to values, or a list of dicts.
            partial: Whether columns may be absent. Their values then count as missing; otherwise an absent column is an
                error.
        """
        table = as_arrow(rows, self.description.columns(part))
        present = list(table.schema.names)
        for column in self.description.columns(part):
            if column not in present and not partial:
                raise ValueError(
                    f"the {part} table has no column {column!r}; {suggest(column, present)}it has: {', '.join(present)}"
                )
        number = table.num_rows
        ids: list[Array] = [np.empty((number, 0), dtype=np.int64)]
        values: list[Array] = [np.empty((number, 0), dtype=np.float32)]
        for feature in self.description.part(part):
            if all(column in present for column in feature.columns):
                columns = [one_chunk(table.column(column)) for column in feature.columns]
            else:
                columns = [_nothing(number) for _ in feature.columns]
            made_ids, made_values = self._one(part, feature, columns)
            ids += made_ids
            values += made_values
        return Encoded(np.concatenate(ids, axis=1), np.concatenate(values, axis=1))

    def schema(
        self,
        groups: Sequence[str] = (),
        positive_above: float = 0.0,
        labels: LabelKind = "grades",
        reserved: Collection[str] = (),
    ) -> Schema:
        """Return the schema of the encoded features. Request features are those of the user, then of the context.

        Args:
            groups: Names of the sample groups, best first.
            positive_above: Labels above this are positives.
            labels: The meaning of the labels (`Schema.labels`).
            reserved: Names that no table may have.
        """
        names = self._names(reserved)
        parts = {part: self._features(part, names) for part in DATA_PARTS}
        tables: dict[str, Table] = {}
        for part in DATA_PARTS:
            for feature in self.description.part(part):
                tables |= {table.name: table for table in self._tables(part, feature, names)}
        used = [feature.table for features in parts.values() for feature in features if feature.table is not None]
        return Schema(
            tables=tuple(tables[name] for name in dict.fromkeys(used)),
            request=(*parts["user"], *parts["context"]),
            history=parts["history"],
            items=parts["items"],
            groups=tuple(groups),
            positive_above=positive_above,
            labels=labels,
        )

    def save(self, folder: str | Path) -> None:
        """Save the encoder to a folder, as JSON and plain arrays. `load` reads it."""
        save_vocabularies(folder, self.vocabularies)
        content = {"format": _FORMAT, "description": self.description.to_plain(), "states": self.states}
        write_whole(Path(folder) / FILE, json.dumps(content, indent=1) + "\n")

    @classmethod
    def load(cls, folder: str | Path) -> FeatureEncoder:
        """Load an encoder from a folder written by `save`."""
        path = Path(folder) / FILE
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing; it describes how features are encoded")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != _FORMAT:
                raise ValueError(f"it has format {content['format']!r}, this release reads {_FORMAT}")
            description, states = Description.from_plain(content["description"]), content["states"]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} cannot be used ({error}); prepare the data again, or copy the whole folder"
            ) from error
        return cls(description, states, load_vocabularies(folder))

    def _one(self, part: DataPart, feature: RawFeature, columns: list[Any]) -> tuple[list[Array], list[Array]]:
        """Return the id columns and the value columns of a feature."""
        state = self.states[part].get(feature.name, {})
        if feature.kind == "categorical":
            keys, missing, _ = keys_of(columns[0])
            return [self._vocabulary(feature).encode(keys, missing)[:, None]], []
        if feature.kind == "bag":
            found = lists_of(columns[0], feature.separator, feature.columns[0])
            keys, missing, _ = keys_of(found.values)
            kept = found.place < state["size"]
            ids = np.zeros((len(columns[0]), state["size"]), dtype=np.int64)
            rows = self._vocabulary(feature).encode(keys, missing)
            ids[found.row[kept], found.place[kept]] = rows[kept]
            return [ids], []
        if feature.kind == "time":
            unit = state["unit"] if state.get("unit") else guess_unit(columns[0])
            time, missing = microseconds(columns[0], unit, feature.columns[0])
            made = [time_part(time, piece, feature.utc_offset) for piece in feature.parts]
            return [np.where(missing, 0, ids)[:, None] for ids in made], []
        numbers = raw_numbers(feature, columns, state.get("size"))
        missing = np.asarray(np.isnan(numbers).any(axis=1))
        if feature.transform == "bucketise":
            bucket = np.searchsorted(np.asarray(state["edges"]), numbers[:, 0], side="right") + 2
            return [np.where(missing, 1, bucket)[:, None]], []
        values = squashed(feature, numbers)
        if feature.transform != "none":
            values = (values - np.asarray(state["mean"])) / np.asarray(state["deviation"])
        blocks = [np.where(np.isnan(values), 0.0, values).astype(np.float32)]
        if state.get("missing"):
            blocks.append(missing.astype(np.float32)[:, None])
        return [], blocks

    def _vocabulary(self, feature: RawFeature) -> Vocabulary:
        return self.vocabularies[str(feature.table)]

    def _features(self, part: DataPart, names: Mapping[Any, str]) -> tuple[Feature, ...]:
        made: list[Feature] = []
        for raw in self.description.part(part):
            state = self.states[part].get(raw.name, {})
            if raw.kind == "categorical":
                made.append(Feature(raw.name, names[raw.table]))
            elif raw.kind == "bag":
                made.append(Feature(raw.name, names[raw.table], "bag", state["size"]))
            elif raw.kind == "time":
                made += [Feature(f"{raw.name}_{piece}", names["time", piece]) for piece in raw.parts]
            elif raw.transform == "bucketise":
                made.append(Feature(raw.name, names[self._bucket(part, raw)]))
            else:
                kind_and_size: Any = {"kind": "vector", "size": state["size"]} if raw.kind == "vector" else {}
                made.append(Feature(raw.name, **(kind_and_size or {"kind": "numeric"})))
                if state.get("missing"):
                    made.append(Feature(f"{raw.name}_missing", kind="numeric"))
        return tuple(made)

    def _tables(self, part: DataPart, raw: RawFeature, names: Mapping[Any, str]) -> list[Table]:
        """Return the tables of a feature."""
        if raw.table is not None:
            vocabulary = self.vocabularies[raw.table]
            return [Table(names[raw.table], vocabulary.rows, vocabulary.padding, vocabulary.fingerprint)]
        if raw.kind == "time":
            return [Table(names["time", piece], TIME_ROWS[piece] + 1) for piece in raw.parts]
        if raw.transform == "bucketise" and raw.kind == "numeric":
            return [Table(names[self._bucket(part, raw)], len(self.states[part][raw.name]["edges"]) + 3)]
        return []

    def _bucket(self, part: DataPart, raw: RawFeature) -> tuple[Any, ...]:
        """Return the key of a bucketised feature's table. Features with the same name and edges share a table."""
        return ("bucket", raw.name, *self.states[part][raw.name]["edges"])

    def _names(self, reserved: Collection[str]) -> dict[Any, str]:
        """Return distinct names of the schema's tables, for vocabularies, parts of times and buckets.

        The tables become torch modules, whose names must not contain a dot.
        """
        wanted: dict[Any, str] = {name: name for name in self.vocabularies}
        for part in DATA_PARTS:
            for raw in self.description.part(part):
                if raw.kind == "time":
                    wanted |= {("time", piece): piece for piece in raw.parts}
                elif raw.kind == "numeric" and raw.transform == "bucketise":
                    wanted.setdefault(self._bucket(part, raw), f"{raw.name}_bucket")
        made: dict[Any, str] = {}
        for key, name in wanted.items():
            name = name.replace(".", "_")
            name = f"table_{name}" if name in reserved or name.startswith("_") or not name else name
            while name in made.values():
                name += "_"
            made[key] = name
        return made


def as_arrow(rows: Any, columns: Sequence[str]) -> Any:
    """Return rows as a pyarrow table or record batch. Wanted columns that do not exist are skipped.

    Args:
        rows: A table or record batch, a mapping from column to values, or a list of dicts.
        columns: The wanted columns.
    """
    if isinstance(rows, (pa.Table, pa.RecordBatch)):
        return rows
    if isinstance(rows, Mapping):
        found = {name: rows[name] for name in columns if name in rows}
        number = len(next(iter(rows.values()))) if rows else 0
    else:
        found = {name: [row.get(name) for row in rows] for name in columns if any(name in row for row in rows)}
        number = len(rows)
    try:
        made = {name: values if isinstance(values, pa.Array) else pa.array(values) for name, values in found.items()}
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ValueError(
            f"a column has values of different types: {' '.join(str(error).split())}; make it one type"
        ) from error
    return pa.table(made) if made else pa.table({"": _nothing(number)})


def raw_numbers(feature: RawFeature, columns: Sequence[Any], size: int | None) -> Array:
    """Return the numbers of a numeric feature or vector, (n, size) float64, NaN where they are missing.

    Args:
        feature: The feature.
        columns: The columns of the feature.
        size: Length of a vector; None = the size in the description, or the length of the first vector.
    """
    if feature.kind == "numeric" or len(feature.columns) > 1:
        pairs = zip(columns, feature.columns, strict=True)
        return np.stack([numbers_of(column, name) for column, name in pairs], axis=1)
    found = lists_of(columns[0], feature.separator, feature.columns[0])
    there = found.length[~found.missing]
    if size is None:
        size = feature.size or (int(there[0]) if there.size else 1)
    wrong = np.flatnonzero(~found.missing & (found.length != size))
    if wrong.size:
        raise ValueError(
            f"vector {feature.name!r} has {size} numbers, and row {wrong[0]} has {found.length[wrong[0]]}; give all "
            f"rows the same length, or none where it is missing"
        )
    numbers = np.full((len(columns[0]), size), np.nan)
    numbers[found.row, found.place] = numbers_of(found.values, feature.columns[0])
    return numbers


def squashed(feature: RawFeature, numbers: Array) -> Array:
    """Return sign(x) log(1 + abs(x)) if the transform of the feature is ``"log"``, else the numbers unchanged."""
    return np.sign(numbers) * np.log1p(np.abs(numbers)) if feature.transform == "log" else numbers


def _nothing(number: int) -> Any:
    return pa.nulls(number)
