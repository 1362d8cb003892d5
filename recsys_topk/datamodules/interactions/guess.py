"""Guess the description of tables (interactions, users, items) from the names and values of their columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from recsys_topk.datamodules.interactions.tables import sort_files
from recsys_topk.tabular.features.description import Description, RawFeature
from recsys_topk.tabular.features.guess import Guess, GuessedTables, guess_features, guess_roles, require_role
from recsys_topk.tabular.tables.columns import is_list
from recsys_topk.tabular.tables.reader import FORMATS, TableReader, file_names, open_table

ROLES_OF_ROWS: Final = ("user", "item", "time", "rating", "weight", "split")


def find_roles(interactions: TableReader, given: Mapping[str, str | None]) -> dict[str, str]:
    """Return the column of each role: the given one, or a guess.

    Args:
        interactions: The table of interactions.
        given: Columns by role; None = guess.

    Raises:
        ValueError: A given column is missing, or no column looks like the user or the item.
    """
    chosen = {role: column for role, column in given.items() if column is not None}
    interactions.require(chosen.values())
    roles = {**guess_roles([c for c in interactions.columns if c not in chosen.values()], ROLES_OF_ROWS), **chosen}
    for role in ("user", "item"):
        require_role(interactions, roles, role)
        kind = interactions.schema.field(roles[role]).type
        if is_list(kind):
            raise ValueError(
                f"column {roles[role]!r} of {interactions.name} has lists ({kind}); interactions have one {role} per "
                f"row. Use --data lists for tables with one row per request"
            )
    return roles


def guess_description(
    interactions: TableReader,
    users: TableReader | None = None,
    items: TableReader | None = None,
    roles: Mapping[str, str | None] | None = None,
) -> GuessedTables:
    """Guess the roles of columns and the features of tables.

    The ids of users and items become features. The categorical features and bags of items become the history.

    Other columns of the interactions do not become features, because they may be known only after the request (a
    rating, a watch time). Edit the description to use them.

    Args:
        interactions: One row per interaction.
        users: One row per user; None = there is no such table.
        items: One row per item; None = there is no such table.
        roles: Columns of the interactions by role; other roles are guessed.
    """
    found = find_roles(interactions, roles or {})
    user, item = found["user"], found["item"]
    guesses: dict[str, list[Guess]] = {}
    features: dict[str, list[RawFeature]] = {"user": [_id(user)], "items": [_id(item)]}
    for part, name, key, reader in (("user", "users", user, users), ("items", "items", item, items)):
        if reader is None:
            continue
        reader.require([key])
        guesses[name] = guess_features(reader, [key])
        features[part] += [guess.feature for guess in guesses[name] if guess.feature is not None]
    extra = guess_features(interactions, found.values()) if set(interactions.columns) - set(found.values()) else []
    reason = "may be known only afterwards; add it to context if not"
    guesses["interactions"] = [replace(guess, feature=None, reason=reason) for guess in extra]
    history = tuple(feature for feature in features["items"] if feature.kind in ("categorical", "bag"))
    made = Description(tuple(features["user"]), (), tuple(features["items"]), history)
    return GuessedTables(found, made, guesses)


def guess_files(files: Sequence[str], roles: Mapping[str, str | None]) -> GuessedTables:
    """Guess the content of files: interactions with users and items, or only tables of features.

    Args:
        files: Files and folders.
        roles: Columns of the interactions by role; None = guess.
    """
    places = [place for path in files for place in file_names(path)]
    if not places:
        raise ValueError(f"{', '.join(files)} has no file that ends in .{', .'.join(FORMATS)}")
    kinds = {kind: open_table(paths) for kind, paths in sort_files(places, roles=roles).items()}
    if "interactions" in kinds:
        return guess_description(kinds["interactions"], kinds.get("users"), kinds.get("items"), roles)
    guesses = {kind: guess_features(reader) for kind, reader in kinds.items()}
    parts = {"users": "user", "items": "items", "others": "context"}
    features: dict[str, Any] = {
        parts[kind]: tuple(guess.feature for guess in rows if guess.feature is not None)
        for kind, rows in guesses.items()
    }
    return GuessedTables({}, Description(**features), guesses)


def _id(column: str) -> RawFeature:
    return RawFeature.from_plain(column, "categorical")
