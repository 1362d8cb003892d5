"""The times at which last.ckpt is written, and the effect of signals, with a Trainer on small random batches."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from recsys_topk.callbacks.resume_point import BestCheckpoint, ResumePoint, TrainingStoppedError, WholeFileIO
from tests.cascades.test_module import batches, module, trainer


class Signals(Callback):  # type: ignore[misc]  # lightning is untyped here
    """Sends a signal to this process at a hook and global step, one or more times."""

    def __init__(self, hook: str, step: int, times: int = 1, number: int = signal.SIGINT) -> None:
        def send(run: Any, *_: Any) -> None:
            if run.global_step == step and run.training != hook.startswith("on_validation"):
                for _ in range(times):
                    os.kill(os.getpid(), number)

        setattr(self, hook, send)


def step_of(path: Path) -> int:
    return int(torch.load(path, weights_only=True)["global_step"])


def fit(folder: Path, *callbacks: Callback, steps: int | None = None, epochs: int = 2, **options: Any) -> ResumePoint:
    point = ResumePoint(folder, minutes=60, steps=steps)
    run = trainer(folder, max_epochs=epochs, callbacks=[*callbacks, point], enable_checkpointing=True, **options)
    run.fit(module(), batches(6), batches(2))
    return point


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    io = WholeFileIO()
    io.save_checkpoint({"a": torch.ones(3)}, tmp_path / "x.ckpt")
    with pytest.raises(Exception, match="pickle"):
        io.save_checkpoint({"a": torch.zeros(10_000), "b": lambda: None}, tmp_path / "x.ckpt")
    assert torch.equal(torch.load(tmp_path / "x.ckpt", weights_only=True)["a"], torch.ones(3))


@pytest.mark.parametrize(("hook", "step", "saved"), [
    ("on_train_batch_start", 2, 3),  # the running step is finished and saved
    ("on_train_batch_end", 3, 3),
    ("on_train_batch_start", 5, 5),  # the last step of the epoch is not saved before validation
    ("on_validation_batch_start", 6, 5),
    ("on_train_batch_start", 8, 9),
])  # fmt: skip
def test_signal_stops_after_the_step_with_a_checkpoint(tmp_path: Path, hook: str, step: int, saved: int) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(TrainingStoppedError, match="SIGINT"):
        fit(tmp_path, Signals(hook, step))
    assert step_of(tmp_path / "last.ckpt") == saved
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]
    assert signal.getsignal(signal.SIGINT) is before


def test_sigterm_stops_the_training(tmp_path: Path) -> None:
    with pytest.raises(TrainingStoppedError) as stopped:
        fit(tmp_path, Signals("on_train_batch_start", 2, number=signal.SIGTERM))
    assert stopped.value.signal_number == signal.SIGTERM


def test_second_signal_aborts_at_once(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit):  # Lightning turns KeyboardInterrupt into this
            fit(tmp_path, Signals("on_train_batch_start", 3, times=2), steps=2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert step_of(tmp_path / "last.ckpt") == 2


def test_checkpoint_is_saved_by_steps_or_time_and_never_inside_an_accumulation(tmp_path: Path) -> None:
    seen: list[int] = []

    class Watch(Callback):  # type: ignore[misc]  # lightning is untyped here
        def on_train_batch_start(self, run: Any, model: Any, batch: Any, number: int) -> None:
            seen.append(step_of(path) if path.is_file() else 0)

    for name, options, expected in (
        ("steps", {"steps": 4}, [0, 0, 0, 0, 0, 4, 6, 6, 6, 8, 8, 8]),
        ("accumulation", {"steps": 1, "accumulate_grad_batches": 4}, [0, 0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 3]),
    ):
        path, seen = tmp_path / name / "last.ckpt", []
        fit(path.parent, Watch(), **options)
        assert seen == expected, name
    path, seen = tmp_path / "time" / "last.ckpt", []
    point = ResumePoint(path.parent, minutes=1e-9)
    run = trainer(path.parent, max_epochs=1, callbacks=[Watch(), point], enable_checkpointing=True)
    run.fit(module(), batches(4), batches(1))
    assert seen == [0, 0, 1, 2]


def test_run_started_from_another_checkpoint_saves_its_own_best(tmp_path: Path) -> None:
    for name, start in (("one", None), ("two", tmp_path / "one" / "best.ckpt")):
        callbacks = [BestCheckpoint(tmp_path / name, "val/joint_recall@3@5")]
        run = trainer(
            tmp_path / name, max_epochs=1 if start is None else 2, callbacks=callbacks, enable_checkpointing=True
        )
        run.fit(module(), batches(2), batches(1), ckpt_path=start)
        assert step_of(tmp_path / name / "best.ckpt") == (2 if start is None else 4)
