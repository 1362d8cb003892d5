"""One run of a comparison: fit, test, and the numbers as JSON; `recsys_topk.runs.trials` gives it a process."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from recsys_topk.runs.files import write_whole
from recsys_topk.runs.trials import Trial, build, train

if TYPE_CHECKING:
    from recsys_topk.runs.lightning_cli import CascadeCLI


def train_and_test(trial: Trial, say: Callable[[Any], None]) -> None:
    """Train with the options of a trial, test, and write what was measured to its file.

    `seconds` is the time of the training alone: what it reads is prepared before.
    """
    cli = build(trial)
    cli.datamodule.prepare_data()
    seconds = train(cli, cli.run_command)
    cli.trainer.test(cli.model, datamodule=cli.datamodule, ckpt_path=None, verbose=False)
    metrics = {name: float(value) for name, value in cli.trainer.callback_metrics.items() if name.startswith("test/")}
    found = {
        **trial.identity(),
        "seconds": seconds,
        "metrics": metrics,
        "device": device(cli),
        "config": configuration(cli),
    }
    write_whole(trial.target, json.dumps(found, indent=1))


def configuration(cli: CascadeCLI) -> dict[str, Any]:
    """Return every option of a run as it was resolved, but for those left at None."""
    import yaml

    found = yaml.safe_load((cli.run.path / "config.yaml").read_text(encoding="utf-8"))
    return {part: _given(found[part]) for part in ("seed_everything", "model", "data", "trainer") if part in found}


def _given(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _given(inner) for name, inner in value.items() if inner is not None}
    return value


def device(cli: CascadeCLI) -> str:
    """Return what a run trained on: ``cpu``, or the name of the GPU."""
    import torch

    place = cli.trainer.strategy.root_device
    return torch.cuda.get_device_name(place) if place.type == "cuda" else str(place.type)
