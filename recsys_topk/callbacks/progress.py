"""Progress of training: requests per second, the loss, and the joint recall of the batch just trained on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar
from torch import Tensor

from recsys_topk.callbacks.objective_calls import ObjectiveCalls
from recsys_topk.metrics.functional import joint_recall

RATE = "train/requests_per_second"
LISTS = 256  # of a batch, enough for a recall to two digits


class Pace(ObjectiveCalls):
    """Measures requests per second, logs them as ``train/requests_per_second``, and the recall of a training batch.

    The rate is over the steps since it was last logged, or since the last validation or the end of an epoch.
    The recall is that of scores which the step computed anyway, before its update, for the first 256 lists of the batch
    and at most once in `every` seconds.

    Args:
        every: Seconds between two looks at the recall; None = never.

    Attributes:
        requests_per_second: The newest rate; None before the first step.
        batch_joint_recall: The newest recall; None before the first.
    """

    def __init__(self, every: float | None = 1.0) -> None:
        self.every = every
        self.requests_per_second: float | None = None
        self.batch_joint_recall: float | None = None
        self._requests, self._since, self._looked = 0, 0.0, 0.0

    def wanted(self, trainer: pl.Trainer) -> bool:
        """Return whether it is time to look at the recall."""
        return self.every is not None and time.monotonic() - self._looked >= self.every

    def on_train_epoch_start(self, *_: Any) -> None:
        """Begin a new measurement: between epochs no requests are trained on."""
        self._requests, self._since = 0, time.monotonic()

    on_validation_end = on_train_epoch_start

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, _: Any, batch: Any, *__: Any
    ) -> None:
        """Measure, and log when the trainer does."""
        self._requests += batch.size * trainer.world_size
        self.requests_per_second = self._requests / max(time.monotonic() - self._since, 1e-9)
        if trainer.log_every_n_steps and trainer.global_step % trainer.log_every_n_steps == 0:
            pl_module.log(RATE, self.requests_per_second, batch_size=batch.size)
            self.on_train_epoch_start()
        call = self.taken()
        if call is not None:
            self._look(call["scores"], pl_module, batch)

    def shown(self, metrics: dict[str, Any]) -> dict[str, str]:
        """Return what a progress bar shows, as text.

        Args:
            metrics: What was logged for the progress bar.
        """
        found = {}
        if "train/loss" in metrics:
            found["loss"] = f"{float(metrics['train/loss']):.4f}"
        if self.requests_per_second is not None:
            found["requests/s"] = f"{self.requests_per_second:,.0f}"
        if self.batch_joint_recall is not None:
            found["batch joint recall"] = f"{self.batch_joint_recall:.3f}"
        return found | {name: f"{float(value):.4f}" for name, value in metrics.items() if name.startswith("val/")}

    @torch.no_grad()
    def _look(self, scores: Sequence[Tensor], pl_module: pl.LightningModule, batch: Any) -> None:
        labels, mask, above = batch.labels[:LISTS], batch.mask[:LISTS], pl_module.schema.positive_above
        quotas = pl_module.cascade.quotas
        scores = [x[:LISTS] for x in scores]
        values, counted = joint_recall(scores, labels, mask, quotas=quotas, k=pl_module.k, positive_above=above)
        total, number = torch.stack([torch.where(counted, values, 0.0).sum(), counted.sum()]).tolist()  # one read
        if number:
            self.batch_joint_recall = total / number
        self._looked = time.monotonic()


class RichProgress(RichProgressBar):  # type: ignore[misc]  # lightning is untyped here
    """Lightning's bar for terminals, with what `Pace` measures.

    Args:
        pace: Measures.
    """

    def __init__(self, pace: Pace) -> None:
        super().__init__(refresh_rate=4)
        self.pace = pace
        self._shown: dict[str, Any] = {}
        self._read = 0.0

    def on_train_epoch_end(self, *rest: Any) -> None:
        """Show the newest values."""
        self._read = 0.0
        super().on_train_epoch_end(*rest)

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """Return what stands beside the bar; Lightning asks after every batch, and values are read twice a second."""
        if time.monotonic() - self._read >= 0.5:
            self._shown, self._read = dict(self.pace.shown(trainer.progress_bar_metrics)), time.monotonic()
        return self._shown


class PlainProgress(ProgressBar):  # type: ignore[misc]  # lightning is untyped here
    """A line now and then, for logs and pipes, where a bar that redraws itself is unreadable.

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
        last = "" if trainer.max_epochs in (None, -1) else f"/{trainer.max_epochs}"
        parts = [f"epoch {trainer.current_epoch + 1}{last}", f"batch {batches}/{trainer.num_training_batches}"]
        shown = self.pace.shown(trainer.progress_bar_metrics)
        return "  ".join([*parts, *(f"{name} {value}" for name, value in shown.items())])

    def _due(self) -> bool:
        return time.monotonic() - self._written >= self.every

    def _line(self, text: str) -> None:
        if self._enabled:
            self.write(text)
            self._written = time.monotonic()
