"""Find the columns of logged lists for request, item, label etc., and the features in the other columns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recsys_topk.datamodules.lists.labels import StageTable
from recsys_topk.datamodules.lists.nested import ROW
from recsys_topk.tabular.features.description import Description, RawFeature
from recsys_topk.tabular.features.guess import ROLES as COMMON
from recsys_topk.tabular.features.guess import Guess, GuessedTables, guess_feature, guess_roles, require_role
from recsys_topk.tabular.tables.columns import keys_of, one_chunk
from recsys_topk.tabular.tables.reader import TableReader

ROLES: Final[Mapping[str, tuple[str, ...]]] = {
    "request": (
        "request", "requestid", "reqid", "query", "queryid", "qid", "impression", "impressionid", "search", "searchid",
        "srchid", "list", "listid", "session", "sessionid", "row",
    ),
    "item": (*COMMON["item"], "doc", "docid", "document", "documentid", "candidate", "candidateid"),
    "label": ("label", "relevance", "grade", "clicked", "click", "target", "rating"),
    "stage": ("stage", "stagereached", "reached", "funnelstage"),
    "position": ("position", "pos", "rank", "place"),
    "time": COMMON["time"],
    "user": tuple(name for name in COMMON["user"] if not name.startswith("session")),
    "split": COMMON["split"],
    "history": ("history", "hist", "viewed", "clickedbefore"),
}  # fmt: skip
"""Usual column names of logged lists by role, without case and punctuation."""

MARKERS: Final = ("item", "label", "stage", "position")
"""Roles whose column has one value per item."""

_HEAD: Final = 20_000
_LEFT_OUT: Final = {
    r"^next|^total_|modified|read_?time|scroll|dwell|watch_?time": "may be known only afterwards; add it if not",
    r"session_?id$": "new sessions have new ids",
    r"^funnel_": "what the funnel did with the items",
}
"""Names of columns that are no features: they say what the user did with an item, or do not occur again."""


def find_columns(reader: TableReader, given: Mapping[str, str | None]) -> dict[str, str]:
    """Return the column of each role: the given columns, and guesses by name for the others.

    Args:
        reader: The table.
        given: Columns by role; None = guess, "" = there is none.
    """
    chosen = {role: column for role, column in given.items() if column}
    reader.require(chosen.values())
    open_roles = [role for role in ROLES if given.get(role) is None]
    free = [column for column in reader.columns if column not in chosen.values()]
    return {**guess_roles(free, open_roles, ROLES), **chosen}


def require_roles(
    reader: TableReader,
    roles: Mapping[str, str],
    given: Mapping[str, str | None],
    stages: StageTable | None,
    feedback: bool = False,
) -> None:
    """Raise if the request column, or a column needed for the labels, is not known.

    Args:
        reader: The table.
        roles: The column of each role.
        given: The columns given by the user.
        stages: The labels of stages; None = labels come from a column.
        feedback: Whether events give labels to items, so that no column has to.
    """
    if stages is not None and given.get("label"):
        raise ValueError(
            "--data.label and --data.labels exclude each other: labels maps stages to labels; give one of them"
        )
    if stages is None and given.get("stage"):
        raise ValueError("--data.stage needs --data.labels, which maps stages to labels, best first")
    needed = ["request", *([] if feedback else ["label"])] if stages is None else ["request", "stage"]
    needed += ["item"] if feedback else []
    needed += ["position"] if stages is not None and stages.needs_position else []
    for role in needed:
        require_role(reader, roles, role, ", or map stages to labels with --data.labels" if role == "label" else "")


def guess_columns(reader: TableReader, roles: Mapping[str, str]) -> GuessedTables:
    """Return the features guessed from the columns without a role, and the inspected columns, by part.

    The ids of items and users are features. Another column belongs to the request if it is constant in all inspected
    rows of each request; otherwise it belongs to the item.
    """
    known = {*roles.values(), ROW}
    head = reader.head(_HEAD)
    request = keys_of(head.column(roles["request"])).keys
    order = np.argsort(request, kind="stable")
    inside = request[order][1:] == request[order][:-1]
    guesses: dict[str, list[Guess]] = {"context": [], "items": []}
    for name in reader.columns:
        if name in known:
            continue
        column = one_chunk(head.column(name))
        coded = _codes(column)[order]
        guess = guess_feature(name, column)
        for pattern, reason in _LEFT_OUT.items():
            if re.search(pattern, name.lower()):
                guess = replace(guess, feature=None, reason=reason)
        constant = bool(inside.any()) and bool((coded[1:] == coded[:-1])[inside].all())
        guesses["context" if constant else "items"].append(guess)
    ids = {
        part: [RawFeature.from_plain(roles[role], "categorical")] if role in roles else []
        for part, role in (("user", "user"), ("items", "item"))
    }
    context, other = ([one.feature for one in own if one.feature is not None] for own in guesses.values())
    items = (*ids["items"], *other)
    history = items[:1] if "history" in roles and "item" in roles else ()
    if not items:
        raise ValueError(
            f"{reader.name} has no feature of items: its columns {', '.join(reader.columns)} are used as "
            f"{', '.join(roles)} or left out; describe the features with --data.features FILE.yaml"
        )
    return GuessedTables(roles, Description(tuple(ids["user"]), tuple(context), items, history), guesses)


def _codes(column: Any) -> npt.NDArray[Any]:
    """Return a code per row; equal values have equal codes, and lists are never equal."""
    if pa.types.is_nested(column.type):
        return np.arange(len(column))
    return np.asarray(column.dictionary_encode().indices.fill_null(-1))
