"""`recsys-topk fuzz`: random lists against losses and operators, with a table of what was found."""

from __future__ import annotations

import json
import time
from pathlib import Path

from recsys_topk.cli.console import echo, parser_of, warn
from recsys_topk.files import write_whole
from recsys_topk.runs.text import table


def main(argv: list[str]) -> int:
    """Try the lists; return 0, 1 if something was found, or 130 if it was interrupted (what is done is shown)."""
    from tqdm import tqdm

    from recsys_topk.testing.fuzz import fuzz_one, fuzz_subjects

    parser = parser_of(
        "fuzz", "Try random lists (masks, ties, extremes, half precision, k per list) on losses and operators."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="losses and operators; all by default")
    parser.add_argument("--lists", type=int, default=10_000, help="lists for each (default 10000)")
    parser.add_argument("--seed", type=int, default=0, help="equal seeds give equal lists (default 0)")
    parser.add_argument("--device", default="cpu", help="where to compute (default cpu)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the findings with the first list of each fault"
    )
    args = parser.parse_args(argv)
    if args.lists < 1:
        raise ValueError(f"--lists must be at least 1, got {args.lists}")
    rows, status = [], 0
    start = time.monotonic()
    try:
        for kind, name in fuzz_subjects(args.names or None):
            with tqdm(total=args.lists, unit="list", unit_scale=True, desc=f"{kind} {name}", leave=False) as bar:
                found = fuzz_one(kind, name, args.lists, args.seed, device=args.device, progress=bar.update)
            rows.append(vars(found))
            if not found.clean:
                status = 1
                warn(f"{found.subject}: {found.first}")
    except KeyboardInterrupt:
        status = 130
    echo(table([{key.replace("_", " "): value for key, value in row.items() if key != "first"} for row in rows]))
    total = sum(row["lists"] for row in rows)
    bad = [row["subject"] for row in rows if row["not_finite"] or row["not_k"] or row["exceptions"]]
    found_in = f"faults in {', '.join(bad)}" if bad else "nothing found"
    what = f"{len(rows)} losses and operators, seed {args.seed}, {args.device}, {time.monotonic() - start:.0f} s"
    echo(f"{total} lists, {what}: {found_in}{' (interrupted)' if status == 130 else ''}")
    if args.json is not None:
        write_whole(args.json, json.dumps({"lists": args.lists, "seed": args.seed, "rows": rows}, indent=1) + "\n")
    return status
