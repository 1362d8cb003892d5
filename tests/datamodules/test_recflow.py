from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hand_made import SMALL
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from recsys_topk.datamodules import DayStream
from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.datamodules.recflow.datamodule import RecFlowDataModule
from recsys_topk.datamodules.simulator.simulation import simulate
from recsys_topk.tabular.schema import Schema


@pytest.fixture
def make(world_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    def build(**options: Any) -> RecFlowDataModule:
        cache = str(tmp_path_factory.getbasetemp() / "shared-cache")
        data = RecFlowDataModule(root=str(world_root), cache_dir=cache, **{"batch_size": 32, **options})
        data.prepare_data()
        return data

    return build


class Recorder(LightningModule):
    """Learns nothing, and records its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: dict[str, list[CascadeBatch]] = {"train": [], "val": [], "test": [], "predict": []}

    def training_step(self, batch: CascadeBatch, batch_idx: int) -> Tensor:
        self.seen["train"].append(batch)
        return self.weight * batch.labels.mean()

    def validation_step(self, batch: CascadeBatch, batch_idx: int) -> None:
        self.seen["val"].append(batch)

    def test_step(self, batch: CascadeBatch, batch_idx: int) -> None:
        self.seen["test"].append(batch)

    def predict_step(self, batch: CascadeBatch, batch_idx: int) -> None:
        self.seen["predict"].append(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def trainer(root: Path, **options: Any) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return Trainer(accelerator="cpu", default_root_dir=root, num_sanity_val_steps=0, **{**quiet, **options})


def fingerprint(batch: CascadeBatch) -> tuple[Any, ...]:
    return batch.request_id.tolist(), batch.item_id[batch.candidates].tolist(), batch.mask.tolist()


def test_schema_is_known_before_preparation(world_root: Path, tmp_path: Path) -> None:
    data = RecFlowDataModule(root=str(world_root), cache_dir=str(tmp_path), layout="three-stage")
    schema = data.schema
    assert list(tmp_path.iterdir()) == []
    names = [" ".join(feature.name for feature in features) for features in (schema.request, schema.items)]
    assert names == [
        "weekday hour minute user_id device_id gender age province",
        "video_id author_id category_level_two category_level_one upload_type upload_weekday upload_hour upload_minute",
    ]
    assert [f.table for f in schema.items[5:]] == [f.table for f in schema.request[:3]] == ["weekday", "hour", "minute"]
    assert schema.history == schema.items[:5]
    assert schema.groups == ("rerank_pos", "rerank_neg", "rank_neg", "coarse_neg", "prerank_neg")
    assert schema.positive_above == 8
    assert schema.table("user_id").rows == SMALL.users + 2
    assert Schema.from_dict(schema.to_dict()) == schema
    assert RecFlowDataModule(root=str(world_root)).schema.positive_above == 7


def test_ids_fit_their_tables(make: Any) -> None:
    data = make(eval_negatives=20)
    schema = data.schema
    for batch in map(data.add_negatives, data.test_dataloader()):
        for features, ids in (
            (schema.request, batch.request),
            (schema.items, batch.items),
            (schema.history, batch.history),
        ):
            for column, feature in enumerate(features):
                values = ids[..., column]
                assert values.min() >= 0
                assert values.max() < schema.table(feature.table).rows


def test_days_follow_the_default_or_the_options(make: Any) -> None:
    days = ("2024-01-13", "2024-01-14", "2024-01-15", "2024-01-16")
    assert make().splits == {"train": days[:2], "val": days[2:3], "test": days[3:]}
    chosen = make(train_days="2024-01-14:2024-01-15", val_days="2024-01-16", test_days="2024-01-13").splits
    assert chosen == {"train": days[1:3], "val": days[3:], "test": days[:1]}
    with pytest.raises(ValueError, match="test_days='2024-02-04' asks for 2024-02-04"):
        make(test_days="2024-02-04")


def test_too_few_days_to_split_raise(tmp_path: Path) -> None:
    root = simulate(tmp_path / "world", replace(SMALL, days=2, requests=20))
    with pytest.raises(ValueError, match="hold 2024-01-13 and 2024-01-14, too few to set apart"):
        _ = RecFlowDataModule(root=str(root)).splits
    first, last = "2024-01-13", "2024-01-14"
    chosen = RecFlowDataModule(root=str(root), train_days=first, val_days=last, test_days=last)
    assert chosen.splits == {"train": (first,), "val": (last,), "test": (last,)}


def test_trainer_gets_every_request_with_its_negatives(make: Any, tmp_path: Path) -> None:
    data, model = make(train_negatives=5, eval_negatives=30), Recorder()
    run = trainer(tmp_path, max_epochs=2)
    run.fit(model, data)
    run.test(model, data, verbose=False)
    run.predict(model, data, return_predictions=False)
    assert [len(model.seen[stage]) for stage in ("train", "val", "test", "predict")] == [20, 10, 5, 5]
    assert {batch.candidates.shape[1] for batch in model.seen["train"]} == {45}
    assert {batch.candidates.shape[1] for batch in model.seen["val"] + model.seen["test"]} == {70}
    for batch in model.seen["train"] + model.seen["test"]:
        assert type(batch) is CascadeBatch
        sampled = batch.group == 4
        assert sampled[:, 40:].eq(batch.mask[:, 40:]).all()
        assert not sampled[:, :40].any()
        assert batch.labels[sampled].eq(0).all()
    train = model.seen["train"]
    epochs = [sorted(i for b in part for i in b.request_id.tolist()) for part in (train[:10], train[10:])]
    assert epochs[0] == epochs[1]
    assert [fingerprint(b) for b in model.seen["val"][:5]] == [fingerprint(b) for b in model.seen["val"][5:]]
    assert [fingerprint(b) for b in model.seen["test"]] == [fingerprint(b) for b in model.seen["predict"]]
    assert 0 < data.rejection_rate(training=False) < 0.5


def negatives_by_request(data: RecFlowDataModule) -> dict[int, list[int]]:
    found = {}
    for batch in map(data.add_negatives, data.test_dataloader()):
        for request, row in zip(
            batch.request_id.tolist(), batch.item_id[batch.candidates[:, 40:]].tolist(), strict=True
        ):
            found[request] = row
    return found


def test_evaluation_negatives_do_not_depend_on_batching(make: Any) -> None:
    expected = negatives_by_request(make(eval_negatives=40))
    assert len(expected) == 150
    assert negatives_by_request(make(eval_negatives=40, eval_batch_size=7)) == expected
    assert negatives_by_request(make(eval_negatives=40, eval_batch_size=150, num_workers=2)) == expected
    assert negatives_by_request(make(eval_negatives=40, seed=1)) != expected
    catalogue = set(make().cache.open("2024-01-16").catalogue["item_id"].tolist())
    assert {item for row in expected.values() for item in row} <= catalogue


@pytest.mark.parametrize("source", ["in_batch", "uniform", "popularity"])
def test_training_negatives_change_with_the_epoch_and_repeat_with_the_seed(make: Any, source: str) -> None:
    def draw(data: RecFlowDataModule) -> list[list[Any]]:
        loader = data.train_dataloader()
        return [[fingerprint(data.add_negatives(batch)) for batch in loader] for _ in range(2)]

    first = draw(make(train_negatives=8, negative_source=source, shuffle=False))
    assert first == draw(make(train_negatives=8, negative_source=source, shuffle=False))
    assert [batch[0] for batch in first[0]] == [batch[0] for batch in first[1]]
    assert first[0] != first[1]


@pytest.mark.parametrize("every", [3, 7, 10])
def test_training_resumes_at_the_exact_batch(make: Any, tmp_path: Path, every: int) -> None:
    options = {"train_negatives": 4, "num_workers": 0}
    whole = Recorder()
    trainer(tmp_path / "whole", max_epochs=2, limit_val_batches=0).fit(whole, make(**options))
    expected = [fingerprint(batch) for batch in whole.seen["train"]]
    assert len(expected) == 20
    saver = ModelCheckpoint(dirpath=tmp_path / "part", every_n_train_steps=every, save_top_k=-1, filename="{step}")
    part = Recorder()
    trainer(tmp_path / "part", max_steps=every, limit_val_batches=0, callbacks=[saver]).fit(part, make(**options))
    assert [fingerprint(batch) for batch in part.seen["train"]] == expected[:every]
    rest = Recorder()
    trainer(tmp_path / "rest", max_epochs=2, limit_val_batches=0).fit(
        rest, make(**options), ckpt_path=tmp_path / "part" / f"step={every}.ckpt", weights_only=True
    )
    assert [fingerprint(batch) for batch in rest.seen["train"]] == expected[every:]


def test_state_resumes_without_a_trainer(make: Any) -> None:
    data = make()
    stream = iter(data.train_dataloader())
    for _ in range(6):
        next(stream)
    state = data.state_dict()
    assert state == {"seed": 42, "epoch": 0, "shard": "2024-01-14", "offset": 32, "global_batch": 32}
    left = [batch.request_id.tolist() for batch in stream]
    other = make()
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert [batch.request_id.tolist() for batch in other.train_dataloader()] == left


def test_stream_tests_a_day_before_training_on_it(make: Any) -> None:
    data = make(eval_negatives=10, train_negatives=2)
    steps = list(DayStream(data))
    assert [step.day for step in steps] == list(data.cache.files.days)
    assert steps[0].test is None
    for step in steps[1:]:
        assert step.test is not None
        tested = [data.add_negatives(batch) for batch in step.test]
        trained = [data.add_negatives(batch) for batch in step.train]
        assert {batch.candidates.shape[1] for batch in tested} == {50}
        assert {batch.candidates.shape[1] for batch in trained} == {42}
        ids = [sorted(i for batch in part for i in batch.request_id.tolist()) for part in (tested, trained)]
        assert ids[0] == ids[1]
        assert len(ids[0]) == 150
        assert step.data.splits == dict.fromkeys(("train", "val", "test"), (step.day,))
    late = DayStream(data, begin="2024-01-15")
    assert [(step.day, step.test is None) for step in late] == [("2024-01-15", False), ("2024-01-16", False)]
    assert len(late) == 2
    with pytest.raises(ValueError, match="begin is 2025-01-01; choose one of them"):
        DayStream(data, begin="2025-01-01")


def test_stream_works_with_a_trainer(make: Any, tmp_path: Path) -> None:
    data = make(eval_negatives=10, train_negatives=2)
    for step in DayStream(data, begin="2024-01-15"):
        model = Recorder()
        run = trainer(tmp_path, max_epochs=1, limit_val_batches=0, enable_checkpointing=False)
        run.test(model, step.data, verbose=False)
        run.fit(model, step.data)
        assert {batch.candidates.shape[1] for batch in model.seen["test"]} == {50}
        assert {batch.candidates.shape[1] for batch in model.seen["train"]} == {42}
        known = set(data.cache.open(step.day).requests["request_id"].tolist())
        for stage in ("test", "train"):
            assert {i for batch in model.seen[stage] for i in batch.request_id.tolist()} == known
    assert data.trainer is None


def test_world_is_simulated_once_if_no_root_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setenv("RECSYS_TOPK_CACHE", str(tmp_path))
    with caplog.at_level("INFO"):
        data = RecFlowDataModule(world=SMALL)
        assert data.schema.table("video_id").rows == SMALL.items + 2
        data.prepare_data()
        first = [record.getMessage() for record in caplog.records]
        RecFlowDataModule(world=SMALL).prepare_data()
    assert [record.getMessage() for record in caplog.records] == first
    assert any("no data.root given: simulating 4 days of 150 requests" in line for line in first)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checked.json", "prepared", "worlds"]
    assert len([path for path in (tmp_path / "worlds").iterdir() if path.is_dir()]) == 1


def test_invalid_options_raise(world_root: Path) -> None:
    with pytest.raises(ValueError, match="unknown layout 'four-stage'; available: two-stage, three-stage"):
        RecFlowDataModule(root=str(world_root), layout="four-stage")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="eval_negatives must not be negative, got -1"):
        RecFlowDataModule(root=str(world_root), eval_negatives=-1)
    with pytest.raises(ValueError, match="history_length must be at least 1, got 0"):
        RecFlowDataModule(root=str(world_root), history_length=0)
    with pytest.raises(FileNotFoundError, match=r"day 2024-01-13 is not prepared .* call prepare_data"):
        RecFlowDataModule(root=str(world_root), cache_dir="/nonexistent").train_dataloader()


_IMPORT = """
import sys
import recsys_topk.datamodules.batch, recsys_topk.tabular.schema
print([m for m in ("lightning", "datasets", "pyarrow", "torchrec") if m in sys.modules])
"""


def test_batch_and_schema_need_only_torch() -> None:
    found = subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
