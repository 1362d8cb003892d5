"""Progress of training: the loss, recalls on training and validation lists, and requests per second."""

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
LISTS = 256  # of a batch, enough for a recall to two digits
BAR = (5, 40)  # smallest and largest length of a bar, in characters


class Pace(ObjectiveCalls):
    """Measures requests per second, logs them as ``train/requests_per_second``, and the recall of a training batch.

    The rate is over the steps since it was last logged, or since the last validation or the end of an epoch.
    The recall is that of scores which the step computed anyway, before its update, for the first 256 lists of the batch
    and at most once in `every` seconds.

    Args:
        every: Seconds between two measurements of the recall; None = never.

    Attributes:
        requests_per_second: The newest rate; None before the first step.
        train_recall: The newest joint recall of a training batch; None before the first.
        train_length: Items per list of that batch.
        val_length: Items per list of the newest validation batch; 0 before the first.
    """

    def __init__(self, every: float | None = 1.0) -> None:
        self.every = every
        self.requests_per_second: float | None = None
        self.train_recall: float | None = None
        self.train_length = self.val_length = 0
        self._requests, self._since, self._measured = 0, 0.0, 0.0

    def should_record(self, trainer: pl.Trainer) -> bool:
        """Return whether it is time to measure the recall."""
        return self.every is not None and time.monotonic() - self._measured >= self.every

    def on_train_epoch_start(self, *_: Any) -> None:
        """Begin a new measurement: between epochs no requests are trained on."""
        self._requests, self._since = 0, time.monotonic()

    on_validation_end = on_train_epoch_start

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, _: Any, batch: Any, *__: Any
    ) -> None:
        """Remember how long the lists are."""
        self.val_length = batch.candidates.shape[1]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, _: Any, batch: Any, *__: Any
    ) -> None:
        """Measure, and log when the trainer does."""
        self._requests += batch.size * trainer.world_size
        self.requests_per_second = self._requests / max(time.monotonic() - self._since, 1e-9)
        if trainer.log_every_n_steps and trainer.global_step % trainer.log_every_n_steps == 0:
            pl_module.log(RATE, self.requests_per_second, batch_size=batch.size)
            self.on_train_epoch_start()
        call = self.pop_call()
        if call is not None:
            self._measure(call["scores"], call["labels"], call["mask"], pl_module)

    def values(self, trainer: pl.Trainer) -> dict[str, str]:
        """Return what progress shows, the most important first.

        A recall is shown with the number of items per list, because longer lists are harder. The loss is the sum of the
        objective's terms (``train/loss_STAGE``) without their weights: learned weights can make the weighted total
        (``train/loss``) negative.
        """
        metrics = trainer.callback_metrics
        terms = [float(value) for name, value in metrics.items() if name.startswith("train/loss_")]
        terms = terms or [float(metrics[name]) for name in ("train/loss",) if name in metrics]
        found = {"loss": f"{sum(terms):.3f}"} if terms else {}
        for name, value in trainer.progress_bar_metrics.items():
            if name.startswith("val/"):
                metric = name.removeprefix("val/")
                metric = "recall" if metric.startswith("joint_recall@") else metric
                found[f"val {metric} ({self.val_length})"] = f"{float(value):.3f}"
        if self.train_recall is not None:
            found[f"train recall ({self.train_length})"] = f"{self.train_recall:.3f}"
        if self.requests_per_second is not None:
            found["requests/s"] = f"{self.requests_per_second:,.0f}"
        return found

    @torch.no_grad()
    def _measure(self, scores: Sequence[Tensor], labels: Any, mask: Any, pl_module: pl.LightningModule) -> None:
        if not isinstance(labels, Tensor):  # the stages train on different lists, so there is no joint recall
            return
        labels, mask, quotas = labels[:LISTS], mask[:LISTS], pl_module.cascade.quotas
        above = pl_module.schema.positive_above
        scores = [x[:LISTS] for x in scores]
        values, counted = joint_recall(scores, labels, mask, quotas=quotas, k=pl_module.k, positive_above=above)
        total, number = torch.stack([torch.where(counted, values, 0.0).sum(), counted.sum()]).tolist()  # one read
        if number:
            self.train_recall, self.train_length = total / number, labels.shape[1]
        self._measured = time.monotonic()


