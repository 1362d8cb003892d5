"""Checkpoints of a run: reading, the config in them, and the comparison with the data."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recsys_topk.datamodules import Schema, data_spec
from recsys_topk.text import printable
from recsys_topk.trust.documents import inspect_config
from recsys_topk.trust.own_runs import recall


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Return the content of a checkpoint of `TrainingRun.fit`; its tensors are memory-mapped."""
    import torch

    check_is_file(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"{str(path)!r} cannot be read: it is damaged, or no checkpoint ({type(error).__name__}); use another one, "
            f"e.g. best.ckpt of the same run"
        ) from error
    if not isinstance(content, dict) or "stages" not in (content.get("hyper_parameters") or {}):
        raise ValueError(f"{str(path)!r} was not written by `recsys-topk fit`: it describes no cascade")
    parts = {"model": content["hyper_parameters"], "data": content.get("datamodule_hyper_parameters") or {}}
    inspect_config(parts, f"checkpoint {str(path)!r}", recall(path))
    return content


def check_is_file(path: str | Path) -> None:
    """Raise if a checkpoint is not a local file."""
    if "://" in str(path):  # Lightning would download it
        raise ValueError(f"the checkpoint {str(path)!r} is a URL; download it and give the local file")
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"no checkpoint {str(path)!r}; give the path of a .ckpt file written by `recsys-topk fit`"
        )


def config_from_checkpoint(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model and the data of a checkpoint as a config."""
    model = {name: value for name, value in content["hyper_parameters"].items() if name != "schema"}
    saved = content.get("datamodule_hyper_parameters")
    return {"model": model, **({"data": _data(saved)} if saved else {})}


def describe_checkpoint(path: str | Path, content: Mapping[str, Any]) -> list[str]:
    """Return lines that describe the model and the data of a checkpoint."""
    model = content["hyper_parameters"]
    data = _data(content.get("datamodule_hyper_parameters") or {})["init_args"]
    stages = ", ".join(f"{stage['name']} ({stage['kind']}, {stage['quota']})" for stage in model["stages"])
    lines = [
        f"restored from {path}:",
        f"  loss       {_short(model['loss'])}",
        f"  objective  {_short(model['objective'])}",
        f"  stages     {stages}",
    ]
    if data:
        shown = ", ".join(f"{name}={value}" for name, value in data.items() if isinstance(value, (int, str, float)))
        lines.append(f"  data       {shown}")
    return [printable(line) for line in lines]


def check_schema(path: str | Path, content: Mapping[str, Any], schema: Schema) -> None:
    """Raise if a checkpoint was trained on other features than those of the data."""
    trained_on = Schema.from_dict(content["hyper_parameters"]["schema"])
    if trained_on == schema:
        return
    saved, current = trained_on.to_dict(), schema.to_dict()
    before, after = ({table["name"]: table for table in part["tables"]} for part in (saved, current))
    for name in (name for name in before if name in after):
        if before[name].get("vocabulary") != after[name].get("vocabulary"):
            raise ValueError(
                f"the checkpoint {str(path)!r} was trained with another vocabulary of table {name} than that of the "
                f"data; give the data and options of its training (RecFlow: --data.train_days and --data.vocabulary). "
                f"If your own tables have changed since, give the encoder of its training: --data.features FOLDER, the "
                f"folder `features` of the prepared data"
            )
    name = next((name for name in {**before, **after} if _rows(before, name) != _rows(after, name)), None)
    if name is not None:
        difference = f"its table {name} has {_rows(before, name)}, and the data's {_rows(after, name)}"
    else:
        difference = f"{', '.join(key for key in current if saved.get(key) != current[key])} differ"
    raise ValueError(
        f"the checkpoint {str(path)!r} was trained on other data: {difference}; give the data of its training "
        f"(--data.root)"
    )


def _rows(tables: Mapping[str, Any], name: str) -> str:
    return f"{tables[name]['rows']} rows" if name in tables else "no such table"


def _data(saved: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in data_spec(saved).items() if key != "left_out"}


def _short(spec: Mapping[str, Any]) -> str:
    left_out = ("positive_above", "reduction", "validate")
    given = {name: value for name, value in spec["init_args"].items() if name not in left_out and value is not None}
    arguments = ", ".join(f"{name}={value}" for name, value in given.items())
    return f"{str(spec['class_path']).rpartition('.')[2]}({arguments})"
