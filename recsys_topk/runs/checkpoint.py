"""Checkpoints of a run: reading, the config in them, and the comparison with the data."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

from recsys_topk.datamodules import Schema, data_spec
from recsys_topk.files import DamagedError, check_once, check_zip
from recsys_topk.text import printable
from recsys_topk.trust.documents import inspect_config
from recsys_topk.trust.own_runs import recall


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Return the content of a checkpoint of `TrainingRun.fit`; its tensors are read when they are used."""
    from recsys_topk.cascades.shards import ShardsError, load_stored

    check_is_file(path)
    try:
        check_once([Path(path)], check_zip)
        content = load_stored(path)
    except ShardsError:
        raise
    except DamagedError as error:
        raise DamagedError(f"{error}; {_another(Path(path))}") from error
    except (RuntimeError, EOFError, ValueError, KeyError, MemoryError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"{str(path)!r} cannot be read: it is damaged, or no checkpoint ({type(error).__name__}); "
            f"{_another(Path(path))}"
        ) from error
    names = {"model": "hyper_parameters", "data": "datamodule_hyper_parameters", "weights": "state_dict"}
    parts = {part: content.get(name) or {} for part, name in names.items()} if isinstance(content, dict) else {}
    if "stages" not in parts.get("model", ()) or not all(isinstance(part, Mapping) for part in parts.values()):
        raise ValueError(f"{str(path)!r} was not written by `recsys-topk fit`: it describes no cascade")
    del parts["weights"]
    inspect_config(parts, f"checkpoint {str(path)!r}", recall(path))
    return content


def _another(path: Path) -> str:
    """Return advice that names the newest whole checkpoint beside a damaged one."""
    for other in sorted(path.parent.glob("*.ckpt"), key=lambda file: -file.stat().st_mtime_ns):
        with suppress(DamagedError):
            if other != path:
                check_once([other], check_zip)
                return f"use {str(other)!r}, the newest whole checkpoint there"
    return "there is no other whole checkpoint in its folder; use a copy, or train again"


def check_is_file(path: str | Path) -> None:
    """Raise if a checkpoint is not a local file."""
    if "://" in str(path):  # Lightning would download it
        raise ValueError(f"the checkpoint {str(path)!r} is a URL; download it and give the local file")
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"no checkpoint {str(path)!r}; give the path of a .ckpt file written by `recsys-topk fit`"
        )


@contextmanager
def hiding_content(data: Mapping[str, Any]) -> Iterator[None]:
    """Raise errors without words from the files that a checkpoint names as its data, which may be any files.

    Args:
        data: The options of the data in the checkpoint; empty if the user named the data.
    """
    try:
        yield
    except ValueError as error:
        own = str(error).startswith("the checkpoint ")  # of `check_schema`
        for path in () if own else _files(data):
            with path.open("rb") as file:
                words = re.findall(r"[^\s,;|\"']{3,}", file.read(1 << 16).decode("utf-8", "replace"))
            shown = str(error).replace(str(path), "")
            if any(word in shown for word in words):
                raise ValueError(
                    f"the data that the checkpoint names cannot be read ({path}, {type(error).__name__}); name them "
                    f"yourself (--data.root) to see why"
                ) from None
        raise


def _files(options: Any) -> Iterator[Path]:
    """Yield the existing files among options, and those in existing folders."""
    if isinstance(options, (Mapping, list, tuple)):
        for inner in options.values() if isinstance(options, Mapping) else options:
            yield from _files(inner)
    elif isinstance(options, str) and 0 < len(options) < 1024 and "\0" not in options:
        path = Path(options).expanduser()
        found = [path, *islice(path.iterdir(), 100)] if path.is_dir() else [path]
        yield from (file for file in found if file.is_file() and os.access(file, os.R_OK))


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


@contextmanager
def weights_fit() -> Iterator[None]:
    """Raise one line if the weights of a checkpoint do not fit the model."""
    try:
        yield
    except RuntimeError as error:
        if "loading state_dict" not in str(error):
            raise
        first = " ".join(str(error).split("\n\t")[1:2])
        raise ValueError(
            f"the checkpoint's weights do not fit this model; give the options it was trained with. {first}"
        ) from error
