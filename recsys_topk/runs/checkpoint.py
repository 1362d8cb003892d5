"""What a checkpoint says of the run that wrote it."""

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
    """Return the content of a checkpoint that `TrainingRun.fit` wrote, its tensors mapped, not read."""
    import torch

    check_is_file(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"{str(path)!r} cannot be read: it is damaged, or no checkpoint ({type(error).__name__}); take another, "
            f"e.g. best.ckpt beside it"
        ) from error
    if not isinstance(content, dict) or "stages" not in (content.get("hyper_parameters") or {}):
        raise ValueError(f"{str(path)!r} was not written by `recsys-topk fit`: it describes no cascade")
    parts = {"model": content["hyper_parameters"], "data": content.get("datamodule_hyper_parameters") or {}}
    inspect_config(parts, f"checkpoint {str(path)!r}", recall(path))
    return content


def check_is_file(path: str | Path) -> None:
    """Raise if a checkpoint is not a local file."""
    if "://" in str(path):  # a `Path` takes it for a local file, Lightning downloads it
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
    """Return lines saying what a checkpoint restores."""
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
    """Raise if a checkpoint was trained on other features than the data have.

    Args:
        path: The checkpoint.
        content: What it holds.
        schema: The features of the data.
    """
    then = Schema.from_dict(content["hyper_parameters"]["schema"]).to_dict()
    now = schema.to_dict()
    if then == now:
        return
    name = _other_vocabulary(then, now)
    if name is not None:
        raise ValueError(
            f"the checkpoint {str(path)!r} was trained with another vocabulary of table {name} than that of the data; "
            f"give the data and options it was trained with (RecFlow: --data.train_days and --data.vocabulary). If "
            f"your own tables have changed since, --data.features FOLDER takes the encoder that was fitted then: the "
            f"folder features of the prepared data"
        )
    rows = [{table["name"]: table["rows"] for table in part["tables"]} for part in (then, now)]
    name = next((name for name in {**rows[0], **rows[1]} if rows[0].get(name) != rows[1].get(name)), None)
    if name is not None:
        found = [f"{part[name]} rows" if name in part else "no such table" for part in rows]
        what = f"its table {name} has {found[0]}, and the data's {found[1]}"
    else:
        what = f"{', '.join(key for key in now if then.get(key) != now[key])} differ"
    raise ValueError(
        f"the checkpoint {str(path)!r} was trained on other data than these: {what}; give the data it was trained on "
        f"(--data.root)"
    )


def _other_vocabulary(then: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return the first table of both schemas whose vocabulary differs, or None."""
    found = [{table["name"]: table.get("vocabulary") for table in part["tables"]} for part in (then, now)]
    return next((name for name, own in found[0].items() if name in found[1] and found[1][name] != own), None)


def _data(saved: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in data_spec(saved).items() if key != "left_out"}


def _short(spec: Mapping[str, Any]) -> str:
    left_out = ("positive_above", "reduction", "validate")
    given = {name: value for name, value in spec["init_args"].items() if name not in left_out and value is not None}
    arguments = ", ".join(f"{name}={value}" for name, value in given.items())
    return f"{str(spec['class_path']).rpartition('.')[2]}({arguments})"
