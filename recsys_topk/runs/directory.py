"""Where a run writes: its name, its directory, what is known of it, what it left there."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from recsys_topk.files import write_whole
from recsys_topk.runs.config import as_list
from recsys_topk.text import size_text

Status = Literal["running", "interrupted", "failed", "finished"]
WANDB_OPTIONS = ("project", "entity", "name", "group", "tags", "job_type", "mode", "notes")
HANDED_DOWN = "RECSYS_TOPK_RUN"


def run_name(model: Any, data: Any, seed: int | bool | None) -> str:
    """Return a name that tells runs apart, like ``dftopk-tau1-neg25-s42``.

    Args:
        model: The `CascadeModule`.
        data: The datamodule.
        seed: What the random generators were seeded with.
    """
    from recsys_topk.cascades.objectives.base import default_objective

    operator = model.loss.operator
    if not model.objective.uses_loss:
        parts = [model.objective.name]
    else:
        parts = [model.loss.name] if operator is None else [model.loss.name, f"tau{operator.tau:g}"]
        if model.objective.name != default_objective(model.loss):
            parts.append(model.objective.name)
    parts.append(f"neg{data.train_negatives}")
    parts.append(f"s{int(seed)}" if seed is not None else "unseeded")
    return "-".join(parts)


def first_process() -> bool:
    """Return whether this is the first process of a run: the one that was started, or torchrun's number 0."""
    if "RANK" in os.environ:
        return os.environ["RANK"] == "0"
    return all(os.environ.get(name, "0") == "0" for name in ("LOCAL_RANK", "NODE_RANK"))


class RunDirectory:
    """A new directory for one run; a name that is taken gets a number, so that no run writes over another.

    `run.json` in it holds what is known of the run: its status, how far it is, its W&B id. While a process trains, it
    holds a lock, so that no second one resumes the same run.

    Args:
        parent: The folder of all runs.
        name: The run's name.
    """

    def __init__(self, parent: Path, name: str) -> None:
        self._lock: Any = None
        self._new = first_process()
        check_name(name)
        if not first_process():  # Lightning's processes inherit the directory, those of torchrun do without
            self.path = Path(os.environ.get(HANDED_DOWN, parent / name))
            return
        try:
            parent.mkdir(parents=True, exist_ok=True)
            self.path = _new_folder(parent, name)
        except (FileExistsError, NotADirectoryError):
            raise ValueError(f"--out {str(parent)!r} is a file, or lies in one; give a folder for the runs") from None
        except PermissionError:
            raise ValueError(f"--out {str(parent)!r} is not yours to write to; give another folder") from None
        os.environ[HANDED_DOWN] = str(self.path)

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Return the directory of a run that exists."""
        run = cls.__new__(cls)
        run.path, run._lock, run._new = path, None, False
        return run

    @property
    def facts(self) -> dict[str, Any]:
        """What is known of the run; empty if nothing is."""
        try:
            found = json.loads((self.path / "run.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def record(self, *, from_any_process: bool = False, **facts: Any) -> None:
        """Add to what is known of the run; a process that is not the first one does so only with `from_any_process`."""
        if first_process() or (from_any_process and self.path.is_dir()):
            write_whole(self.path / "run.json", json.dumps({**self.facts, **facts}, indent=1) + "\n")

    @property
    def busy(self) -> bool:
        """Whether another process is training this run; one that was killed is not."""
        if not first_process() or not self.path.joinpath(".lock").exists():
            return False
        try:
            self.claim()
        except ValueError:
            return True
        self.release()
        return False

    def claim(self) -> None:
        """Lock the run for this process until it ends; raise if another process has it."""
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
        """Remove the directory of a run that was refused before its first step; a run that is resumed keeps it."""
        self.release()
        if self._new and not (self.path / "wandb").exists():  # W&B still writes there
            shutil.rmtree(self.path, ignore_errors=True)

    def files(self) -> list[str]:
        """Return a line for every file that the run wrote."""
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
    """Raise if a name would put the directory elsewhere than into its parent."""
    if name in ("", ".", "..") or len(name) > 200 or any(part in name for part in ("/", "\\", "\0")):
        raise ValueError(
            f"--name must be a plain name of at most 200 characters, without path separators, got {name[:220]!r}; "
            f"--out says where it goes"
        )


def sync_line(path: Path) -> str:
    """Return an offline W&B run with the command that uploads it."""
    return f"{path}  (upload with: wandb sync {path})"


def wandb_environment() -> dict[str, str]:
    """Return the options of W&B that its environment variables set, by their name in a config (`wandb.NAME`)."""
    variables = {name: f"WANDB_{name.upper()}" for name in WANDB_OPTIONS} | {"group": "WANDB_RUN_GROUP"}
    found = {name: os.environ[variable] for name, variable in variables.items() if os.environ.get(variable)}
    if found.get("mode") == "dryrun":  # the old name, which Lightning sets
        found["mode"] = "offline"
    return found


def with_wandb_environment(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the environment's options of W&B in it: below what is typed, above the files.

    Example:
        >>> os.environ["WANDB_NOTES"] = "said here"
        >>> with_wandb_environment({"config": "simulated", "wandb": {"project": "mine"}})
        {'config': ['simulated', {'wandb': {'notes': 'said here'}}], 'wandb': {'project': 'mine'}}
        >>> del os.environ["WANDB_NOTES"]
    """
    found = {key: value for key, value in wandb_environment().items() if key != "name" or "name" not in config}
    return {**config, **({"config": [*as_list(config.get("config")), {"wandb": found}]} if found else {})}


def offline_wandb(mode: str | None = None) -> bool:
    """Return whether W&B must run offline: no key is known here, or the user said so.

    Args:
        mode: What the user said; None = what WANDB_MODE holds.
    """
    if (mode or os.environ.get("WANDB_MODE")) in ("offline", "disabled", "dryrun"):
        return True
    if os.environ.get("WANDB_API_KEY"):
        return False
    netrc = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    return not (netrc.is_file() and "wandb" in netrc.read_text(errors="ignore"))
