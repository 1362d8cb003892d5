"""Checkpoints of a run: `last.ckpt`, from which a stopped run resumes exactly, and `best.ckpt`."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint

from recsys_topk.cascades.shards import ENTRY, load_stored, remove_unused, with_full_tensors
from recsys_topk.files import check_once, check_zip, whole_file

RANDOM_STATE = "random_state"


def random_state() -> dict[str, Any]:
    """Return the state of Python's, NumPy's and torch's generators, and of each GPU's.

    Example:
        >>> state = random_state()
        >>> first = torch.rand(2)
        >>> restore_random_state(state)
        >>> bool((torch.rand(2) == first).all())
        True
    """
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore a state from `random_state`; those of the GPUs only if their number is the same."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([part.cpu() for part in state["cuda"]])


class WholeFileIO(TorchCheckpointIO):  # type: ignore[misc]  # lightning is untyped here
    """Writes checkpoints atomically: if the process is killed, either the old or the new file is there.

    Lightning moves the file from the temporary folder of the system. On another file system this is a copy, which is
    not atomic.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write the file atomically."""
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with whole_file(path) as file:
            torch.save(checkpoint, file)
        remove_unused(Path(path).parent)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a file. Code in it is not executed unless `weights_only` is False, which a config file cannot set."""
        if kwargs.get("weights_only") is None:
            kwargs["weights_only"] = True
        check_once([Path(path)], check_zip)
        content = dict(super().load_checkpoint(path, *args, **kwargs))
        return content if ENTRY not in content else dict(with_full_tensors(load_stored(path, kwargs["weights_only"])))

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a file and its shards."""
        super().remove_checkpoint(path)
        if "://" not in str(path):
            remove_unused(Path(path).parent)


class BestCheckpoint(ModelCheckpoint):  # type: ignore[misc]  # lightning is untyped here
    """Saves `best.ckpt`, the checkpoint with the largest value of a metric. The run directory may be moved."""

    def __init__(self, folder: Path, monitor: str) -> None:
        super().__init__(dirpath=folder, filename="best", monitor=monitor, mode="max", enable_version_counter=False)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best value if `best.ckpt` is in the folder. A new run does not have it."""
        best = Path(str(self.dirpath)) / "best.ckpt"
        if best.is_file() and state_dict["best_model_path"]:
            scores = {str(best): score for score in state_dict["best_k_models"].values()}
            paths = {"dirpath": self.dirpath, "best_model_path": str(best), "kth_best_model_path": str(best)}
            super().load_state_dict({**state_dict, **paths, "best_k_models": scores})


def _stays_in(folder: Path, state: dict[str, Any]) -> bool:
    """Return whether all files in the state of a `ModelCheckpoint` are local and inside `folder`."""
    named = [state.get(key) for key in ("best_model_path", "kth_best_model_path", "last_model_path")]
    paths = [str(path) for path in (*named, *state.get("best_k_models", ())) if path]
    return all("://" not in path and "::" not in path and Path(path).resolve().is_relative_to(folder) for path in paths)


