"""If one of several training processes dies, the others stop, and one line says what happened and what to do."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from recsys_topk.runs.directory import first_process

if TYPE_CHECKING:
    from recsys_topk.runs.run import TrainingRun

# Seconds between two checks of the other processes, and seconds until this process is stopped as well.
PERIOD, GRACE = 0.2, 20.0

_LOST = re.compile(r"gloo|nccl|ProcessGroup|TCPStore|Connection (closed|reset|refused)|Broken pipe", re.IGNORECASE)


class LostProcessError(ConnectionError):
    """Another process of the run has ended, so that this one cannot continue; if `quiet`, another one prints it."""

    exit_status = 1

    def __init__(self, text: str, quiet: bool = False) -> None:
        super().__init__(text)
        self.quiet = quiet


@contextmanager
def watch_processes(run: TrainingRun) -> Iterator[None]:
    """Watch the processes of a run, and raise one line on a communication error.

    Lightning kills the first process a few seconds after another one died. Here it stops by itself, so that `run.json`
    gets the status of the run. A process that hangs is killed.
    """
    parent, over = os.getppid(), threading.Event()
    watch = threading.Thread(target=_watch, args=(run, over), daemon=True)
    if run.trainer.world_size > 1 and first_process():
        watch.start()
    try:
        yield
    except Exception as error:
        if run.trainer.world_size == 1 or not isinstance(error, RuntimeError) or not _LOST.search(str(error)):
            raise
        time.sleep(5 * PERIOD)  # the kernel reports the end of a process with a delay
        alone = not first_process() and os.getppid() != parent
        if alone:  # the first process is dead and cannot record the status
            run.directory.record(from_any_process=True, status="failed")
        raise LostProcessError(_explanation(run), quiet=not first_process() and not alone) from error
    finally:
        over.set()
        if first_process():
            _end_others(run)


def _watch(run: TrainingRun, over: threading.Event) -> None:
    while not over.wait(PERIOD):
        for thread in threading.enumerate():
            if thread.name == "child-process-observer":  # Lightning's thread would kill this process
                thread._child_processes = []  # type: ignore[attr-defined]
        if any(process.poll() for process in _children(run)):
            if not over.wait(GRACE):
                run.directory.record(status="failed")
                os.write(2, f"recsys-topk fit: {_explanation(run)}\n".encode())
                _end_others(run)
                os._exit(1)
            return


def _children(run: TrainingRun) -> list[subprocess.Popen[Any]]:
    return list(getattr(run.trainer.strategy.launcher, "procs", ()))


def _end_others(run: TrainingRun) -> None:
    """Wait for the child processes; kill those that do not end."""
    end = time.monotonic() + GRACE
    for process in _children(run):
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _explanation(run: TrainingRun) -> str:
    statuses = [(rank, process.poll()) for rank, process in enumerate(_children(run), 1)]
    ended = [(rank, status) for rank, status in statuses if status]
    number = run.trainer.world_size
    killed = next((pair for pair in ended if pair[1] < 0), ended[0] if ended else None)
    if killed is None:
        cause = f"another of the {number} processes ended, or cannot be reached"
    else:
        rank, status = killed
        end = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        cause = f"process {rank} of {number} (0 to {number - 1}) {end}"
    folder = run.directory.path
    saved = (folder / "checkpoints" / "last.ckpt").is_file()
    remedy = f"--resume {folder} continues from the last checkpoint" if saved else "there is no checkpoint yet"
    return f"{cause}; training stopped after step {run.trainer.global_step}; {remedy}"
