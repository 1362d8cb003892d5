"""Guess a config for ``--data lists`` from the names and values of the columns, for the user to check and edit."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from recsys_topk.datamodules.lists.labels import StageTable, funnel_labels
from recsys_topk.datamodules.lists.published import open_published
from recsys_topk.datamodules.lists.roles import find_columns, guess_columns, require_roles
from recsys_topk.datamodules.lists.sources import is_svmlight, open_sources, split_files
from recsys_topk.datamodules.lists.svmlight import DESCRIPTION
from recsys_topk.tabular.features.description import Description
from recsys_topk.tabular.features.guess import GuessedTables, guess_feature, guess_roles
from recsys_topk.tabular.tables.columns import numbers_of, one_chunk
from recsys_topk.tabular.tables.reader import Source, TableReader, open_table

_HEAD: Final = 20_000
_MOST_STAGES: Final = 20
_FUNNEL: Final = (
    "purchas|order|bought|buy|conver|paid", "cart|basket", "like|share|follow", "click|watch|play",
    "show|impress|expos|view|display|served", r"(?<!p)re[_-]?rank", r"(?<!pre)(?<!pre[_-])rank", "coarse",
    "pre[_-]?rank", "recall|retriev|candidate|match", "sampl|random",
)  # fmt: skip
"""Stage names, best first."""


def looks_like_lists(files: Sequence[str], given: Mapping[str, str | None]) -> bool:
    """Return whether files hold logged lists: SVMlight, or columns for the request and for a label or a stage.

    Args:
        files: Files, or a folder.
        given: Columns by role that were given by the user.
    """
    sources = _sources(files)
    if any(is_svmlight(source) for source in sources.values()):
        return True
    try:
        if open_published(sources[0]) is not None:
            return True
        reader = open_table(sources[0])
    except ValueError:  # the files do not form one table
        return False
    roles = find_columns(reader, given)
    rating = guess_roles(reader.columns, ("rating",)).get("rating")
    told = "stage" in roles or ("label" in roles and (given.get("label") or roles["label"] != rating))
    return "request" in roles and bool(told)


def guess_lists(files: Sequence[str], given: Mapping[str, str | None]) -> tuple[GuessedTables, dict[str, Any]]:
    """Return the guessed columns and features of logged lists, and a config that trains on them.

    Stages become labels if there is no label column. Known stage names are ordered as in the usual funnel. Otherwise
    stages with positions come first, then those with the fewest rows. If stages are numbers, the largest is best. The
    label of the best stage is computed from the position if it has one.

    Args:
        files: Files, or a folder with one file per split.
        given: Columns by role that were given by the user; None = guess.

    Returns:
        Columns, features and the inspected columns; and ``{"data": {"class_path": "lists", "init_args": {...}}}``.
    """
    sources = _sources(files)
    options: dict[str, Any] = {"root": files[0] if len(files) == 1 else list(files)}
    readers, roles, svmlight = open_sources(sources, None, given)
    if svmlight:
        column = readers[0].head(_HEAD, ["features"]).column("features")
        found = GuessedTables(
            roles, Description.from_plain(DESCRIPTION), {"items": [guess_feature("features", column)]}
        )
    else:
        labels = None if "label" in roles or "stage" not in roles else _labels(readers[0], roles)
        require_roles(readers[0], roles, given, None if labels is None else StageTable(labels))
        found = guess_columns(readers[0], roles)
        unused = ("label",) if labels is not None else ("stage", "position")
        taken = {role: column for role, column in roles.items() if role not in unused}
        options |= {"split_column" if role == "split" else role: column for role, column in taken.items()}
        options |= {} if labels is None else {"labels": labels}
    options["features"] = found.description.to_plain()
    return found, {"data": {"class_path": "lists", "init_args": options}}


def _sources(files: Sequence[str]) -> dict[int, Source]:
    root: Source = files[0] if len(files) == 1 else list(files)
    return {0: root, **split_files(root)}


def _labels(reader: TableReader, roles: Mapping[str, str]) -> dict[str, float | str | None]:
    """Return a label for each stage, best first: of a funnel log, or of the first rows."""
    logged = funnel_labels(reader.columns)
    if logged is not None:
        return {**logged}
    head = reader.head(_HEAD, [roles[role] for role in ("stage", "position") if role in roles])
    coded = one_chunk(head.column(roles["stage"])).drop_null().cast("string").dictionary_encode()
    names = [str(name).strip() for name in coded.dictionary.to_pylist()]
    if len(names) > _MOST_STAGES:
        raise ValueError(
            f"column {roles['stage']!r} has {len(names)} different values in {len(head)} rows, too many for stages; "
            f"name the column of the label: --label COLUMN, or of the stage: --stage COLUMN"
        )
    shown = np.zeros(len(head), dtype=bool)
    if "position" in roles:
        position = numbers_of(head.column(roles["position"]), roles["position"])
        shown = ~np.isnan(position)
    stage = one_chunk(head.column(roles["stage"])).cast("string").to_pylist()
    own = {name: np.array([str(one).strip() == name for one in stage]) for name in names}
    levels = {name: _level(name) for name in names}

    def order(name: str) -> tuple[float, ...]:
        if all(one.isdecimal() for one in names):
            return (-int(name),)
        if None not in levels.values():
            return float(levels[name] or 0), float("neg" in name), float(own[name].sum())
        return -float(shown[own[name]].mean()), float(own[name].sum())

    ordered = sorted(names, key=order)
    labels: dict[str, float | str | None] = {name: len(names) - 1 - place for place, name in enumerate(ordered)}
    best = own[ordered[0]]
    if shown[best].all():
        highest = len(names) - 1 + float(position[best].max())
        labels[ordered[0]] = f"{10 * math.ceil(highest / 10)} - position"
    return labels


def _level(name: str) -> int | None:
    """Return the rank of a stage name in the usual funnel, 0 = best; None = unknown name."""
    found = (level for level, pattern in enumerate(_FUNNEL) if re.search(pattern, name.lower()))
    return next(found, None)
