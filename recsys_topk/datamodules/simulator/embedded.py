"""The simulated world that is used if no data set is given. It is made once, in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Final

from recsys_topk.datamodules.simulator.world import WorldConfig
from recsys_topk.files import cache_home, make_once

DEFAULT_WORLD: Final = WorldConfig()

_FORMAT: Final = 1
"""Version of the simulator. Increase it if the same configuration gives a different world."""


def embedded_root(config: WorldConfig = DEFAULT_WORLD, announce: Callable[[str], None] | None = None) -> Path:
    """Return the folder of the simulated world with this configuration. Simulate it if it does not exist.

    If two processes call this at the same time, the second waits for the first, and both get the same world.

    Args:
        config: The configuration of the world.
        announce: Called with one line if the world has to be simulated.
    """
    facts = json.dumps({"format": _FORMAT, **asdict(config)}, sort_keys=True)
    name = f"{config.users}x{config.items}-{hashlib.blake2b(facts.encode(), digest_size=4).hexdigest()}"
    root = cache_home() / "worlds" / name

    def write(folder: Path) -> None:
        from recsys_topk.datamodules.simulator.simulation import simulate

        if announce is not None:
            size = f"{config.days} days of {config.requests} requests"
            announce(f"no data.root given: simulating {size} in {root} (once)")
        simulate(folder, config)

    make_once(root, write)
    return root
