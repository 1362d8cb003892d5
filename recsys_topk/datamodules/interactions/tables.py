"""Find the files of interactions, users and items by their columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from recsys_topk.tabular.features.guess import guess_roles
from recsys_topk.tabular.tables.reader import FORMATS, Source, TableReader, file_format, file_names, open_table


@dataclass(frozen=True)
class Tables:
    """The tables of a data set."""

    interactions: TableReader
    users: TableReader | None = None
    items: TableReader | None = None


def open_tables(
    root: str | Path | None = None,
    interactions: Source = None,
    users: Source = None,
    items: Source = None,
    types: Mapping[str, str] | None = None,
    roles: Mapping[str, str | None] | None = None,
) -> Tables:
    """Open the tables of a data set.

    Args:
        root: A file of interactions, or a folder with files of interactions, users and items; not used for tables
            that are passed.
        interactions: One row per interaction.
        users: One row per user.
        items: One row per item.
        types: Types of columns that are guessed wrongly.
        roles: Known columns of the interactions, by role.
    """
    if interactions is None:
        if root is None:
            raise ValueError("no interactions are given; give --data.root FOLDER or --data.interactions FILE")
        places = file_names(root)
        if not places:
            raise ValueError(f"{root} has no file that ends in .{', .'.join(FORMATS)}")
        sorted_files = sort_files(places, types, roles)
        interactions = sorted_files.get("interactions")
        users = sorted_files.get("users") if users is None else users
        items = sorted_files.get("items") if items is None else items
        if interactions is None and len(places) > 1:
            raise ValueError(
                f"{root} has no table with a column for the user and one for the item; name them: --data.user COLUMN "
                f"--data.item COLUMN, or give --data.interactions FILE"
            )
        interactions = interactions or root  # if a single file has no such columns, `find_roles` lists those it has
    return Tables(
        open_table(interactions, types),
        None if users is None else open_table(users, types),
        None if items is None else open_table(items, types),
    )


def sort_files(
    paths: Sequence[str], types: Mapping[str, str] | None = None, roles: Mapping[str, str | None] | None = None
) -> dict[str, list[str]]:
    """Return the files of interactions, users, items, and other files, found by their columns.

    Args:
        paths: Files.
        types: Types of columns that are guessed wrongly.
        roles: Known columns of the interactions, by role.
    """
    known = {role: column for role, column in (roles or {}).items() if column is not None}
    found: dict[str, list[str]] = {}
    for path in paths:
        if file_format(path) is None:
            continue
        columns = open_table(path, types).columns
        here = {**guess_roles(columns, ("user", "item")), **{r: c for r, c in known.items() if c in columns}}
        kind = {(True, True): "interactions", (True, False): "users", (False, True): "items", (False, False): "others"}
        found.setdefault(kind["user" in here, "item" in here], []).append(path)
    return found
