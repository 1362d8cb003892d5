"""An untrained export of any size with random weights, items and users, for `recsys-topk bench serve`."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import torch

from recsys_topk.cascades.features import FeatureEmbedding
from recsys_topk.cascades.stage import Stage
from recsys_topk.cascades.stages import MLPStage, TwoTower
from recsys_topk.serving.export import models_of, write_stage
from recsys_topk.serving.index import FACTS
from recsys_topk.serving.manifest import read_manifest, write_manifest
from recsys_topk.tabular.export_tables import ITEMS, USERS, ItemTable, UserTable
from recsys_topk.tabular.schema import Feature, Schema, Table

QUOTAS = (200, 30)
VIEWS = 20


def make_export(folder: Path, items: int, users: int, seed: int = 0) -> None:
    """Write an export of two stages, two_tower and mlp, with quotas 200 and 30."""
    topics = 64
    schema = Schema(
        (Table("user", users + 1), Table("video", items + 1), Table("topic", topics + 1)),
        (Feature("user", "user"),),
        (Feature("video", "video"), Feature("topic", "topic")),
        (Feature("video", "video"), Feature("topic", "topic")),
    )
    torch.manual_seed(seed)
    generator = np.random.default_rng(seed)
    folder.mkdir()
    entries = []
    stages: list[tuple[str, type[Stage]]] = [("retrieval", TwoTower), ("ranking", MLPStage)]
    for (name, kind), quota in zip(stages, QUOTAS, strict=True):
        stage = kind(FeatureEmbedding(schema, dim=8)).eval()
        entries.append(write_stage(folder, name, kind.name, quota, models_of(stage, schema), programs=False))
    ids = np.stack([np.arange(1, items + 1), generator.integers(1, topics + 1, items)], axis=1).astype(np.int32)
    counted = np.ones(items, dtype=np.int64)
    ItemTable(np.arange(items), ids, np.empty((items, 0), dtype=np.float32), counted).write(folder / ITEMS)
    seen = generator.integers(0, items, (users, VIEWS))
    UserTable(
        names=np.arange(users),
        request=np.arange(1, users + 1, dtype=np.int32)[:, None],
        request_values=np.empty((users, 0), dtype=np.float32),
        history=ids[seen],
        history_length=np.full(users, VIEWS),
        history_values=np.empty((users, VIEWS, 0), dtype=np.float32),
        seen=seen.reshape(-1),
        seen_ends=np.arange(1, users + 1) * VIEWS,
    ).write(folder / USERS)
    write_manifest(folder, schema, tuple(entries), 10, {"views": VIEWS})


def republish(export: Path, index: Path, target: Path) -> tuple[Path, Path]:
    """Return copies of an export and its index with a new identity. Large files are hard links."""
    other, other_index = target / "export-2", target / "index-2"
    for source, made in ((export, other), (index, other_index)):
        shutil.copytree(source, made, copy_function=os.link)
    manifest = read_manifest(other, verify=False)
    fresh = write_manifest(other, manifest.schema, manifest.stages, manifest.k + 1, manifest.facts)
    facts = json.loads((index / FACTS).read_text(encoding="utf-8"))
    (other_index / FACTS).unlink()
    (other_index / FACTS).write_text(json.dumps({**facts, "export": fresh.identity}), encoding="utf-8")
    return other, other_index
