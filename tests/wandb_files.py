"""Reads the files of an offline W&B run. The format is not public, so only tests may use this."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

BLOCK = 32768


def records(path: Path) -> list[Any]:
    """Return the records of a .wandb file: a LevelDB log of protocol-buffer messages."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    found, parts, position = [], b"", 7
    while position + 7 <= len(data):
        left = BLOCK - position % BLOCK
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        if kind == 0 and length == 0:
            break
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            found.append(record)
            parts = b""
    return found


def config(found: list[Any]) -> dict[str, Any]:
    """Return the run's config."""
    values: dict[str, Any] = {}
    for record in found:
        updates = [*record.config.update, *record.run.config.update]
        values |= {update.key: json.loads(update.value_json) for update in updates}
    return values


def history(found: list[Any]) -> list[dict[str, Any]]:
    """Return the logged rows."""
    rows = []
    for record in found:
        if record.HasField("history"):
            names = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows.append(names)
    return rows


def summary(found: list[Any]) -> dict[str, Any]:
    """Return the final summary of the run."""
    values: dict[str, Any] = {}
    for record in found:
        for item in record.summary.update:
            *path, last = list(item.nested_key) or [item.key]
            inside = values
            for key in path:
                inside = inside.setdefault(key, {})
            inside[last] = json.loads(item.value_json)
    return values


def metric_definitions(found: list[Any]) -> dict[str, Any]:
    """Return the metrics that `define_metric` was called with, by name or glob."""
    return {r.metric.name or r.metric.glob_name: r.metric for r in found if r.HasField("metric")}


def artifacts(found: list[Any]) -> list[Any]:
    """Return the artifacts that were logged."""
    return [record.request.log_artifact.artifact for record in found if record.request.HasField("log_artifact")] + [
        record.artifact for record in found if record.HasField("artifact")
    ]
