"""Peak memory of one step, in a process of its own: ``python -m recsys_topk.bench.memory SUITE LABEL SHAPE``."""

from __future__ import annotations

import sys

import torch

from recsys_topk.bench.steps import Batch, baseline, step, subjects
from recsys_topk.bench.timing import Shape, peak_growth


def main(arguments: list[str]) -> None:
    """Write the growth of the peak resident memory, in MB, to standard output."""
    suite, label, text = arguments
    torch.set_num_threads(1)
    subject, shape, small = subjects(suite)[label], Shape.parse(text), Shape(2, 8, 3)
    batch = Batch.of(shape, "cpu")

    def warm_up() -> None:
        step(suite, subject, small, Batch.of(small, "cpu"))()
        baseline(batch)()  # its gradient buffer belongs to any loss

    sys.stdout.write(f"{peak_growth(warm_up, step(suite, subject, shape, batch)):.1f}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
