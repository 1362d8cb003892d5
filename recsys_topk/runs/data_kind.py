"""Guess which data module reads a folder or file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recsys_topk.tabular.locations import location
from recsys_topk.tabular.tables.reader import file_names


def guess_kind(root: Any, options: Mapping[str, Any]) -> str | None:
    """Return ``"lists"`` or ``"interactions"`` if a source looks like it; None = RecFlow, or unknown.

    Lists are prepared lists, SVMlight files, published lists (`open_published`), or tables with a column for the
    request and one for the label or the stage. Interactions are tables with a column for the user and one for the item.

    Args:
        root: A file or folder, a path or an address.
        options: The other options of the data, which may name columns.
    """
    if not isinstance(root, (str, Path)):
        return None
    place = location(root)
    if any((folder / "all_stage").is_dir() for folder in (place, place / "data")):
        return None
    from recsys_topk.datamodules.interactions.tables import sort_files
    from recsys_topk.datamodules.lists.guess import looks_like_lists
    from recsys_topk.datamodules.lists.roles import ROLES
    from recsys_topk.datamodules.prepare.columns import find_table

    if isinstance(place, Path) and (place / "facts.json").is_file():
        return "lists" if find_table(place, "events") is None else "interactions"
    named = {role: options.get("split_column" if role == "split" else role) for role in ROLES}
    try:
        if looks_like_lists([str(root)], named):
            return "lists"
        return "interactions" if "interactions" in sort_files(file_names(root), roles=named) else None
    except ValueError:  # the data module that is chosen reports it
        return None
