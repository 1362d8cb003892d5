"""The environment variables of W&B as options of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recsys_topk.runs.config import as_list

WANDB_OPTIONS = ("project", "entity", "name", "group", "tags", "job_type", "mode", "notes")


def wandb_environment() -> dict[str, str]:
    """Return the options that the environment variables of W&B set, by their names in a config (`wandb.NAME`)."""
    variables = {name: f"WANDB_{name.upper()}" for name in WANDB_OPTIONS} | {"group": "WANDB_RUN_GROUP"}
    options = {name: os.environ[variable] for name, variable in variables.items() if os.environ.get(variable)}
    if options.get("mode") == "dryrun":  # the old name, which Lightning sets
        options["mode"] = "offline"
    return options


def with_wandb_environment(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the W&B options of the environment: above its files, below its other keys.

    Example:
        >>> os.environ["WANDB_NOTES"] = "from the shell"
        >>> with_wandb_environment({"config": "simulated", "wandb": {"project": "mine"}})
        {'config': ['simulated', {'wandb': {'notes': 'from the shell'}}], 'wandb': {'project': 'mine'}}
        >>> del os.environ["WANDB_NOTES"]
    """
    options = {key: value for key, value in wandb_environment().items() if key != "name" or "name" not in config}
    return {**config, **({"config": [*as_list(config.get("config")), {"wandb": options}]} if options else {})}


def offline_wandb(mode: str | None = None) -> bool:
    """Return whether W&B runs offline: by `mode` (None = that of WANDB_MODE), or because there is no API key."""
    if (mode or os.environ.get("WANDB_MODE")) in ("offline", "disabled", "dryrun"):
        return True
    if os.environ.get("WANDB_API_KEY"):
        return False
    netrc = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    return not (netrc.is_file() and "wandb" in netrc.read_text(errors="ignore"))
