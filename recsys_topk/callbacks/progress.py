"""Progress of training: loss, recall on training and validation lists, and requests per second."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar
from rich.progress import ProgressColumn, Task
from rich.text import Text
from torch import Tensor

from recsys_topk.callbacks.objective_calls import ObjectiveCalls
from recsys_topk.metrics.functional import joint_recall

RATE = "train/requests_per_second"
LISTS = 256  # lists per batch for the recall; enough for two digits
BAR = (5, 40)  # minimum and maximum length of a bar, in characters


class Pace(ObjectiveCalls):
    """Measures requests per second (logged as ``train/requests_per_second``) and the recall of training batches.

    The rate covers the steps since it was last logged, or since the last validation or the start of the epoch. The
    recall uses the scores of the training step, before its update, for the first 256 lists of a batch. It is measured
    at most once in `every` seconds; None = never.
    """

    def __init__(self, every: float | None = 1.0) -> None:
        self.every = every
        self.requests_per_second: float | None = None
        self.train_recall: float | None = None
        self.train_length = self.val_length = 0
        self._requests, self._since, self._measured = 0, 0.0, 0.0

    def should_record(self, trainer: pl.Trainer) -> bool:
        """Return whether the next measurement of the recall is due."""
        return self.every is not None and time.monotonic() - self._measured >= self.every

    def on_train_epoch_start(self, *_: Any) -> None:
        """Start a new measurement, which excludes the time between epochs."""
        self._requests, self._since = 0, time.monotonic()

    on_validation_end = on_train_epoch_start

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, _: Any, batch: Any, *__: Any
    ) -> None:
        """Store the list length."""
        self.val_length = batch.candidates.shape[1]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, _: Any, batch: Any, *__: Any
    ) -> None:
        """Measure, and log at the steps at which the trainer logs."""
        self._requests += batch.size * trainer.world_size
        self.requests_per_second = self._requests / max(time.monotonic() - self._since, 1e-9)
        if trainer.log_every_n_steps and trainer.global_step % trainer.log_every_n_steps == 0:
            pl_module.log(RATE, self.requests_per_second, batch_size=batch.size)
            self.on_train_epoch_start()
        call = self.pop_call()
        if call is not None:
            self._measure(call["scores"], call["labels"], call["mask"], pl_module)

    def values(self, trainer: pl.Trainer) -> dict[str, str]:
        """Return the values to show, the most important first.

        A recall is shown with the list length, because longer lists are harder. The loss is the unweighted sum of the
        objective's terms (``train/loss_STAGE``): with learned weights, the total (``train/loss``) can be negative.
        """
        metrics = trainer.callback_metrics
        terms = [float(value) for name, value in metrics.items() if name.startswith("train/loss_")]
        terms = terms or [float(metrics[name]) for name in ("train/loss",) if name in metrics]
        shown = {"loss": f"{sum(terms):.3f}"} if terms else {}
        for name, value in trainer.progress_bar_metrics.items():
            if name.startswith("val/"):
                metric = name.removeprefix("val/")
                metric = "recall" if metric.startswith("joint_recall@") else metric
                shown[f"val {metric} ({self.val_length})"] = f"{float(value):.3f}"
        if self.train_recall is not None:
            shown[f"train recall ({self.train_length})"] = f"{self.train_recall:.3f}"
        if self.requests_per_second is not None:
            shown["requests/s"] = f"{self.requests_per_second:,.0f}"
        return shown

    @torch.no_grad()
    def _measure(self, scores: Sequence[Tensor], labels: Any, mask: Any, pl_module: pl.LightningModule) -> None:
        if not isinstance(labels, Tensor):  # the stages train on different lists, so there is no joint recall
            return
        labels, mask, quotas = labels[:LISTS], mask[:LISTS], pl_module.cascade.quotas
        above = pl_module.schema.positive_above
        scores = [x[:LISTS] for x in scores]
        values, counted = joint_recall(scores, labels, mask, quotas=quotas, k=pl_module.k, positive_above=above)
        total, number = torch.stack([torch.where(counted, values, 0.0).sum(), counted.sum()]).tolist()  # one transfer
        if number:
            self.train_recall, self.train_length = total / number, labels.shape[1]
        self._measured = time.monotonic()


def progress_line(
    width: int, name: str, done: int, total: float, values: Mapping[str, str], seconds_left: float | None = None
) -> str:
    """Return progress as one line of at most `width` characters.

    Values, the most important first, are omitted if they do not fit. The bar takes the remaining 5 to 40 characters. A
    `total` of infinity is unknown.

    Example:
        >>> progress_line(50, "epoch 1/3", 4, 8, {"loss": "0.912", "val recall (200)": "0.301"})
        'epoch 1/3 ━━━━━━━━━━━━             4/8  loss 0.912'
        >>> progress_line(60, "epoch 1/3", 4, 8, {"loss": "0.912", "val recall (200)": "0.301"})
        'epoch 1/3 ━━━━━      4/8  loss 0.912  val recall (200) 0.301'
    """
    known = 0 < total < float("inf")
    counts = f"{done}/{int(total)}" if known else str(done)
    texts = [f"{key} {value}" for key, value in values.items()]
    if seconds_left is not None:
        texts.append(f"{timedelta(seconds=int(seconds_left))} left")
    tail = f" {counts}"
    for text in texts:
        if len(name) + 1 + BAR[0] + len(tail) + 2 + len(text) > width:
            break
        tail += f"  {text}"
    length = min(BAR[1], max(0, width - len(name) - 1 - len(tail)))
    halves = round(2 * length * done / total) if known else 0
    bar = "━" * (halves // 2) + "╸" * (halves % 2)
    return f"{name} {bar.ljust(length)}{tail}"[:width]


class LineColumn(ProgressColumn):
    """A column of Rich that shows `progress_line`, from functions for the values of a task and the terminal's width."""

    def __init__(self, values: Callable[[Task], Mapping[str, str]], width: Callable[[], int]) -> None:
        super().__init__()
        self._values, self._width = values, width

    def render(self, task: Task) -> Text:
        """Return the line."""
        done, total = int(task.completed), float("inf") if task.total is None else task.total
        # Rich appends an empty column of Lightning and a space.
        line = progress_line(self._width() - 2, task.description, done, total, self._values(task), task.time_remaining)
        return Text(line, no_wrap=True, overflow="crop")


