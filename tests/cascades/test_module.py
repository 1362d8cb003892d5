"""The LightningModule under a real Trainer, on small random batches."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from recsys_topk.callbacks.predictions import PredictionWriter
from recsys_topk.cascades.module import CascadeModule
from recsys_topk.cascades.stage import StageConfig
from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.losses import DFTopKLoss
from tests.cascades.batches import random_batch, recflow_like_schema

SCHEMA = recflow_like_schema()
STAGES = [StageConfig("two_tower", "retrieval", 8), StageConfig("din", "ranking", 5)]


def batches(number: int, seed: int = 0) -> DataLoader[CascadeBatch]:
    made = [random_batch(SCHEMA, size=16, seed=seed + i) for i in range(number)]
    return DataLoader(made, batch_size=None)  # type: ignore[arg-type]


def module(**options: object) -> CascadeModule:
    torch.manual_seed(0)
    return CascadeModule(SCHEMA, STAGES, k=3, **options)  # type: ignore[arg-type]


def trainer(folder: Path, **options: object) -> pl.Trainer:
    settings = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_progress_bar": False,
                "enable_model_summary": False, "enable_checkpointing": False, "num_sanity_val_steps": 0}  # fmt: skip
    return pl.Trainer(default_root_dir=folder, **{**settings, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("embedding_optimizer", ["same", "rowwise_adagrad", "adagrad", "sgd"])
def test_training_lowers_the_objective(tmp_path: Path, embedding_optimizer: str) -> None:
    model = module(embedding_optimizer=embedding_optimizer)
    data = batches(4)
    before = sum(model.compute_objective(batch).total.item() for batch in data)
    trainer(tmp_path, max_epochs=15).fit(model, data)
    after = sum(model.compute_objective(batch).total.item() for batch in data)
    assert after < 0.6 * before


@pytest.mark.parametrize("warmup_steps", [0, 3])
def test_fused_sgd_equals_ordinary_sgd(tmp_path: Path, warmup_steps: int) -> None:
    """With a schedule too: the tables must see the learning rate of the step, not of the one before."""
    ordinary = module(optimizer="sgd", lr=0.05, warmup_steps=warmup_steps)
    fused = module(optimizer="sgd", lr=0.05, embedding_optimizer="sgd", warmup_steps=warmup_steps)
    fused.load_state_dict(ordinary.state_dict())
    for model in (ordinary, fused):
        trainer(tmp_path).fit(model, batches(5))
    for (name, one), two in zip(ordinary.state_dict().items(), fused.state_dict().values(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("embedding_optimizer", ["same", "rowwise_adagrad"])
def test_interrupted_and_resumed_training_ends_at_the_same_weights(tmp_path: Path, embedding_optimizer: str) -> None:
    """The warm-up goes on after the interruption: a schedule that had lost its optimizer would show."""
    whole = module(embedding_optimizer=embedding_optimizer, warmup_steps=6)
    trainer(tmp_path, max_epochs=2).fit(whole, batches(3))
    first = module(embedding_optimizer=embedding_optimizer, warmup_steps=6)
    run = trainer(tmp_path, max_epochs=1)
    run.fit(first, batches(3))
    run.save_checkpoint(tmp_path / "half.ckpt")
    second = module(embedding_optimizer=embedding_optimizer, warmup_steps=6)
    trainer(tmp_path, max_epochs=2).fit(second, batches(3), ckpt_path=tmp_path / "half.ckpt")
    for (name, one), two in zip(whole.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(one, two), name


def test_checkpoint_loads_weights_only_and_rebuilds_everything(tmp_path: Path) -> None:
    model = CascadeModule(SCHEMA, STAGES, DFTopKLoss(tau=2.5), {"class_path":
        "recsys_topk.cascades.objectives.joint.JointObjective", "init_args": {"stage_k": "quota"}}, k=3)  # fmt: skip
    run = trainer(tmp_path)
    run.fit(model, batches(1))
    run.save_checkpoint(tmp_path / "model.ckpt")
    plain = torch.load(tmp_path / "model.ckpt", weights_only=True)
    assert plain["hyper_parameters"]["loss"]["init_args"] == {"tau": 2.5}
    again = CascadeModule.load_from_checkpoint(tmp_path / "model.ckpt", weights_only=True)
    assert again.schema == SCHEMA
    assert again.loss.operator.tau == 2.5
    assert again.loss.positive_above == SCHEMA.positive_above == 7.0
    assert again.objective.stage_k == "quota"
    batch = random_batch(SCHEMA, seed=9)
    with torch.no_grad():
        for one, two in zip(model(batch), again(batch), strict=True):
            assert torch.equal(one, two)


def test_evaluation_logs_joint_and_single_recalls(tmp_path: Path) -> None:
    model = module()
    run = trainer(tmp_path)
    results = {**run.validate(model, batches(2), verbose=False)[0], **run.test(model, batches(2), verbose=False)[0]}
    assert set(results) == {
        "val/joint_recall@3@5", "val/retrieval_recall@3@8", "val/ranking_recall@3@5",
        "test/joint_recall@3@5/12", "test/retrieval_recall@3@8/12", "test/ranking_recall@3@5/12",
    }  # fmt: skip
    assert results["val/joint_recall@3@5"] == results["test/joint_recall@3@5/12"]
    assert results["val/joint_recall@3@5"] == pytest.approx(brute_force_joint_recall(model, batches(2)), abs=1e-6)


def brute_force_joint_recall(model: CascadeModule, data: DataLoader[CascadeBatch]) -> float:
    values = []
    for batch in data:
        with torch.no_grad():
            first, last = model(batch)
        for b in range(batch.size):
            valid = [n for n in range(batch.mask.shape[1]) if batch.mask[b, n]]
            positives = [n for n in valid if batch.labels[b, n] > 7]
            boundary = sorted((float(batch.labels[b, n]) for n in positives), reverse=True)[:3][-1]
            kept = sorted(valid, key=lambda n: -float(first[b, n]))[:8]
            kept = sorted(kept, key=lambda n: -float(last[b, n]))[:5]
            wanted = min(3, len(positives))
            above = [n for n in positives if batch.labels[b, n] > boundary]
            level = [n for n in positives if batch.labels[b, n] == boundary]
            hits = len(set(above) & set(kept)) + min(len(set(level) & set(kept)), wanted - len(above))
            values.append(hits / wanted)
    return sum(values) / len(values)


def test_predictions_are_whole_and_consistent(tmp_path: Path) -> None:
    model = module()
    run = trainer(tmp_path, callbacks=[PredictionWriter(tmp_path / "out" / "predictions.parquet")])
    run.predict(model, batches(2), return_predictions=False)
    rows = pq.read_table(tmp_path / "out" / "predictions.parquet").to_pydict()
    assert list(rows) == ["request_id", "item_id", "score_retrieval", "score_ranking", "kept", "rank"]
    assert len(rows["kept"]) == sum(int(batch.mask.sum()) for batch in batches(2))
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["predictions.parquet"]
    batch = next(iter(batches(1)))
    with torch.no_grad():
        last = model(batch)[1]
    position = 0
    for b in range(batch.size):
        count = int(batch.mask[b].sum())
        part = {name: column[position : position + count] for name, column in rows.items()}
        assert sum(part["kept"]) == min(5, count)
        order = sorted((rank, score) for rank, score in zip(part["rank"], part["score_ranking"], strict=True) if rank)
        assert [rank for rank, _ in order] == list(range(1, min(5, count) + 1))
        assert [score for _, score in order] == sorted((s for _, s in order), reverse=True)
        torch.testing.assert_close(torch.tensor(part["score_ranking"]), last[b][batch.mask[b]])
        position += count


@pytest.mark.parametrize(
    ("options", "message"),
    [({"accumulate_grad_batches": 2}, "accumulated"), ({"gradient_clip_val": 1.0}, "clipping would not reach")],
)
def test_what_fused_tables_cannot_do_is_refused(tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, **options).fit(module(embedding_optimizer="rowwise_adagrad"), batches(1))


def test_clipping_and_accumulation_with_ordinary_optimizers(tmp_path: Path) -> None:
    """Two accumulated batches are one step on the mean of their gradients."""
    model, reference = module(optimizer="sgd", lr=0.1), module(optimizer="sgd", lr=0.1)
    trainer(tmp_path, accumulate_grad_batches=2, gradient_clip_val=0.5).fit(model, batches(2))
    total: Tensor = sum(reference.compute_objective(batch).total for batch in batches(2)) / 2  # type: ignore[assignment]
    total.backward()
    torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    for (name, one), two in zip(reference.state_dict().items(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6, msg=name)


def test_bf16_mixed_computes_and_trains_like_float32(tmp_path: Path) -> None:
    batch = random_batch(SCHEMA, size=16)
    model = module()
    full = model.compute_objective(batch).total
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = model.compute_objective(batch).total
    assert mixed.dtype == torch.float32
    assert mixed.item() == pytest.approx(full.item(), rel=0.02)
    trainer(tmp_path, max_epochs=5, precision="bf16-mixed").fit(model, batches(2))
    assert model.compute_objective(batch).total.item() < 0.3 * full.item()


def test_same_seed_same_weights(tmp_path: Path) -> None:
    ends = []
    for _ in range(2):
        model = module()
        trainer(tmp_path, max_epochs=2).fit(model, batches(3))
        ends.append(model.state_dict())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_three_stages_need_configuration_only(tmp_path: Path) -> None:
    stages = [*STAGES[:1], StageConfig("mlp", "preranking", 6), StageConfig("din", "ranking", 4)]
    model = CascadeModule(SCHEMA, stages, k=3)
    run = trainer(tmp_path)
    run.fit(model, batches(2))
    assert "val/preranking_recall@3@6" in run.validate(model, batches(1), verbose=False)[0]
    assert set(model.compute_objective(random_batch(SCHEMA)).terms) == {"stage0", "stage1", "stage2", "joint"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "adm"}, "did you mean 'adam'"),
        ({"embedding_optimizer": "rowwise"}, "did you mean 'rowwise_adagrad'"),
        ({"loss": "dftpk"}, "did you mean 'dftopk'"),
        ({"objective": "jont"}, "did you mean 'joint'"),
        ({"optimizer_options": {"epss": 1.0}}, "does not take these options"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path).fit(module(**options), batches(1))


def test_non_finite_scores_stop_the_training(tmp_path: Path) -> None:
    model = module()
    with torch.no_grad():
        model.cascade.stages["ranking"].mlp.last.bias.fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        trainer(tmp_path).fit(model, batches(1))


def test_what_is_positive_comes_from_the_data() -> None:
    assert module(loss=DFTopKLoss()).loss.positive_above == 7.0
    assert module(loss=DFTopKLoss(positive_above=0.0)).loss.positive_above == 7.0  # as the command line passes it
    assert module(loss=DFTopKLoss(positive_above=3.0)).loss.positive_above == 3.0
