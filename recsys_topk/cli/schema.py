"""Guess what the columns of tables are: who, what, when, and which features.

Prints a table to look at and YAML to edit. For interactions, the YAML describes the features (`--data.features FILE`).
For logged lists (rows of request and item, nested tables, SVMlight files), it is a config (`fit --config FILE`). Only
the first rows are read; nothing is trained.
"""

from __future__ import annotations

from typing import Any

from recsys_topk.cli.console import echo, make_parser, write_to

ROLES = ("user", "item", "time", "rating")
ROLES_OF_LISTS = ("user", "item", "time", "request", "label", "stage", "position", "history")


def main(argv: list[str]) -> int:
    """Print the guesses, and print or write the YAML."""
    parser = make_parser("schema", __doc__)
    parser.add_argument("files", nargs="+", metavar="FILE", help="files or a folder: interactions, users, items; lists")
    parser.add_argument("--data", choices=("interactions", "lists"), help="what the files hold (default: as it seems)")
    for role in dict.fromkeys((*ROLES, *ROLES_OF_LISTS)):
        lists = "" if role in ROLES else " (of lists)"
        parser.add_argument(f"--{role}", metavar="COLUMN", help=f"column of the {role}{lists}, if the guess is wrong")
    parser.add_argument("--out", metavar="FILE", help="write the YAML here")
    args = parser.parse_args(argv)

    import yaml

    from recsys_topk.text import table

    columns = {role: getattr(args, role) for role in (*ROLES, *ROLES_OF_LISTS)}
    kind, description, plain = _guess(args.data, args.files, columns)
    if not description.roles and not any(description.guesses.values()):
        raise ValueError(
            f"{' '.join(args.files)}: no table with columns was found; give CSV, TSV, Parquet, Feather or JSON lines, "
            f"or a folder of such files"
        )
    if not description.roles:
        names = ", ".join(guess.column for guesses in description.guesses.values() for guess in guesses)
        raise ValueError(
            f"{' '.join(args.files)}: no column of users or items was recognised among {names}; name them, e.g. "
            f"--user COLUMN --item COLUMN"
        )
    echo(f"{kind}; columns: " + ", ".join(f"{role} = {column}" for role, column in description.roles.items()))
    for name, guesses in description.guesses.items():
        if guesses:
            echo(f"\n{name}")
            echo(table([guess.row() for guess in guesses]))
    text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
    if "labels" in plain.get("data", {}).get("init_args", ()):
        echo("\nlabels: the order of the stages, best first, is a guess; check it")
    use = "train: recsys-topk fit --config" if kind == "lists" else "give it as --data.features"
    if args.out:
        write_to(args.out, text)
        echo(f"\nwritten: {args.out}; edit it and {use} {args.out}")
    else:
        echo(f"\n{text.rstrip()}")
    return 0


def _guess(kind: str | None, files: list[str], columns: dict[str, str | None]) -> tuple[str, Any, dict[str, Any]]:
    """Return what the files hold, the guesses, and what the YAML says."""
    from recsys_topk.datamodules.lists.guess import guess_lists, looks_like_lists

    of_lists = {role: columns[role] for role in ROLES_OF_LISTS}
    if kind is None:
        kind = "lists" if looks_like_lists(files, of_lists) else "interactions"
    if kind == "lists":
        return kind, *guess_lists(files, of_lists)
    from recsys_topk.datamodules.interactions.guess import guess_files

    guess = guess_files(files, {role: columns[role] for role in ROLES})
    return kind, guess, guess.description.to_plain()