class RichProgress(RichProgressBar):  # type: ignore[misc]  # lightning is untyped here
    """Lightning's progress bar for terminals, with the values of `Pace` in one line."""

    def __init__(self, pace: Pace) -> None:
        super().__init__(refresh_rate=4)
        self.pace = pace
        self._values: dict[str, str] = {}
        self._read = 0.0

    def configure_columns(self, trainer: pl.Trainer) -> list[Any]:
        """Return one column for the whole line."""

        def values(task: Task) -> Mapping[str, str]:
            return self._values if task.id == self.train_progress_bar_id else {}

        return [LineColumn(values, lambda: int(self.progress.console.width))]

    def on_train_epoch_end(self, *rest: Any) -> None:
        """Show the newest values."""
        self._read = 0.0
        super().on_train_epoch_end(*rest)

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """Update the values twice a second. Return an empty dict, because `LineColumn` shows them."""
        if time.monotonic() - self._read >= 0.5:
            self._values, self._read = self.pace.values(trainer), time.monotonic()
        return {}

    def _get_train_description(self, current_epoch: int) -> str:
        return epoch_text(self.trainer)


class PlainProgress(ProgressBar):  # type: ignore[misc]  # lightning is untyped here
    """Progress as plain lines, for logs and pipes: one every few seconds, and one at the end of an epoch."""

    def __init__(self, pace: Pace, write: Callable[[str], None], every: float = 10.0) -> None:
        super().__init__()
        self.pace, self.write, self.every = pace, write, every
        self._enabled = True
        self._written = time.monotonic()

    def disable(self) -> None:
        """Disable output; Lightning calls this in all processes except the first."""
        self._enabled = False

    def enable(self) -> None:
        """Enable output."""
        self._enabled = True

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        """Write a line if one is due."""
        if self._due():
            self._line(self._training(trainer, rest[3] + 1))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write a line with the newest validation metrics."""
        self._line(self._training(trainer, trainer.fit_loop.batch_idx + 1))

    def on_validation_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        """Write a line if one is due."""
        stages = {"test": ("test", trainer.num_test_batches), "predict": ("prediction", trainer.num_predict_batches)}
        what, batches = stages.get(trainer.state.stage, ("validation", trainer.num_val_batches))
        if self._due():
            self._line(f"{what}  batch {rest[3] + 1}/{sum(batches)}")

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def _training(self, trainer: pl.Trainer, batches: int) -> str:
        parts = [epoch_text(trainer), f"batch {batches}/{trainer.num_training_batches}"]
        return "  ".join([*parts, *(f"{name} {value}" for name, value in self.pace.values(trainer).items())])

    def _due(self) -> bool:
        return time.monotonic() - self._written >= self.every

    def _line(self, text: str) -> None:
        if self._enabled:
            self.write(text)
            self._written = time.monotonic()


def epoch_text(trainer: pl.Trainer) -> str:
    """Return the current epoch, counted from 1, e.g. ``epoch 1/3``."""
    last = "" if trainer.max_epochs in (None, -1) else f"/{trainer.max_epochs}"
    return f"epoch {trainer.current_epoch + 1}{last}"
