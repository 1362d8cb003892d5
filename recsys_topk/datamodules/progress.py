"""Progress of long preparations: one bar per step, on a terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from typing_extensions import Self

Progress: TypeAlias = Callable[[str, int, int | None], None]
"""Told what is being done, how much more of it is done, and how much there is in all, if known."""


class StepBars:
    """A `Progress` that shows a bar of each step; nothing where there is no terminal."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._what = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, what: str, more: int, total: int | None) -> None:
        """Show that `more` rows of a step are done."""
        from tqdm import tqdm

        if what != self._what:
            self.__exit__()
            self._bar, self._what = tqdm(total=total, desc=what, unit=" rows", unit_scale=True, disable=None), what
        self._bar.update(more)
