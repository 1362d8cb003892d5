"""The streaming protocol: test on a day with what was learned before it, then train on it, day after day."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recsys_topk.datamodules.loader import ShardLoader
    from recsys_topk.datamodules.recflow.datamodule import RecFlowDataModule


@dataclass(frozen=True)
class StreamDay:
    """One step of the protocol.

    Attributes:
        day: The date.
        test: Batches of the day for evaluation, before anything was learned from it; None on the first day, which
            nothing precedes.
        train: Batches of the day for training.
        data: The data module with this day as its training, validation and test day, for a Lightning trainer.
    """

    day: str
    data: RecFlowDataModule
    test: ShardLoader | None
    train: ShardLoader


class DayStream:
    """Iterate over days in order; each is tested first and trained on afterwards.

    Args:
        datamodule: Makes the loaders; its train, validation and test days, in order, are the stream.
        begin: Day to begin with, to resume an interrupted stream; None = the first. The days before it count as
            learned, so it is tested.

    Example:
        One pass over each day; the optimizer's state comes from the checkpoint of the day before.

        >>> last = None
        >>> for number, step in enumerate(DayStream(datamodule), start=1):  # doctest: +SKIP
        ...     if step.test is not None:
        ...         trainer.test(model, step.data)
        ...     trainer.fit_loop.max_epochs = number
        ...     trainer.fit(model, step.data, ckpt_path=last)
        ...     last = "last.ckpt"
        ...     trainer.save_checkpoint(last)
    """

    def __init__(self, datamodule: RecFlowDataModule, begin: str | None = None) -> None:
        self.datamodule = datamodule
        self.days = tuple(sorted({day for days in datamodule.splits.values() for day in days}))
        if begin is not None and begin not in self.days:
            raise ValueError(f"the stream holds {', '.join(self.days)}, and is to begin with {begin}")
        self.begin = begin or self.days[0]

    def __len__(self) -> int:
        return len(self.days) - self.days.index(self.begin)

    def __iter__(self) -> Iterator[StreamDay]:
        for day in self.days[self.days.index(self.begin) :]:
            data = self.datamodule.for_day(day)
            data.prepare_data()
            test = None if day == self.days[0] else data.loader([day], training=False)
            yield StreamDay(day, data, test, data.loader([day], training=True))
