"""Progress bars of long preparations, one per step."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from typing import Self


class Progress(Protocol):
    """A callable that receives the progress of a preparation."""

    def __call__(self, what: str, more: int, total: int | None, note: str = "", /) -> None:
        """Receive the name of the step, the newly finished amount, the total amount (None = unknown), and a note."""


class StepBars:
    """A `Progress` that shows one bar per step.

    Args:
        unit: The unit of the amounts: ``" rows"``, or ``"B"`` for bytes.
        always: Also show progress without a terminal, as one line every ten seconds.
    """

    def __init__(self, unit: str = " rows", always: bool = False) -> None:
        self._bar: Any = None
        self._what = ""
        self.unit, self.always = unit, always

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, what: str, more: int, total: int | None, note: str = "", /) -> None:
        """Advance the bar of a step by `more`."""
        from tqdm import tqdm

        if what != self._what:
            self.__exit__()
            self._what = what
            self._bar = tqdm(
                total=total,
                desc=what,
                unit=self.unit,
                unit_scale=True,
                disable=False if self.always else None,
                mininterval=0.1 if sys.stderr.isatty() else 10.0,
            )
        if note:
            self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(more)
