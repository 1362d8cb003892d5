"""Where a run writes: its name, its directory, what it left there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from recsys_topk.cli.console import echo


def run_name(model: Any, data: Any, seed: int | bool | None) -> str:
    """Return a name that tells runs apart, like ``dftopk-tau1-neg25-s42``.

    Args:
        model: The `CascadeModule`.
        data: The datamodule.
        seed: What the random generators were seeded with.
    """
    operator = model.loss.operator
    if not model.objective.uses_loss:
        parts = [model.objective.name]
    else:
        parts = [model.loss.name] if operator is None else [model.loss.name, f"tau{operator.tau:g}"]
        if model.objective.name != ("independent" if operator is None else "joint"):
            parts.append(model.objective.name)
    parts.append(f"neg{data.train_negatives}")
    parts.append(f"s{int(seed)}" if seed is not None else "unseeded")
    return "-".join(parts)


class RunDirectory:
    """A new directory for one run; a name that is taken gets a number, so that no run writes over another.

    Args:
        parent: The folder of all runs.
        name: The run's name.
    """

    def __init__(self, parent: Path, name: str) -> None:
        parent.mkdir(parents=True, exist_ok=True)
        number = 1
        while True:
            self.path = parent / (name if number == 1 else f"{name}-{number}")
            try:
                self.path.mkdir()
                return
            except FileExistsError:
                number += 1

    def echo_files(self) -> None:
        """Print the path of every file that the run wrote."""
        files = sorted(path for path in self.path.rglob("*") if path.is_file() and "wandb" not in path.parts)
        echo("written:")
        for path in files:
            echo(f"  {path}  ({path.stat().st_size / 1024:.0f} KB)")
        offline = sorted(self.path.glob("wandb/offline-run-*"))
        for path in offline:
            echo(f"  {path}  (upload with: wandb sync {path})")


def offline_wandb() -> bool:
    """Return whether W&B must run offline: no key is known here, or the user said so."""
    if os.environ.get("WANDB_MODE") in ("offline", "disabled"):
        return True
    if os.environ.get("WANDB_API_KEY"):
        return False
    netrc = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    return not (netrc.is_file() and "wandb" in netrc.read_text(errors="ignore"))