class TrainingStoppedError(Exception):
    """Training was stopped by a signal, after a complete step."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.signal_number = signal_number


class ResumePoint(Checkpoint):  # type: ignore[misc]  # lightning is untyped here
    """Saves `last.ckpt`, also within epochs, and stops after the current step on Ctrl-C, SIGTERM or SIGHUP.

    The checkpoint is saved at the end of each epoch and, within an epoch, after `minutes`, at every `steps`-th step,
    and one step before validation, so that a kill during a long validation loses one step. The file is renamed to
    `last.ckpt` after the metrics of its step are logged, so that checkpoint and metrics.csv are consistent. Nothing is
    saved while gradients accumulate or between a step and its validation, because Lightning cannot resume there. With
    `max_steps` Lightning cannot resume between epochs: the first step of the next epoch is saved instead.

    Every checkpoint contains the state of the random generators, which is restored before the first batch.

    Args:
        folder: Folder of `last.ckpt`.
        minutes: Minutes between two checkpoints within an epoch.
        steps: Save also at every `steps`-th step; None = by time only.
    """

    def __init__(self, folder: Path, minutes: float = 5.0, steps: int | None = None) -> None:
        if minutes <= 0:
            raise ValueError(f"--save_every_minutes must be above 0, got {minutes:g}")
        if steps is not None and steps < 1:
            raise ValueError(f"--save_every_n_steps must be at least 1, got {steps}")
        self.path = Path(folder) / "last.ckpt"
        self.seconds, self.steps = 60.0 * minutes, steps
        self.saved_step: int | None = None
        self._pending = self.path.with_name(".last.ckpt.pending")
        self._pending_step: int | None = None
        self._saved_at = time.monotonic()
        self._signal = 0
        self._handlers: dict[int, Any] = {}
        self._random_state: dict[str, Any] | None = None

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        """Add the state of the random generators."""
        checkpoint[RANDOM_STATE] = random_state()

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        """Take the state of the random generators in the first process; other processes keep their seeds.

        The state of a `ModelCheckpoint` names files that it deletes later. The state is dropped if one of them is
        outside the run directory.
        """
        if trainer.is_global_zero:
            self._random_state = checkpoint.get(RANDOM_STATE)
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and not isinstance(callback, BestCheckpoint):
                states = checkpoint.get("callbacks") or {}
                if not _stays_in(Path(trainer.default_root_dir).resolve(), states.get(callback.state_key, {})):
                    del states[callback.state_key]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Install the signal handlers; remove incomplete files of a killed process."""
        for path in self.path.parent.glob(".*.ckpt.*") if trainer.is_global_zero else ():
            path.unlink(missing_ok=True)
        self._saved_at = time.monotonic()
        resumed = trainer.ckpt_path is not None and Path(trainer.ckpt_path).resolve() == self.path.resolve()
        self.saved_step = trainer.global_step if resumed else None
        for number in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
            try:
                if number in self._handlers:
                    continue
                if number not in (signal.SIGINT, signal.SIGTERM) and signal.getsignal(number) == signal.SIG_IGN:
                    continue  # under nohup
                self._handlers[number] = signal.signal(number, self._on_signal)
            except ValueError:  # not in the main thread, which alone receives signals
                return

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Rename the pending checkpoint to `last.ckpt`; restore the random generators."""
        if self._pending_step is not None:
            if trainer.is_global_zero:
                self._pending.replace(self.path)
                remove_unused(self.path.parent)
            self.saved_step, self._pending_step = self._pending_step, None
        if self._random_state is not None:
            restore_random_state(self._random_state)
            self._random_state = None

    on_train_end = on_train_epoch_start

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Rename the checkpoint of the previous step; stop if a signal arrived during that step."""
        self.on_train_epoch_start(trainer)
        if self._signalled(trainer) and self.saved_step == trainer.global_step:
            raise TrainingStoppedError(self._signal or signal.SIGINT)

    def on_train_batch_end(self, trainer: pl.Trainer, _: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save if a checkpoint is due."""
        if trainer.is_last_batch or (batch_idx + 1) % trainer.accumulate_grad_batches:
            return  # saved at the end of the epoch, or gradients are being accumulated
        if trainer.strategy.broadcast(self._due(trainer, batch_idx)) or self._signalled(trainer):
            self._save(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Drop the checkpoint of the previous step: a run resumed from it would skip this validation."""
        if trainer.state.fn == "fit":
            self._pending_step = None

    def on_validation_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Stop a validation immediately; the resumed run repeats it."""
        if trainer.state.fn == "fit" and self._signalled(trainer):
            raise TrainingStoppedError(self._signal or signal.SIGINT)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save after a validation within an epoch; after the last step, `on_train_epoch_end` saves."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking and not trainer.is_last_batch:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save; a run that ends within an epoch (max_steps) keeps the checkpoint of its last step."""
        over = trainer.should_stop or trainer.max_steps == -1 or trainer.global_step >= trainer.max_steps
        if trainer.is_last_batch and over:
            self._save(trainer)

    def teardown(self, *_: Any, **__: Any) -> None:
        """Restore the signal handlers."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
        """Restore the signal handlers; delete a checkpoint that was not renamed yet."""
        self.teardown()
        self._pending_step = None
        if trainer.is_global_zero:
            self._pending.unlink(missing_ok=True)

    def _due(self, trainer: pl.Trainer, batch_idx: int) -> bool:
        elapsed = time.monotonic() - self._saved_at
        if elapsed >= self.seconds or trainer.global_step == trainer.max_steps:
            return True
        if self.steps is not None and trainer.global_step % self.steps == 0:
            return True
        if trainer.max_steps != -1 and batch_idx < trainer.accumulate_grad_batches:
            return True
        coming = range(batch_idx + 2, batch_idx + 2 + trainer.accumulate_grad_batches)
        interval = trainer.val_check_batch
        validates = bool(interval) and any(number % interval == 0 for number in coming)
        return validates and (self.saved_step is None or elapsed >= self.seconds / 10)

    def _save(self, trainer: pl.Trainer) -> None:
        if trainer.fast_dev_run or trainer.global_step == self._pending_step:
            return
        trainer.save_checkpoint(self._pending)
        self._pending_step = trainer.global_step
        self._saved_at = time.monotonic()

    def _on_signal(self, number: int, frame: Any) -> None:
        if self._signal:
            self.teardown()
            raise KeyboardInterrupt
        self._signal = number
        with suppress(OSError):  # the terminal is closed
            os.write(2, b"\nstopping after this step; press again to abort\n")  # print is not safe in a signal handler

    def _signalled(self, trainer: pl.Trainer) -> bool:
        """Return whether any process has received a signal."""
        return bool(trainer.strategy.reduce_boolean_decision(bool(self._signal), all=False))
