"""`recsys-topk schema FILES`: guess what the columns of tables are, as a table to look at and YAML to edit."""

from __future__ import annotations

from typing import Any

from recsys_topk.cli.console import echo, parser_of, write_to


def main(argv: list[str]) -> int:
    """Print the guesses, and print or write the description."""
    parser = parser_of(
        "schema",
        "Guess what the columns of tables are: who, what, when, and which features. Prints a table to look at, and the "
        "description as YAML to edit, for --data.features FILE. The first rows are read, nothing is trained.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="files or a folder: interactions, users, items")
    for role in ("user", "item", "time", "rating"):
        parser.add_argument(f"--{role}", metavar="COLUMN", help=f"the column of the {role}, if the guess is wrong")
    parser.add_argument("--out", metavar="FILE", help="write the description here")
    given = parser.parse_args(argv)

    import yaml

    from recsys_topk.runs.text import table

    roles, guesses, description = _guess(
        given.files, {role: getattr(given, role) for role in ("user", "item", "time", "rating")}
    )
    if roles:
        echo("columns: " + ", ".join(f"{role} = {column}" for role, column in roles.items()))
    for name, found in guesses.items():
        if found:
            echo(f"\n{name}")
            echo(table([guess.row() for guess in found]))
    text = yaml.safe_dump(description.to_plain(), sort_keys=False, allow_unicode=True)
    if given.out:
        write_to(given.out, text)
        echo(f"\nwritten: {given.out}; edit it and give it as --data.features {given.out}")
    else:
        echo(f"\n{text.rstrip()}")
    return 0


def _guess(files: list[str], known: dict[str, str | None]) -> tuple[Any, Any, Any]:
    from recsys_topk.datamodules.description_guess import guess_description
    from recsys_topk.datamodules.features import Description
    from recsys_topk.datamodules.guessing import guess_features
    from recsys_topk.datamodules.interactions.tables import sort_files
    from recsys_topk.datamodules.reading import list_files, open_table

    places = []
    for path in files:
        system, inside = list_files(path)
        places += [system.unstrip_protocol(place) if "://" in path else place for place in inside]
    kinds = sort_files(places, roles=known)
    if "interactions" in kinds:
        tables = [open_table(kinds[kind]) if kind in kinds else None for kind in ("interactions", "users", "items")]
        assert tables[0] is not None
        found = guess_description(tables[0], tables[1], tables[2], known)
        return found.roles, found.guesses, found.description
    guesses = {kind: guess_features(open_table(paths)) for kind, paths in kinds.items()}
    parts = {"users": "user", "items": "items", "others": "context"}
    features: dict[str, Any] = {
        parts[kind]: tuple(guess.feature for guess in rows if guess.feature is not None)
        for kind, rows in guesses.items()
    }
    return {}, guesses, Description(**features)
