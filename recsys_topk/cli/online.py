"""Train on new hours or days as they arrive, and publish an export after the newest.

Each complete part of the data is tested first and then trained on. The export of the newest part is compared with the
one in service, on requests that neither was trained on (--newest), and the link is swapped only if it passes the gate.
Serve it with `recsys-topk serve --export LINK/export --index LINK/index`. Killed at any moment, the same command
continues. Further options are those of `recsys-topk fit`; --trainer.max_epochs is the number of passes over a part.
"""

from __future__ import annotations

from pathlib import Path

from recsys_topk.cli.arguments import parse_options
from recsys_topk.cli.console import announce_start, echo, make_parser


def main(argv: list[str]) -> int:
    """Run `online` or `rollback`; `argv` starts with the command."""
    return _roll_back(argv[1:]) if argv[0] == "rollback" else _online(argv[1:])


def _online(argv: list[str]) -> int:
    parser = make_parser("online", __doc__)
    parser.add_argument("--publish", required=True, metavar="LINK", help="symbolic link to the export in service")
    parser.add_argument("--out", default="runs/online", help="folder of checkpoints and exports (default: %(default)s)")
    least = "least difference to the export in service, e.g. 'joint_recall -0.01' (default: monitored metric, -0.01)"
    parser.add_argument("--gate", metavar="METRIC DIFFERENCE", help=least)
    schedule = "seconds between two looks for parts, or `once`: do what there is and exit (default: %(default)s)"
    parser.add_argument("--schedule", default="60", metavar="SECONDS|once", help=schedule)
    parser.add_argument("--keep", type=int, default=3, help="published exports to keep (default: %(default)s)")
    share = "newest requests of a part, which are not trained on and compare the exports (default: %(default)s)"
    parser.add_argument("--newest", type=float, default=0.1, metavar="SHARE", help=share)
    parts = "newest parts whose items and users are exported (default: %(default)s)"
    parser.add_argument("--catalogue", type=int, default=7, metavar="PARTS", help=parts)
    options, further = parser.parse_known_args(argv)
    try:
        seconds = None if options.schedule == "once" else float(options.schedule)
    except ValueError:
        raise ValueError(f"--schedule must be a number of seconds, or once, got {options.schedule!r}") from None
    announce_start("online")
    from recsys_topk.experiments.online import Gate, Online

    gate = Gate() if options.gate is None else Gate.parse(options.gate)
    chosen = (options.keep, options.newest, options.catalogue)
    online = Online(parse_options(further), Path(options.publish), Path(options.out), gate, *chosen, log_line=echo)
    if seconds is not None:
        online.repeat(seconds)
    passed = online.advance()
    if passed is None:
        echo("nothing new")
    return 1 if passed is False else 0


def _roll_back(argv: list[str]) -> int:
    parser = make_parser("rollback", "Point the link of `recsys-topk online` to the export that was published before.")
    parser.add_argument("link", metavar="LINK", help="the link given to --publish")
    parser.add_argument("part", nargs="?", metavar="PART", help="a kept part (default: the one before)")
    options = parser.parse_args(argv)
    from recsys_topk.experiments.online import roll_back

    echo(f"{options.link}: {roll_back(Path(options.link), options.part)}")
    return 0
