"""The environment variables of W&B as options of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recsys_topk.runs.config import as_list

WANDB_OPTIONS = ("project", "entity", "name", "group", "tags", "job_type", "mode", "notes")


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
