"""Open files, folders and data frames as tables with one row per (request, item), and find their splits."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from recsys_topk.datamodules.lists.nested import flat_rows
from recsys_topk.datamodules.lists.published import LABEL, SPLIT_NAMED, open_published, open_readers, shown_and_clicked
from recsys_topk.datamodules.lists.roles import MARKERS, find_columns
from recsys_topk.datamodules.lists.svmlight import ROLES, largest_index, looks_like_svmlight, open_svmlight
from recsys_topk.tabular.tables.columns import SPLIT_NAMES
from recsys_topk.tabular.tables.reader import Source, TableReader, file_format, open_table


def is_svmlight(source: Source) -> bool:
    """Return whether a source is an SVMlight file, by its first line unless its name implies another format."""
    if not isinstance(source, (str, Path)) or "://" in str(source) or not Path(source).expanduser().is_file():
        return False
    return (file_format(str(source)) is None or str(source).endswith(".txt")) and looks_like_svmlight(source)


def split_files(root: Source) -> dict[int, str]:
    """Return the files of a folder by split number, from names such as ``test.txt``.

    Its folders are used in the same way if they have published lists with clicks: EB-NeRD's ``train`` and
    ``validation``, MIND's ``MINDsmall_train`` and ``MINDsmall_dev``. If there is no third, the second is for testing.

    Return an empty dict unless there is at least one for training and one for testing.
    """
    if not isinstance(root, (str, Path)) or "://" in str(root) or not Path(root).expanduser().is_dir():
        return {}
    paths = [path for path in sorted(Path(root).expanduser().iterdir()) if not path.name.startswith(".")]
    named = {path: SPLIT_NAMES[match[1]] for path in paths if (match := SPLIT_NAMED.search(path.name.lower()))}
    files = [path for path in named if path.is_file() and not path.name.endswith(".query")]
    folders = [path for path in named if path.is_dir()]
    found: dict[int, str] = {}
    for path in files or [folder for folder in folders if open_published(folder) is not None]:
        number = named[path]
        if number in found:
            raise ValueError(
                f"{root} has two files of one split, {found[number]} and {path}; name them: --data.root FILE "
                f"--data.test FILE"
            )
        found[number] = str(path)
    if not files and 1 in found and 2 not in found:
        found[2] = found.pop(1)
    return found if {0, 2} <= set(found) else {}


def open_sources(
    sources: Mapping[int, Source], types: Mapping[str, str] | None, given: Mapping[str, str | None]
) -> tuple[dict[int, TableReader], dict[str, str], bool]:
    """Open tables as rows of (request, item).

    Args:
        sources: The tables by split number; 0 is the main one.
        types: Types of columns of text files that are guessed wrongly.
        given: Columns by role; None = guess.

    Returns:
        The tables, the column of each role, and whether the tables are SVMlight files.
    """
    kinds = {number: is_svmlight(source) for number, source in sources.items()}
    if any(kinds.values()):
        other = next((source for number, source in sources.items() if not kinds[number]), None)
        if other is not None:
            raise ValueError(f"{other} is not an SVMlight file, and {sources[0]} is one; use the same format for all")
        named = sorted(role for role, column in given.items() if column)
        if named:
            raise ValueError(f"SVMlight files have no column names; leave out --data.{named[0]}")

        @cache
        def width() -> int:
            return max(largest_index(source) for source in sources.values())

        return {number: open_svmlight(source, width) for number, source in sources.items()}, dict(ROLES), True
    files = {number: open_readers(source, types) for number, source in sources.items()}
    published = {number: open_published(source, types, files[number]) for number, source in sources.items()}
    raw = {
        number: published[number] or (files[number][0] if len(files[number]) == 1 else open_table(source, types))
        for number, source in sources.items()
    }
    marked = shown_and_clicked(published[0]) if published[0] is not None else None
    if marked is not None and not given.get("item") and not given.get("label"):
        given = {**given, "item": marked[0], "label": marked[1] or LABEL}
    first: dict[str, str] = find_columns(raw[0], given)
    markers = [first[role] for role in MARKERS if role in first]
    whole = [first["history"]] if "history" in first else []
    flat = {number: flat_rows(reader, markers, whole) for number, reader in raw.items()}
    roles = find_columns(flat[0], given)
    for reader in flat.values():
        reader.require(column for role, column in roles.items() if role != "split")
    return flat, roles, False
