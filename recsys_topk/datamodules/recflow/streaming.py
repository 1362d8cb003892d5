"""The streaming protocol: for each day in order, test the current model on the day, then train on it."""

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
        test: Batches of the day for evaluation, before training on this day; None on the first day, since no model
            has been trained yet.
        train: Batches of the day for training.
        data: The data module with this day as its training, validation and test day, for a Lightning trainer.
    """

    day: str
    data: RecFlowDataModule
    test: ShardLoader | None
    train: ShardLoader


class DayStream:
    """Iterate over days in order. Each day is used for testing first and for training afterwards.

    Args:
        datamodule: Makes the loaders; its train, validation and test days, in order, are the stream.
        begin: Day to begin with, to resume an interrupted stream; None = the first. Earlier days are assumed to be
            trained on, so this day is tested.

    Example:
        One pass over each day. The optimizer state is loaded from the checkpoint of the day before.

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
            raise ValueError(
                f"the stream has the days {', '.join(self.days)}, and begin is {begin}; choose one of them"
            )
        self.begin = begin or self.days[0]

    def __len__(self) -> int:
        return len(self.days) - self.days.index(self.begin)

    def __iter__(self) -> Iterator[StreamDay]:
        for day in self.days[self.days.index(self.begin) :]:
            data = self.datamodule.for_day(day)
            data.prepare_data()
            test = None if day == self.days[0] else data.loader([day], training=False)
            yield StreamDay(day, data, test, data.loader([day], training=True))
