"""Read lists as they are published: one row per request with the shown and the clicked items, histories beside them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys_topk.datamodules.prepare.lookup import Lookup
from recsys_topk.tabular.features.guess import guess_roles
from recsys_topk.tabular.ids.keys import chained
from recsys_topk.tabular.tables.columns import is_list, is_text, keys_of, lists_of, one_chunk
from recsys_topk.tabular.tables.reader import Source, TableReader, list_files, open_table

LABEL: Final = "clicked"
HISTORY: Final = "history"
_SHOWN: Final = re.compile(r"(inview|shown|displayed|impressions?|slate)$")
_CLICKED: Final = re.compile(r"(clicked|clicks)$")
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


def open_published(source: Source, types: Mapping[str, str] | None = None) -> TableReader | None:
    """Open a published table, or a folder with one and a table of histories; None = the source is something else.

    The shown items keep their column. The clicked ones become labels: a list of 0 and 1 as long as the shown items. The
    items of each user's history become the column ``history``.

    Args:
        source: A file, a folder, or any table.
        types: Types of columns of text files that are guessed wrongly.
    """
    readers = _readers(source, types)
    found = [(reader, columns) for reader in readers if (columns := shown_and_clicked(reader))]
    if len(found) != 1:
        return None
    (reader, (shown, clicked)), user = found[0], None
    histories = []
    for other in readers:
        own = guess_roles(other.columns, ("user",)).get("user")
        views = [field.name for field in other.schema if is_list(field.type) and _is_id(field.type.value_type)]
        if other is not reader and own in reader.columns and len(views) == 1:
            user = own
            histories.append((other, views[0]))
    if len(histories) + 1 < len(readers):
        return None
    fields = {field.name: field.type for field in reader.schema}
    fields[shown] = pa.list_(fields[shown].value_type if clicked else pa.string())
    label = clicked or LABEL
    fields[label] = pa.list_(pa.float32())
    if histories:
        fields[HISTORY] = histories[0][0].schema.field(histories[0][1]).type

    @cache
    def lookup() -> Lookup:
        return Lookup(histories[0][0], str(user), [histories[0][1]], "users")

    def scan(columns: list[str]) -> Any:
        done = 0
        needed = [shown, *([clicked] if clicked else []), *([user] if user else [])]
        for batch in reader.batches([*dict.fromkeys([*needed, *(name for name in columns if name in reader.columns)])]):
            made = {name: one_chunk(batch.column(name)) for name in batch.schema.names}
            if clicked:
                made[label] = _labels(made[shown], made[clicked], f"{reader.name}, row", done, clicked, shown)
                made[shown] = made[shown].cast(fields[shown])
            else:
                made[shown], made[label] = _unmarked(made[shown])
            if user and HISTORY in columns:
                made[HISTORY] = one_chunk(lookup().rows(keys_of(made[user]).keys).column(histories[0][1]))
            done += batch.num_rows
            yield pa.record_batch([made[name] for name in columns], names=columns)

    schema = pa.schema(list(fields.items()))
    identity = [one.fingerprint for one in readers]
    return TableReader(
        reader.name, schema, scan, lambda: [one() for one in identity], reader.rows, nbytes=reader.nbytes
    )


def _readers(source: Source, types: Mapping[str, str] | None) -> list[TableReader]:
    if isinstance(source, (str, Path)):
        system, places = list_files(source)
        remote = "://" in str(source)
        return [open_table(system.unstrip_protocol(place) if remote else place, types) for place in places]
    return [open_table(source, types)]


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
    return pa.ListArray.from_arrays(np.append(0, np.cumsum(found.length)).astype(np.int32), flat)


def _unmarked(column: Any) -> tuple[Any, Any]:
    """Return the items and the labels of text such as ``N1-0 N2-1``."""
    found = lists_of(column, " ", "")
    ends = np.append(0, np.cumsum(found.length)).astype(np.int32)
    items = pc.replace_substring_regex(found.values, r"-[01]$", "")
    labels = pc.cast(pc.ends_with(found.values, "-1"), pa.float32())
    return pa.ListArray.from_arrays(ends, items), pa.ListArray.from_arrays(ends, labels)
