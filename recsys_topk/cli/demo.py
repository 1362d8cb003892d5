"""Simulate a small world, train a cascade on it, and print its test metrics.

Further options are passed to `recsys-topk fit`.
"""

from __future__ import annotations

from recsys_topk.cli.arguments import parse_options
from recsys_topk.cli.console import announce_start, echo, make_parser
from recsys_topk.runs import TrainingRun


def main(argv: list[str]) -> None:
    """Run the demonstration."""
    parser = make_parser("demo", __doc__)
    parser.add_argument("--loss", default="dftopk", help="see `recsys-topk losses` (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the training days (default: %(default)s)")
    parser.add_argument("--out", default="runs", help="folder of the run directories (default: %(default)s)")
    options, further = parser.parse_known_args(argv)
    announce_start("demo")
    trainer = {"max_epochs": options.epochs}
    # A world with a strong retrieval: the logged items are harder to tell from the right ones than random items.
    demo = {"config": "simulated", "data": {"world": "small"}, "loss": options.loss, "trainer": trainer}
    demo |= {"out": options.out, "name": "demo"}

    def say(line: str) -> None:  # the next commands are at the end
        if line != "next:" and not line.startswith("  recsys-topk "):
            echo(line)

    trained = TrainingRun({"config": [demo, parse_options(further)]}, log_line=say)
    trained.fit()
    folder = trained.directory.path
    checkpoint = folder / "checkpoints" / "best.ckpt"
    lines: list[str] = []
    tested = TrainingRun({"ckpt_path": str(checkpoint), "out": str(folder.parent)}, log_line=lines.append)
    tested.test()
    shown = next(number for number, line in enumerate(lines) if line.startswith("\ntest"))
    for line in lines[shown:]:  # what is above them was said by `fit`
        echo(line)
    user = tested.data.serving_users(tested.data.serving_items()).names[0]  # a user of the export
    echo("from here to a running service (docs/serving.md):")
    echo(f"  recsys-topk export --ckpt_path {checkpoint} --out export")
    echo("  recsys-topk index --export export --out export-index")
    echo(f"  recsys-topk recommend --export export --index export-index --user {user}")
    echo("  recsys-topk serve --export export --index export-index")
    echo("another loss:  recsys-topk demo --loss listnet      all losses:  recsys-topk losses")
