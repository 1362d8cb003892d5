"""`recsys-topk recommend`: recommend items of an export to users."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recsys_topk.cli.console import echo, make_parser, write_to

if TYPE_CHECKING:
    from recsys_topk.serving.recommend import CascadeRecommender

BATCH = 256


def main(argv: list[str]) -> int:
    """Run the command."""
    parser = make_parser("recommend", "Recommend items of an export. Needs no torch.")
    parser.add_argument("--export", required=True, help="folder that `recsys-topk export` wrote")
    parser.add_argument("--index", help="folder that `recsys-topk index` wrote (default: exact search)")
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("--user", action="append", help="a user of the export by name; may be repeated")
    who.add_argument("--users", help="Parquet, CSV or JSON lines: one row per user, features and a column history")
    parser.add_argument("--number", type=int, help="items per user (default: k of the training)")
    parser.add_argument("--exclude-seen", action="store_true", help="exclude the items of the user's history")
    parser.add_argument("--allow", help="file with one item per line: recommend only these")
    parser.add_argument("--block", help="file with one item per line: never recommend these")
    parser.add_argument("--explain", metavar="ITEM", help="print which stage drops an item, and by how much")
    parser.add_argument("--out", help="JSON lines file to write (default: standard output)")
    given = parser.parse_args(argv)

    from recsys_topk.serving.recommend import CascadeRecommender
    from recsys_topk.serving.rows import read_rows

    recommender = CascadeRecommender.from_export(given.export, given.index)
    users = given.user if given.user is not None else read_rows(given.users)
    if not users:
        raise ValueError(f"{given.users!r} has no rows")
    if given.explain is not None:
        for user in users:
            echo(_explained(recommender, user, given))
        return 0
    options = {"exclude_seen": given.exclude_seen, "allowed": _names(given.allow), "blocked": _names(given.block) or ()}
    lines: list[str] = []
    for start in range(0, len(users), BATCH):
        some = users[start : start + BATCH]
        for user, found in zip(some, recommender.recommend(some, given.number, **options), strict=True):
            name = user if isinstance(user, str) else user.get("user", start + len(lines))
            lines.append(json.dumps({"user": name, "items": [asdict(one) for one in found]}))
    if given.out:
        write_to(given.out, "\n".join(lines) + "\n")
        echo(f"{given.out}: {len(lines):,} users")
    else:
        echo("\n".join(lines))
    return 0


def _names(path: str | None) -> list[str] | None:
    if path is None:
        return None
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path!r} with one item per line")
    return Path(path).read_text(encoding="utf-8").split()


def _explained(recommender: CascadeRecommender, user: Any, given: argparse.Namespace) -> str:
    verdicts = recommender.explain(user, given.explain, exclude_seen=given.exclude_seen)
    lines = [f"item {given.explain}, user {user if isinstance(user, str) else '(features)'}:"]
    for one in verdicts:
        what = "passed on" if one.passed else f"fell out, {one.cut - one.score:.4f} below the cut"
        lines.append(
            f"  {one.stage}: place {one.rank:,}, score {one.score:.4f}, cut {one.cut:.4f} (best {one.quota}): {what}"
        )
    return "\n".join(lines)