def progress_line(
    width: int, name: str, done: int, total: float, values: Mapping[str, str], seconds_left: float | None = None
) -> str:
    """Return progress as one line of at most `width` characters.

    Values that do not fit are left out, the last ones first. The bar takes the room that is left, 5 to 40 characters.

    Args:
        width: Columns of the terminal.
        name: What is going on, e.g. ``"epoch 1/3"``.
        done: Batches done.
        total: Batches in all; infinity if that is not known.
        values: What to show, the most important first.
        seconds_left: Estimated; None = not known.

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
    """A task of Rich's progress as the text of `progress_line`.

    Args:
        values: Returns what to show beside a task.
        width: Returns the columns of the terminal.
    """

    def __init__(self, values: Callable[[Task], Mapping[str, str]], width: Callable[[], int]) -> None:
        super().__init__()
        self._values, self._width = values, width

    def render(self, task: Task) -> Text:
        """Return the line."""
        done, total = int(task.completed), float("inf") if task.total is None else task.total
        # Rich puts a column of Lightning's, empty here, and a space behind the line.
        line = progress_line(self._width() - 2, task.description, done, total, self._values(task), task.time_remaining)
        return Text(line, no_wrap=True, overflow="crop")


class RichProgress(RichProgressBar):  # type: ignore[misc]  # lightning is untyped here
    """Lightning's bar for terminals, one line with what `Pace` measures.

    Args:
        pace: Measures.
    """

    def __init__(self, pace: Pace) -> None:
        super().__init__(refresh_rate=4)
        self.pace = pace
        self._values: dict[str, str] = {}
        self._read = 0.0

    def configure_columns(self, trainer: pl.Trainer) -> list[Any]:
        """Return one column that fills the line."""

        def values(task: Task) -> Mapping[str, str]:
            return self._values if task.id == self.train_progress_bar_id else {}

        return [LineColumn(values, lambda: int(self.progress.console.width))]

    def on_train_epoch_end(self, *rest: Any) -> None:
        """Show the newest values."""
        self._read = 0.0
        super().on_train_epoch_end(*rest)

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """Read the values twice a second; return none, because the line shows them."""
        if time.monotonic() - self._read >= 0.5:
            self._values, self._read = self.pace.values(trainer), time.monotonic()
        return {}

    def _get_train_description(self, current_epoch: int) -> str:
        return epoch_text(self.trainer)


class PlainProgress(ProgressBar):  # type: ignore[misc]  # lightning is untyped here
    """One line every few seconds, for logs and pipes, where a bar that redraws itself is unreadable.

    Args:
        pace: Measures.
        write: Writes a line.
        every: Seconds between two lines; the end of an epoch has one in any case.
    """

    def __init__(self, pace: Pace, write: Callable[[str], None], every: float = 10.0) -> None:
        super().__init__()
        self.pace, self.write, self.every = pace, write, every
        self._enabled = True
        self._written = time.monotonic()

    def disable(self) -> None:
        """Write nothing; Lightning calls it in all processes but the first."""
        self._enabled = False

    def enable(self) -> None:
        """Write again."""
        self._enabled = True

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        """Write a line if it is time to."""
        if self._due():
            self._line(self._training(trainer, rest[3] + 1))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write a line with what validation found."""
        self._line(self._training(trainer, trainer.fit_loop.batch_idx + 1))

    def on_validation_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        """Write a line if it is time to."""
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
    """Return the epoch that is running, counted from 1, e.g. ``epoch 1/3``."""
    last = "" if trainer.max_epochs in (None, -1) else f"/{trainer.max_epochs}"
    return f"epoch {trainer.current_epoch + 1}{last}"
