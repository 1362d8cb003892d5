"""RecFlow with vocabularies gives the batches of dense tables with other ids; unknown ids; caching."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor

from recsys_topk.cascades.module import CascadeModule
from recsys_topk.datamodules.recflow import vocabularies
from recsys_topk.datamodules.recflow.cache import DayCache
from recsys_topk.datamodules.recflow.datamodule import RecFlowDataModule
from recsys_topk.datamodules.recflow.layout import HISTORY_FEATURES, ITEM_IDS, REQUEST_IDS
from recsys_topk.runs.checkpoint import check_schema
from recsys_topk.tabular.schema import Schema

FIELDS = (*REQUEST_IDS, *ITEM_IDS)


@pytest.fixture(scope="module")
def make(world_root: Path, day_cache: DayCache) -> Any:
    def made(**options: Any) -> RecFlowDataModule:
        folder = str(day_cache.folder.parent)
        data = RecFlowDataModule(
            str(world_root), cache_dir=folder, batch_size=64, eval_negatives=5, shuffle=False, **options
        )
        data.prepare_data()
        return data

    return made


def columns(data: RecFlowDataModule, loader: Any, field: str) -> list[Tensor]:
    """Return all ids of a field in the batches of a loader, in order, padding included."""
    found = []
    for batch in loader:
        for part in ("request", "history", "items"):
            at = data.schema.id_columns(part).get(field)  # type: ignore[arg-type]
            if at is not None:
                found.append(getattr(batch, part)[..., at].flatten())
    return found


@pytest.mark.parametrize("minimum", [1, 4])
def test_compact_vocabulary_renumbers_the_dense_ids(make: Any, minimum: int) -> None:
    dense, compact = make(), make(vocabulary=f"compact:min_count={minimum}")
    for field in FIELDS:
        padding = dense.schema.table(field).padding
        shift = 0 if field == "category_level_one" else 1
        # Count each id in the lists, histories and requests of the training days.
        times: dict[int, int] = {}
        for shard in map(dense.shard, dense.splits["train"]):
            day = shard.day
            if field in REQUEST_IDS:
                for i in day.requests[field].tolist():
                    times[i] = times.get(i, 0) + 1
            if field in ITEM_IDS:
                for i, n in zip(day.catalogue[field].tolist(), day.catalogue["count"].tolist(), strict=True):
                    times[i] = times.get(i, 0) + n
            if field in HISTORY_FEATURES:
                seen = day.requests["history"]
                for i in day.stored_views[field][seen[seen >= 0]].tolist():
                    times[i] = times.get(i, 0) + 1
        often = sorted(i for i, n in times.items() if n >= minimum)
        rows = {i: 2 + place for place, i in enumerate(often)}
        assert compact.schema.table(field).rows == 2 + len(often)
        assert compact.vocabularies[field].encode([i - shift for i in often]).tolist() == list(rows.values())
        for split in ("train", "test"):
            before = columns(dense, dense.loader(dense.splits[split], training=split == "train"), field)
            after = columns(compact, compact.loader(compact.splits[split], training=split == "train"), field)
            for old, new in zip(before, after, strict=True):
                assert new.tolist() == [0 if i == padding and i not in times else rows.get(i, 1) for i in old.tolist()]


def test_unknown_ids_of_the_test_day_share_a_row(make: Any) -> None:
    data = make(vocabulary="compact", train_days="2024-01-13", val_days="2024-01-15", test_days="2024-01-16")
    ids = torch.cat(columns(data, data.test_dataloader(), "video_id"))
    assert (ids == 1).any()
    assert ids.max() < data.schema.table("video_id").rows
    batch = data.add_negatives(next(iter(data.test_dataloader())))
    assert batch.items.max() < max(table.rows for table in data.schema.tables)


def test_default_vocabulary_of_small_tables_is_dense(make: Any) -> None:
    assert make().schema == make(vocabulary="dense").schema
    assert all("vocabulary" not in table for table in make().schema.to_dict()["tables"])
    assert make().vocabularies["category_level_one"].padding == 2


def test_vocabulary_can_be_set_per_table(make: Any) -> None:
    data = make(vocabulary={"video_id": "hash:rows=50", "default": "dense"})
    assert data.schema.table("video_id").rows == 50
    assert data.schema.table("user_id") == make().schema.table("user_id")
    batch = next(iter(data.train_dataloader()))
    raw = batch.item_id % (1 << 40)
    assert batch.items[:, 0].tolist() == data.vocabularies["video_id"].encode(raw.numpy()).tolist()


def test_vocabulary_is_built_once_per_set_of_training_days(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make(vocabulary="compact").schema
    monkeypatch.setattr(vocabularies, "_fit", None)
    assert make(vocabulary="compact").schema == first
    with pytest.raises(TypeError):
        _ = make(vocabulary="compact", train_days="2024-01-14:2024-01-15").schema
    monkeypatch.undo()
    other = make(vocabulary="compact", train_days="2024-01-14:2024-01-15").schema
    assert other.table("video_id").vocabulary != first.table("video_id").vocabulary
    assert Schema.from_dict(first.to_dict()) == first


def test_all_days_of_a_stream_have_one_vocabulary(make: Any) -> None:
    data = make(vocabulary="compact")
    assert data.for_day(data.splits["test"][0]).schema == data.schema


def test_checkpoint_of_another_vocabulary_raises(make: Any) -> None:
    one, other = (make(vocabulary="compact", train_days=days) for days in ("2024-01-13", "2024-01-14"))
    saved = {"hyper_parameters": {"schema": one.schema.to_dict()}}
    check_schema("a.ckpt", saved, one.schema)
    with pytest.raises(ValueError, match="trained with another vocabulary of table"):
        check_schema("a.ckpt", saved, other.schema)
    model = CascadeModule(one.schema, dim=4)
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    with pytest.raises(ValueError, match=r"the vocabulary of table .* in the data differs from that of the model"):
        trainer.test(model, other)


def test_vocabulary_of_an_unknown_table_raises(world_root: Path) -> None:
    with pytest.raises(ValueError, match="names table 'video'; there are user_id"):
        RecFlowDataModule(str(world_root), vocabulary={"video": "compact"})
