"""Convert the constructor arguments of a data module to plain values, as stored in checkpoints, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, Final

from recsys_topk.options import options_of
from recsys_topk.spec import Recorded

CLASS_PATH: Final = "class_path"
LEFT_OUT: Final = "left_out"

_VERSION_0_1: Final = "recsys_topk.datamodules.recflow.datamodule.RecFlowDataModule"
"""The class of hyper-parameters without a class path."""


class _NotPlainError(Exception):
    """Raised for a value that cannot be converted to plain values."""


def hyper_parameters(built: Recorded) -> dict[str, Any]:
    """Return the class path and the constructor arguments of an object, including defaults, as plain values.

    Dataclasses become dicts, paths become strings, tuples become lists. Arguments that cannot be converted (tensors,
    data frames) are listed by name under ``"left_out"``. A checkpoint therefore loads with ``weights_only=True``.
    """
    cls = type(built)
    arguments = dict(built._arguments)
    for name, parameter in options_of(cls).items():
        if parameter.default is not parameter.empty:
            arguments.setdefault(name, parameter.default)
    taken = {CLASS_PATH, LEFT_OUT} & set(arguments)
    if taken:
        raise TypeError(f"{cls.__name__} has an argument {taken.pop()!r}, which the hyper-parameters need; rename it")
    saved: dict[str, Any] = {CLASS_PATH: f"{cls.__module__}.{cls.__qualname__}"}
    left_out = []
    for name, value in arguments.items():
        try:
            saved[name] = _plain(value)
        except _NotPlainError:
            left_out.append(name)
    return {**saved, LEFT_OUT: left_out} if left_out else saved


def data_spec(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``{"class_path", "init_args", "left_out"}`` from the hyper-parameters of a data module in a checkpoint.

    Example:
        >>> data_spec({"class_path": "my.Data", "batch_size": 8})
        {'class_path': 'my.Data', 'init_args': {'batch_size': 8}, 'left_out': []}
        >>> data_spec({"batch_size": 8})["class_path"].rpartition(".")[2]  # written by version 0.1
        'RecFlowDataModule'
    """
    arguments = {name: value for name, value in saved.items() if name not in (CLASS_PATH, LEFT_OUT)}
    path = str(saved.get(CLASS_PATH, _VERSION_0_1))
    return {CLASS_PATH: path, "init_args": arguments, LEFT_OUT: list(saved.get(LEFT_OUT, ()))}


def _plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Path):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    raise _NotPlainError
