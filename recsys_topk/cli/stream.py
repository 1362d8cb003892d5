"""`recsys-topk stream`: day by day, test on a day and then train on it, for several losses."""

from __future__ import annotations

from recsys_topk.cli.compare import read
from recsys_topk.cli.console import echo
from recsys_topk.runs.provenance import provenance


def main(argv: list[str]) -> int:
    """Run the days that have not been run yet, with a line for each, then print and write the curves."""
    competition = read(
        argv, "stream", "Take the days in order: test on each with what was learned before it, then train on it "
        "(--trainer.max_epochs passes). The first day is trained on only. Optimizer and schedule carry over. Further "
        "options go to every `recsys-topk fit`. A stream that was interrupted, or has got new days, is resumed."
    )  # fmt: skip
    from recsys_topk.experiments.stream import stream

    stream(competition, provenance(["recsys-topk", "stream", *argv]), echo)
    return 0
