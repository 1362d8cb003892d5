"""`recsys-topk recommend`: recommend items of an export to users."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recsys_topk.cli.console import echo, make_parser, warn, write_to

if TYPE_CHECKING:
    from recsys_topk.serving.recommend import CascadeRecommender

BATCH = 256
IDS = ("user", "user_id", "userId", "uid")


def main(argv: list[str]) -> int:
    """Run the command."""
    parser = make_parser("recommend", "Recommend items of an export. Needs no torch.")
    parser.add_argument("--export", required=True, help="folder that `recsys-topk export` wrote")
    parser.add_argument("--index", help="folder that `recsys-topk index` wrote (default: exact search)")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--user", action="append", help="a user of the export by name; may be repeated")
    asked.add_argument("--users", help="Parquet, CSV or JSON lines: one row per user, with id, features and history")
    parser.add_argument("--id", help=f"column of --users with the id of the user (default: {', '.join(IDS)})")
    parser.add_argument("--number", type=int, help="items per user (default: k of the training)")
    parser.add_argument("--exclude-seen", action="store_true", help="exclude the items of the user's history")
    parser.add_argument("--allow", help="file with one item per line: recommend only these")
    parser.add_argument("--block", help="file with one item per line: never recommend these")
    parser.add_argument(
        "--where", action="append", default=[], metavar="FEATURE=VALUE",
        help="recommend only items with this value of a categorical feature or bag; repeat it for other values (or) "
        "and other features (and)",
    )  # fmt: skip
    parser.add_argument("--explain", metavar="ITEM", help="print which stage drops an item, and by how much")
    parser.add_argument("--out", help="JSON lines file to write (default: standard output)")
    args = parser.parse_args(argv)

    from recsys_topk.serving.recommend import CascadeRecommender

    recommender = CascadeRecommender.from_export(args.export, args.index)
    users = args.user if args.user is not None else _with_ids(args, recommender.columns)
    if args.explain is not None:
        for user in users:
            echo(_explained(recommender, user, args))
        return 0
    options = {"exclude_seen": args.exclude_seen, "allowed": _names(args.allow), "blocked": _names(args.block) or ()}
    options["where"] = where = dict[str, list[str]]()
    for given in args.where:
        name, equals, value = given.partition("=")
        if not equals:
            parser.error(f"--where must be FEATURE=VALUE, got {given!r}")
        where.setdefault(name, []).append(value)
    lines: list[str] = []
    for start in range(0, len(users), BATCH):
        some = users[start : start + BATCH]
        for user, items in zip(some, recommender.recommend(some, args.number, **options), strict=True):
            name = user if isinstance(user, str) else user.get("user")
            who: dict[str, Any] = {"row": len(lines)} if name is None else {"user": name}
            lines.append(json.dumps({**who, "items": [asdict(one) for one in items]}))
    for text in recommender.unknown(users, options["allowed"], options["blocked"]):
        warn(f"recsys-topk recommend: {text}")
    if args.out:
        write_to(args.out, "\n".join(lines) + "\n")
        echo(f"{args.out}: {len(lines):,} users")
    else:
        echo("\n".join(lines))
    return 0


def _with_ids(args: argparse.Namespace, features: Collection[str]) -> list[dict[str, Any]]:
    """Return the rows of --users with the id of the user under the key ``"user"``, where there is one."""
    from recsys_topk.serving.rows import read_rows

    rows = read_rows(args.users)
    columns = dict.fromkeys(name for row in rows for name in row)
    if not rows:
        raise ValueError(f"{args.users!r} has no rows")
    if args.id is not None and args.id not in columns:
        raise ValueError(f"{args.users!r} has no column {args.id!r} (--id); it has: {', '.join(columns)}")
    chosen = args.id or next((name for name in IDS if name in columns), None)
    if chosen is None:
        return rows
    for row in rows:
        row["user"] = row.get(chosen) if chosen in features else row.pop(chosen, None)
    return rows


def _names(path: str | None) -> list[str] | None:
    if path is None:
        return None
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path!r} with one item per line")
    return Path(path).read_text(encoding="utf-8").split()


def _explained(recommender: CascadeRecommender, user: Any, args: argparse.Namespace) -> str:
    verdicts = recommender.explain(user, args.explain, exclude_seen=args.exclude_seen)
    lines = [f"item {args.explain}, user {user if isinstance(user, str) else '(features)'}:"]
    for one in verdicts:
        what = "passed on" if one.passed else f"fell out, {one.cut - one.score:.4f} below the cut"
        lines.append(
            f"  {one.stage}: place {one.rank:,}, score {one.score:.4f}, cut {one.cut:.4f} (best {one.quota}): {what}"
        )
    return "\n".join(lines)
