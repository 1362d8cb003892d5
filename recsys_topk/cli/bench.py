"""Run a benchmark, print and save its result, and compare it with an earlier one."""

from __future__ import annotations

import json
from pathlib import Path

from recsys_topk.bench.result import regressions
from recsys_topk.bench.suites import SUITES, add_arguments, measure
from recsys_topk.cli.console import echo, make_parser, warn
from recsys_topk.files import write_whole


def main(argv: list[str]) -> int:
    """Run one suite; return 1 if `--check` finds a row that is slower than in the baseline file, otherwise 0."""
    parser = make_parser("bench", __doc__)
    commands = parser.add_subparsers(dest="suite", required=True, metavar="SUITE")
    for name, (_, summary) in SUITES.items():
        command = commands.add_parser(name, help=summary, description=f"Measure {summary}.")
        if argv[:1] == [name]:
            add_arguments(name, command)
        command.add_argument("--json", type=Path, metavar="FILE", help="write the result, for --check and reports")
        command.add_argument("--check", type=Path, metavar="FILE", help="fail if a ratio is above that of this result")
        command.add_argument("--tolerance", type=float, default=0.5, help="by more than this share (default 0.5)")
    args = parser.parse_args(argv)
    result = measure(args.suite, vars(args))
    echo(result.text())
    if args.json is not None:
        write_whole(args.json, result.to_json())
    if args.check is None:
        return 0
    slower = regressions(json.loads(args.check.read_text())["rows"], result.rows, args.tolerance)
    for line in slower:
        warn(line)
    if not slower:
        echo(f"check: no ratio exceeds {args.check} by more than {args.tolerance:.0%}")
    return 1 if slower else 0
