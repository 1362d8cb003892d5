"""Wrong days of RecFlow are refused before torch and Lightning are imported, which takes seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from recsys_topk.runs.config import layers, merge
from recsys_topk.trust import from_file, reading
from recsys_topk.trust.typed import trusted_by

_RECFLOW: Final = (
    "recflow",
    "RecFlowDataModule",
    "recsys_topk.datamodules.recflow.datamodule.RecFlowDataModule",
)
_DAYS: Final = ("days", "train_days", "val_days", "test_days")


def check_days(config: Mapping[str, Any], *, split: bool = True) -> None:
    """Raise if a config asks for days that the data set does not have, naming all of them.

    Args:
        config: The config of a run.
        split: Whether there must be enough days to train and to test on.
    """
    if not from_file():  # in a `TrainingRun`, it has said what is trusted
        with reading(trusted_by(config)):
            check_days(config, split=split)
        return
    data: dict[str, Any] = {}
    for layer in layers(config):
        part = layer.get("data")
        part = {"class_path": part} if isinstance(part, str) else dict(part or {})
        name, own = part.pop("class_path", None), {**(part.pop("init_args", None) or {}), **part}
        named = {} if name is None else {"class_path": "recflow" if name in _RECFLOW else name}
        data = merge(data, {**named, "init_args": own})
    options = data.get("init_args", {})
    if data.get("class_path", "recflow") != "recflow" or not any(options.get(name) for name in _DAYS):
        return
    from recsys_topk.datamodules.recflow.days import DayOptions
    from recsys_topk.datamodules.recflow.files import RecFlowFiles

    available = _simulated(options.get("world"))
    if options.get("root") is not None:
        available = RecFlowFiles(str(options["root"])).days
    wanted = DayOptions(*(None if options.get(name) is None else str(options[name]) for name in _DAYS))
    if split:
        wanted.splits(available)
    else:
        wanted.used(available)


def _simulated(world: Any) -> tuple[str, ...]:
    """Return the days of a simulated world; of its options, those of the days only."""
    from recsys_topk.datamodules.simulator.world import WorldConfig

    given = world if isinstance(world, Mapping) else {}
    start, days = str(given.get("start", WorldConfig.start)), str(given.get("days", WorldConfig.days))
    return WorldConfig(start=start, days=int(days) if days.isdecimal() else WorldConfig.days).day_names
