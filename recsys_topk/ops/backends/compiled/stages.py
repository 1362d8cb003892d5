"""The layout of the buffer of the joint objective: six rows per stage."""

from __future__ import annotations

from typing import Any

from recsys_topk.ops.backends.compiled.arithmetic import ZERO, f32
from recsys_topk.ops.backends.compiled.build import inlined
from recsys_topk.ops.backends.compiled.memory import read
from recsys_topk.ops.backends.task import STAGE_ROWS

COUNTED, KEPT, CUT, AT_KEPT, AT_CUT, PULL = 0, 1, 2, 3, 4, 5  # positions in the numbers of a stage


@inlined
def stage_rows(buffer: Any, size: Any, m: Any) -> Any:
    """Return the addresses of the rows of stage m: scores, logits, slopes, rises, shares of the density, numbers.

    The slope of an item is the derivative of its loss with respect to its logit u, and the rise d log p / du.
    """
    start, row = buffer + 4 * size * (1 + STAGE_ROWS * m), 4 * size
    return start, start + row, start + 2 * row, start + 3 * row, start + 4 * row, start + 5 * row


@inlined
def is_counted(numbers: Any) -> Any:
    """Return whether the list counts in the stage with these numbers."""
    return read(numbers, COUNTED, f32) > ZERO
