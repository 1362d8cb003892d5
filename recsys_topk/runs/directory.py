"""The directory of a run: its name, its lock, its status in run.json, and its files."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any, Literal

from recsys_topk.files import write_whole
from recsys_topk.text import size_text

Status = Literal["running", "interrupted", "failed", "finished"]
HANDED_DOWN = "RECSYS_TOPK_RUN"


def run_name(model: Any, data: Any, seed: int | bool | None) -> str:
    """Return a name with the main options of a run, e.g. ``dftopk-tau1-neg25-s42``."""
    from recsys_topk.cascades.objectives.base import default_objective

    operator = model.loss.operator
    if not model.objective.uses_loss:
        parts = [model.objective.name]
    else:
        parts = [model.loss.name] if operator is None else [model.loss.name, f"tau{operator.tau_text}"]
        if model.objective.name != default_objective(model.loss):
            parts.append(model.objective.name)
    parts.append(f"neg{data.train_negatives}")
    parts.append(f"s{int(seed)}" if seed is not None else "unseeded")
    return "-".join(parts)


def name_of_run(checkpoint: str | Path) -> str:
    """Return the name of the run of a checkpoint; the name of the file if it lies outside a run directory.

    Example:
        >>> name_of_run("runs/first/checkpoints/best.ckpt"), name_of_run("mine.ckpt")
        ('first', 'mine')
    """
    path = Path(checkpoint).resolve()
    return path.parent.parent.name if path.parent.name == "checkpoints" else path.stem


def first_process() -> bool:
    """Return whether this is the first process of a run (rank 0)."""
    if "RANK" in os.environ:
        return os.environ["RANK"] == "0"
    return all(os.environ.get(name, "0") == "0" for name in ("LOCAL_RANK", "NODE_RANK"))


class RunDirectory:
    """A new directory for one run. If the name exists, a number is appended, so that no run overwrites another.

    `run.json` in it contains the status of the run, its number of steps and epochs, and its W&B id. The training
    process holds a lock, so that no second process resumes the same run.
    """

    def __init__(self, parent: Path, name: str) -> None:
        self._lock: Any = None
        self._new = first_process()
        check_name(name)
        if not first_process():  # processes of Lightning inherit the path; those of torchrun derive it
            self.path = Path(os.environ.get(HANDED_DOWN, parent / name))
            return
        try:
            parent.mkdir(parents=True, exist_ok=True)
            for other in parent.glob("*/run.json"):
                RunDirectory.open(other.parent)
            self.path = _new_folder(parent, name)
        except (FileExistsError, NotADirectoryError):
            raise ValueError(f"--out {str(parent)!r} is a file, or lies in one; give a folder for the runs") from None
        except PermissionError:
            raise ValueError(f"--out {str(parent)!r} is not writable; give another folder") from None
        os.environ[HANDED_DOWN] = str(self.path)

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Return the directory of an existing run."""
        run = cls.__new__(cls)
        run.path, run._lock, run._new = path, None, False
        run.settle()
        return run

    @property
    def facts(self) -> dict[str, Any]:
        """The content of run.json; empty if there is none."""
        try:
            content = json.loads((self.path / "run.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def record(self, *, from_any_process: bool = False, **facts: Any) -> None:
        """Add entries to run.json; processes other than the first do so only with `from_any_process`."""
        if not first_process() and not (from_any_process and self.path.is_dir()):
            return
        file, text = self.path / "run.json", json.dumps({**self.facts, **facts}, indent=1) + "\n"
        try:
            write_whole(file, text)
        except OSError:
            if facts.get("status", "running") == "running" or not file.is_file():
                raise
            with contextlib.suppress(OSError), file.open("r+b") as full:  # in place, which needs no space
                full.write(text.encode())
                full.truncate()

    def settle(self) -> None:
        """Record that the run has failed if its process is gone, e.g. killed, and could not record it."""
        if self.facts.get("status") == "running" and first_process() and not self.busy:
            with contextlib.suppress(OSError):
                self.record(status="failed")

    @property
    def busy(self) -> bool:
        """Whether another process is training this run. The lock of a killed process does not count."""
        if not first_process() or not self.path.joinpath(".lock").exists():
            return False
        try:
            self.claim()
        except ValueError:
            return True
        self.release()
        return False

    def claim(self) -> None:
        """Lock the run for this process; raise if another process holds the lock."""
        from filelock import FileLock, Timeout

        if not first_process():
            return
        lock = FileLock(self.path / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(f"the run in {self.path} is being trained by another process; wait for it") from None
        self._lock = lock

    def release(self) -> None:
        """Release the lock of the run."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def discard(self) -> None:
        """Remove the directory of a run that failed before its first step; that of a resumed run is kept."""
        self.release()
        if self._new and not (self.path / "wandb").exists():  # W&B still writes there
            shutil.rmtree(self.path, ignore_errors=True)

    def files(self) -> list[str]:
        """Return one line per file of the run."""
        files = sorted(path for path in self.path.rglob("*") if path.is_file() and "wandb" not in path.parts)
        lines = [f"{path}  ({size_text(path.stat().st_size)})" for path in files if not path.name.startswith(".")]
        return [*lines, *map(sync_line, sorted(self.path.glob("wandb/offline-run-*")))]


def _new_folder(parent: Path, name: str) -> Path:
    for number in itertools.count(1):
        path = parent / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError


def check_name(name: str) -> None:
    """Raise if a name is not a plain folder name."""
    if name in ("", ".", "..") or len(name) > 200 or any(part in name for part in ("/", "\\", "\0")):
        raise ValueError(
            f"--name must be a plain name of at most 200 characters, without path separators, got {name[:220]!r}; "
            f"--out selects the folder"
        )


def sync_line(path: Path) -> str:
    """Return an offline W&B run with the command that uploads it."""
    return f"{path}  (upload with: wandb sync {path})"
