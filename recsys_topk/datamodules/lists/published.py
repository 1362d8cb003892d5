"""Read lists as they are published: one row per request with the shown and the clicked items, histories beside them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys_topk.datamodules.prepare.lookup import Lookup
from recsys_topk.tabular.features.guess import guess_features, guess_roles
from recsys_topk.tabular.ids.keys import chained
from recsys_topk.tabular.tables.columns import SPLIT_NAMES, ListColumn, is_list, is_text, keys_of, lists_of, one_chunk
from recsys_topk.tabular.tables.reader import Source, TableReader, file_format, file_names, open_table

LABEL: Final = "clicked"
HISTORY: Final = "history"
SPLIT_NAMED: Final = re.compile(
    r"(?:^|[._-])(" + "|".join(name for name in SPLIT_NAMES if name.isalpha()) + r")(?:[._-]|$)"
)
"""Names of files and folders that hold one split, in lower case."""

_SHOWN: Final = re.compile(r"(inview|shown|displayed|impressions?|slate)$")
_CLICKED: Final = re.compile(r"(clicked|clicks)$")
_HEAD: Final = 20_000
_MARKED: Final = r"^\S+-[01]( \S+-[01])*$"


def shown_and_clicked(reader: TableReader) -> tuple[str, str | None] | None:
    """Return the columns of the shown and of the clicked items of a published table; None = it is another table.

    The shown items are a column of lists beside one of the clicked items (EB-NeRD: ``article_ids_inview`` and
    ``article_ids_clicked``), or text such as ``N1-0 N2-1`` that marks the clicked items with 1 (MIND).
    """
    plain = {re.sub(r"[^a-z0-9]", "", field.name.lower()): field for field in reader.schema}
    lists = {name: field.name for name, field in plain.items() if is_list(field.type)}
    shown = [column for name, column in lists.items() if _SHOWN.search(name)]
    clicked = [column for name, column in lists.items() if _CLICKED.search(name)]
    if shown and clicked:
        return shown[0], clicked[0]
    for name, field in plain.items():
        if _SHOWN.search(name) and is_text(field.type):
            column = reader.head(1000, [field.name]).column(0)
            if len(column) > column.null_count and pc.all(pc.match_substring_regex(column, _MARKED)).as_py():
                return field.name, None
    return None


def open_published(
    source: Source, types: Mapping[str, str] | None = None, readers: list[TableReader] | None = None
) -> TableReader | None:
    """Open a published table, or a folder with one and tables of histories and items; None = it is something else.

    The shown items keep their column. The clicked ones become labels: a list of 0 and 1 as long as the shown items. The
    items of each user's history become the column ``history``, and the features of the items columns of lists.

    Args:
        source: A file, any table, or a folder. If its name says that it is one split, e.g. ``train``, the files next to
            it belong to it.
        types: Types of columns of text files that are guessed wrongly.
        readers: The tables of the source if they are open; None = open them.
    """
    readers = open_readers(source, types) if readers is None else readers
    found = [(reader, columns) for reader in readers if (columns := shown_and_clicked(reader))]
    if len(found) != 1:
        return None
    (reader, (shown, clicked)), label = found[0], found[0][1][1] or LABEL
    fields = {field.name: field.type for field in reader.schema}
    fields[shown] = pa.list_(fields[shown].value_type if clicked else pa.string())
    fields[label] = pa.list_(pa.float32())
    users, items = [], []
    for other in readers:
        roles = guess_roles(other.columns, ("user", "item"))
        views = [field.name for field in other.schema if is_list(field.type) and _is_id(field.type.value_type)]
        if other is reader:
            continue
        if roles.get("user") in reader.columns and len(views) == 1:
            users.append(_Joined(other, str(roles["user"]), {HISTORY: views[0]}, "users"))
            fields[HISTORY] = other.schema.field(views[0]).type
        elif "item" in roles and "user" not in roles:
            guesses = guess_features(other, [roles["item"]], _HEAD)
            names = [guess.column for guess in guesses if guess.feature is not None]
            taken = {name if name not in fields else f"item_{name}": name for name in names}
            items.append(_Joined(other, roles["item"], taken, "items"))
            fields |= {new: pa.list_(other.schema.field(old).type) for new, old in taken.items()}
        else:
            return None
    if max(len(users), len(items)) > 1:
        return None

    def scan(source: TableReader, columns: list[str]) -> Any:
        done = source.first
        needed = [shown, *([clicked] if clicked else []), *(one.key for one in users)]
        for batch in source.batches([*dict.fromkeys([*needed, *(name for name in columns if name in source.columns)])]):
            made = {name: one_chunk(batch.column(name)) for name in batch.schema.names}
            if clicked:
                made[label] = _labels(made[shown], made[clicked], f"{source.name}, row", done, clicked, shown)
                made[shown] = made[shown].cast(fields[shown])
            else:
                made[shown], made[label] = _unmarked(made[shown])
            for one in users:
                made |= one.columns_of(made[one.key], columns)
            for one in items:
                listed = lists_of(made[shown], " ", shown)
                added = one.columns_of(listed.values, columns)
                made |= {name: pa.ListArray.from_arrays(_ends(listed), values) for name, values in added.items()}
            done += batch.num_rows
            yield pa.record_batch([made[name] for name in columns], names=columns)

    schema = pa.schema(list(fields.items()))
    identity = [one.fingerprint for one in readers]
    return reader.changed(schema, scan, lambda: [one() for one in identity], reader.rows)


class _Joined:
    """A table of users or items whose columns are added to the requests. It is read when they are first needed.

    Args:
        reader: The table.
        key: Its column of ids.
        columns: Names of its columns, by their names in the requests.
        what: ``"users"`` or ``"items"``, for error messages.
    """

    def __init__(self, reader: TableReader, key: str, columns: Mapping[str, str], what: str) -> None:
        self.reader, self.key, self.columns, self.what = reader, key, columns, what
        self._lookups: dict[tuple[str, ...], Lookup] = {}

    def columns_of(self, ids: Any, wanted: Sequence[str]) -> dict[str, Any]:
        """Return the wanted columns of some ids."""
        chosen = {new: old for new, old in self.columns.items() if new in wanted}
        if not chosen:
            return {}
        kept = tuple(chosen.values())
        if kept not in self._lookups:
            self._lookups = {kept: Lookup(self.reader, self.key, kept, self.what)}
        rows = self._lookups[kept].rows(keys_of(ids).keys)
        return {new: one_chunk(rows.column(old)) for new, old in chosen.items()}


def open_readers(source: Source, types: Mapping[str, str] | None) -> list[TableReader]:
    """Open the tables of a source, with those next to a folder of one split.

    Files of a folder with the same columns are one table.
    """
    if not isinstance(source, (str, Path)):
        return [open_table(source, types)]
    places, folder = file_names(source), Path(source).expanduser()
    if folder.is_dir() and SPLIT_NAMED.search(folder.name.lower()):
        places += sorted(str(path) for path in folder.parent.iterdir() if path.is_file() and file_format(path.name))
    readers, same = [open_table(place, types) for place in places], defaultdict(list)
    for number, (place, reader) in enumerate(zip(places, readers, strict=True)):
        same[(str(Path(place).parent), *reader.columns)].append(number)
    return [
        readers[parts[0]] if len(parts) == 1 else open_table([places[part] for part in parts], types)
        for parts in same.values()
    ]


def _is_id(kind: Any) -> bool:
    return bool(pa.types.is_integer(kind) or is_text(kind))


def _labels(shown: Any, clicked: Any, where: str, done: int, clicked_name: str, shown_name: str) -> Any:
    """Return for each list of shown items a list with 1 for the clicked ones and 0 for the others."""
    found, chosen = lists_of(shown, " ", shown_name), lists_of(clicked, " ", clicked_name)
    pairs, hits = (chained([one.row, keys_of(one.values).keys], 0) for one in (found, chosen))
    absent = np.flatnonzero(~np.isin(hits, pairs))
    if absent.size:
        item = chosen.values[int(absent[0])].as_py()
        raise ValueError(
            f"{where} {done + chosen.row[absent[0]] + 1}: {clicked_name} has {item!r}, which is not in {shown_name}; a "
            f"clicked item must be a shown one"
        )
    flat = pa.array(np.isin(pairs, hits).astype(np.float32))
    return pa.ListArray.from_arrays(_ends(found), flat)


def _unmarked(column: Any) -> tuple[Any, Any]:
    """Return the items and the labels of text such as ``N1-0 N2-1``."""
    found = lists_of(column, " ", "")
    items = pc.replace_substring_regex(found.values, r"-[01]$", "")
    labels = pc.cast(pc.ends_with(found.values, "-1"), pa.float32())
    return pa.ListArray.from_arrays(_ends(found), items), pa.ListArray.from_arrays(_ends(found), labels)


def _ends(found: ListColumn) -> Any:
    return np.append(0, np.cumsum(found.length)).astype(np.int32)
