"""Names that files, configs and dashboards of users contain: state dicts, registries, options, metrics.

A name that disappears breaks a checkpoint, a config or a chart. ``python -m tests.test_golden`` writes the files of
tests/golden again after a change that is meant; name it in the changelog, under [Breaking] where names disappear.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import Namespace

from recsys_topk.cascades.encoders.base import registry as encoders
from recsys_topk.cascades.module import CascadeModule
from recsys_topk.cascades.objectives.base import registry as objectives
from recsys_topk.cascades.stage import StageConfig
from recsys_topk.cascades.stage import registry as stages
from recsys_topk.cli.main import COMMANDS
from recsys_topk.datamodules import registry as datamodules
from recsys_topk.losses.base import registry as losses
from recsys_topk.metrics.mean import registry as metrics
from recsys_topk.operators.base import registry as operators
from recsys_topk.options import options_of
from recsys_topk.registry import Registry
from recsys_topk.runs.config import registry_of
from recsys_topk.runs.parser import make_parser
from tests.datamodules.in_memory import InMemory

FOLDER = Path(__file__).parent / "golden"


def own(registry: Registry[Any]) -> list[str]:
    """Return the names of the package's classes; other tests register classes of their own."""
    return [name for name in registry.available() if registry.resolve(name).__module__.startswith("recsys_topk.")]


def cascades() -> dict[str, CascadeModule]:
    """Return one cascade per kind of stage and optimizer of the tables."""
    schema = InMemory(20, batch_size=4).schema
    made = {}
    for kind in own(stages):
        first = StageConfig("two_tower", "retrieval", 9, {"hidden": [16, 8]})
        options = {"hidden": [16, 8]} if kind in ("two_tower", "mlp", "din") else {}
        for tables in ("same", "rowwise_adagrad"):
            torch.manual_seed(0)
            chain = (first, StageConfig(kind, "ranking", 4, options))
            made[f"{kind} {tables}"] = CascadeModule(schema, stages=chain, k=2, dim=8, embedding_optimizer=tables)
    return made


def state_dicts() -> dict[str, dict[str, list[int]]]:
    return {name: {key: list(value.shape) for key, value in module.state_dict().items()}
            for name, module in cascades().items()}  # fmt: skip


def registries() -> dict[str, list[str]]:
    return {
        "losses": own(losses), "operators": own(operators), "objectives": own(objectives), "stages": own(stages),
        "encoders": own(encoders), "datamodules": own(datamodules), "metrics": own(metrics),
    }  # fmt: skip


def options() -> dict[str, list[str]]:
    keys = make_parser().get_defaults(skip_validation=True)
    assert isinstance(keys, Namespace)
    classes = {f"{key} {name}": registry_of(key).resolve(name)
               for key in ("loss", "objective", "data") for name in own(registry_of(key))}  # fmt: skip
    found = {name: sorted(options_of(cls)) for name, cls in classes.items()}
    return {"commands": sorted(COMMANDS), "fit": sorted(keys.keys()), **found}


def metric_names() -> list[str]:
    module = next(iter(cascades().values()))
    return sorted({f"{split}/{name}" for split, measured in module.metrics.items() for name in measured})


GOLDEN: dict[str, Callable[[], Any]] = {
    "state_dicts": state_dicts, "registries": registries, "options": options, "metrics": metric_names,
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_names_are_those_of_the_golden_file(name: str) -> None:
    assert GOLDEN[name]() == json.loads((FOLDER / f"{name}.json").read_text()), "python -m tests.test_golden"


if __name__ == "__main__":
    for name, make in GOLDEN.items():
        (FOLDER / f"{name}.json").write_text(json.dumps(make(), indent=1) + "\n")
