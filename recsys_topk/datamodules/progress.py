"""Progress of long preparations: one bar per step."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from typing_extensions import Self


class Progress(Protocol):
    """Told how far a preparation is."""

    def __call__(self, what: str, more: int, total: int | None, note: str = "", /) -> None:
        """Take what is being done, how much more of it is done, how much there is in all, if known, and a remark."""


class StepBars:
    """A `Progress` that shows a bar of each step.

    Args:
        unit: What is counted: ``" rows"``, or ``"B"`` for bytes.
        always: Show it where there is no terminal, too: a line every ten seconds.
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
        """Show that `more` of a step is done."""
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
