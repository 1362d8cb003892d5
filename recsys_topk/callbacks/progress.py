"""Progress of training: loss, recall on training and validation lists, and requests per second."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ProgressBar
from torch import Tensor

from recsys_topk.callbacks.objective_calls import ObjectiveCalls
from recsys_topk.metrics.functional import joint_recall

RATE = "train/requests_per_second"
LISTS = 256  # lists per batch for the recall; enough for two digits
BAR = (5, 40)  # minimum and maximum length of a bar, in characters
SPARKS = "▁▂▃▄▅▆▇█"


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
        self.seconds_left: float | None = None  # until the end of training
        self._recalls: list[float] = []  # the monitored metric at each validation
        self._began: tuple[float, int] | None = None  # time and step at the start of this process
        self._requests, self._since, self._measured = 0, 0.0, 0.0
        self._terms: Tensor | None = None  # (2, terms): sum and number of the values of each term in this epoch

    def should_record(self, trainer: pl.Trainer) -> bool:
        """Return whether the next measurement of the recall is due."""
        return self.every is not None and time.monotonic() - self._measured >= self.every

    def on_train_epoch_start(self, *_: Any) -> None:
        """Start a new measurement, which excludes the time between epochs."""
        self._requests, self._since = 0, time.monotonic()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Store the monitored metric, and start a new measurement of the rate."""
        value = trainer.callback_metrics.get(f"val/{pl_module.monitor}")
        if trainer.state.fn == "fit" and value is not None:
            self._recalls.append(float(value))
        self.on_train_epoch_start()

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, _: Any, batch: Any, *__: Any
    ) -> None:
        """Store the list length."""
        self.val_length = batch.candidates.shape[1]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, _: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure, and log at the steps at which the trainer logs."""
        self._requests += batch.size * trainer.world_size
        terms = torch.stack([pl_module.newest_terms, (pl_module.newest_terms != 0).float()])
        self._terms = self._terms + terms if batch_idx and self._terms is not None else terms
        now, step = time.monotonic(), trainer.global_step
        if self._began is None:  # the first step is slower than others
            self._began = (now, step)
        elif step > self._began[1]:
            seconds_per_step = (now - self._began[0]) / (step - self._began[1])
            left = seconds_per_step * (trainer.estimated_stepping_batches - step)
            self.seconds_left = left if math.isfinite(left) else None
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
        objective's terms (``train/loss_STAGE``): with learned weights, the total (``train/loss``) can be negative. A
        term is the mean over the steps of this epoch that have it, because a stage may train in some steps only.
        """
        terms = [] if self._terms is None else [total / number for total, number in self._terms.T.tolist() if number]
        shown = {"loss": f"{sum(terms):.3f}"} if terms else {}
        monitored = f"val/{trainer.lightning_module.monitor}"
        value = trainer.callback_metrics.get(monitored)
        if value is not None:
            metric, _, lists = monitored.removeprefix("val/").partition("/")
            metric = "recall" if metric.startswith("joint_recall@") else metric
            bars = f" {sparkline(self._recalls)}" if self._recalls[1:] else ""
            shown[f"val {metric} ({'all items' if lists else self.val_length})"] = f"{float(value):.3f}{bars}"
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

    Values, the most important first, are omitted if they do not fit; the time that is left is always shown. The bar
    takes the remaining 5 to 40 characters. A `total` of infinity is unknown.

    Example:
        >>> progress_line(50, "epoch 1/3", 4, 8, {"loss": "0.912", "val recall (200)": "0.301"})
        'epoch 1/3 ━━━━━━━━━━━━             4/8  loss 0.912'
        >>> progress_line(60, "epoch 1/3", 4, 8, {"loss": "0.912", "val recall (200)": "0.301"})
        'epoch 1/3 ━━━━━      4/8  loss 0.912  val recall (200) 0.301'
    """
    known = 0 < total < float("inf")
    counts = f"{done}/{int(total)}" if known else str(done)
    left = "".join(f"  {text}" for text in _texts({"": seconds_left}))
    tail = f" {counts}"
    for text in _texts(values):
        shown = _fitting(text, width - len(name) - 1 - BAR[0] - len(tail) - 2 - len(left))
        if not shown:
            break
        tail += f"  {shown}"
    tail += left
    length = min(BAR[1], max(0, width - len(name) - 1 - len(tail)))
    halves = round(2 * length * done / total) if known else 0
    bar = "━" * (halves // 2) + "╸" * (halves % 2)
    return f"{name} {bar.ljust(length)}{tail}"[:width]


def sparkline(values: Sequence[float], length: int = 20) -> str:
    """Return the last values as bars from the lowest to the highest of them.

    Example:
        >>> sparkline([0.1, 0.3, 0.5, 0.45])
        '▁▄█▇'
    """
    shown = [value for value in values if math.isfinite(value)][-length:]
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    return "".join(SPARKS[int(7.99 * (value - low) / ((high - low) or 1.0))] for value in shown)


class Progress(ProgressBar):  # type: ignore[misc]  # lightning is untyped here
    """Progress in lines: one per finished epoch, and in between one every few seconds.

    In a terminal, the line in between is updated in place (`progress_line`).
    """

    def __init__(self, pace: Pace, write: Callable[[str], None], every: float = 10.0, terminal: bool = False) -> None:
        super().__init__()
        self.pace, self.write, self.terminal = pace, write, terminal
        self.every = 0.25 if terminal else every
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
            self._training(trainer, rest[3] + 1)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write a line with the newest validation metrics."""
        if self.terminal and self._enabled:
            self.clear()
            line = epoch_text(trainer)
            for text in _texts(self.pace.values(trainer)):
                shown = _fitting(text, shutil.get_terminal_size().columns - len(line) - 2)
                line += f"  {shown}" if shown else ""
            self.write(line)
        else:
            self._training(trainer, trainer.fit_loop.batch_idx + 1)

    def on_validation_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        """Write a line if one is due."""
        stages = {"test": ("test", trainer.num_test_batches), "predict": ("prediction", trainer.num_predict_batches)}
        name, batches = stages.get(trainer.state.stage, ("validation", trainer.num_val_batches))
        if self._due():
            left = self.pace.seconds_left if self.terminal and trainer.state.fn == "fit" else None
            self._line(name, rest[3] + 1, sum(batches), {}, left)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def clear(self, *_: Any) -> None:
        """Remove the line of a terminal."""
        if self.terminal and self._enabled:
            sys.stdout.write("\r\x1b[K")

    on_train_end = on_validation_end = on_test_epoch_end = on_test_end = on_predict_end = on_exception = clear

    def _training(self, trainer: pl.Trainer, batches: int) -> None:
        values, left = self.pace.values(trainer), self.pace.seconds_left
        self._line(epoch_text(trainer), batches, trainer.num_training_batches, values, left)

    def _due(self) -> bool:
        return time.monotonic() - self._written >= self.every

    def _line(self, name: str, done: int, total: float, values: Mapping[str, str], left: float | None) -> None:
        if not self._enabled:
            return
        self._written = time.monotonic()
        if self.terminal:
            sys.stdout.write(
                "\r\x1b[K" + progress_line(shutil.get_terminal_size().columns - 1, name, done, total, values, left)
            )
            sys.stdout.flush()
        else:
            self.write("  ".join([name, f"batch {done}/{total}", *_texts(values), *_texts({"": left})]))


def _texts(values: Mapping[str, str | float | None]) -> list[str]:
    """Return values with their names, and seconds without a name as the time that is left."""
    left = [f"{timedelta(seconds=int(x))} left" for x in values.values() if isinstance(x, float)]
    return [f"{name} {value}" for name, value in values.items() if isinstance(value, str)] + left


def _fitting(text: str, room: int) -> str:
    """Return a text that fits, if need be without its sparkline; empty if it is still too long."""
    return next((one for one in (text, text.rstrip(f"{SPARKS} ")) if len(one) <= room), "")


def epoch_text(trainer: pl.Trainer) -> str:
    """Return the current epoch, counted from 1, e.g. ``epoch 1/3``."""
    last = "" if trainer.max_epochs in (None, -1) else f"/{trainer.max_epochs}"
    return f"epoch {trainer.current_epoch + 1}{last}"
