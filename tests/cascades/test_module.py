"""The LightningModule under a real Trainer, on small random batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from recsys_topk import losses
from recsys_topk.callbacks.predictions import PredictionWriter
from recsys_topk.cascades.module import CascadeModule
from recsys_topk.cascades.objectives.base import CascadeObjective, ObjectiveOutput
from recsys_topk.cascades.objectives.joint import JointObjective
from recsys_topk.cascades.stage import StageConfig
from recsys_topk.cascades.upgrade import upgrade
from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.losses import DFTopKLoss
from recsys_topk.metrics import NDCGAt
from recsys_topk.reference import PublishedJoint
from recsys_topk.trust import UntrustedError
from recsys_topk.trust.documents import inspect_config
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
    """With a schedule, the tables must use the learning rate of this step, not of the step before."""
    ordinary = module(optimizer="sgd", lr=0.05, warmup_steps=warmup_steps)
    fused = module(optimizer="sgd", lr=0.05, embedding_optimizer="sgd", warmup_steps=warmup_steps)
    fused.load_state_dict(ordinary.state_dict())
    for model in (ordinary, fused):
        trainer(tmp_path).fit(model, batches(5))
    for (name, one), two in zip(ordinary.state_dict().items(), fused.state_dict().values(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("embedding_optimizer", ["same", "rowwise_adagrad"])
def test_resumed_training_ends_at_the_weights_of_uninterrupted_training(
    tmp_path: Path, embedding_optimizer: str
) -> None:
    """The warm-up is not over at the interruption, so the schedule must be restored too."""
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


def test_checkpoint_loads_with_weights_only_and_restores_loss_objective_and_schema(tmp_path: Path) -> None:
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


def test_evaluation_logs_joint_recall_and_recall_per_stage(tmp_path: Path) -> None:
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


def test_predictions_hold_every_item_with_consistent_ranks(tmp_path: Path) -> None:
    model = module()
    run = trainer(tmp_path, callbacks=[PredictionWriter(tmp_path / "out" / "predictions.parquet")])
    run.predict(model, batches(2), return_predictions=False)
    rows = pq.read_table(tmp_path / "out" / "predictions.parquet").to_pydict()
    scores = ["score_retrieval", "score_ranking"]
    assert list(rows) == ["shard", "request_id", "item_id", "group", "label", *scores, "kept", "rank", "dropped_by"]
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


def test_interrupted_prediction_leaves_no_file(tmp_path: Path) -> None:
    class Stop(pl.Callback):  # type: ignore[misc]  # lightning is untyped here
        def on_predict_batch_end(self, *arguments: object) -> None:
            assert list((tmp_path / "out").iterdir())  # the temporary file
            raise RuntimeError("stop")

    writer = PredictionWriter(tmp_path / "out" / "predictions.parquet")
    with pytest.raises(RuntimeError, match="stop"):
        trainer(tmp_path, callbacks=[writer, Stop()]).predict(module(), batches(2), return_predictions=False)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [({"accumulate_grad_batches": 2}, "accumulated"), ({"gradient_clip_val": 1.0}, "clipping would not apply")],
)
def test_fused_tables_refuse_accumulation_and_clipping(
    tmp_path: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, **options).fit(module(embedding_optimizer="rowwise_adagrad"), batches(1))


def test_fused_tables_refuse_scaled_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fitting = trainer(tmp_path)
    monkeypatch.setattr(type(fitting), "precision", "16-mixed")  # on a CPU Lightning replaces it by bf16-mixed
    with pytest.raises(ValueError, match="bf16-mixed, or --model"):
        fitting.fit(module(embedding_optimizer="rowwise_adagrad"), batches(1))


def test_accumulation_and_clipping_equal_one_step_on_the_mean_gradient(tmp_path: Path) -> None:
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


def test_same_seed_gives_identical_weights(tmp_path: Path) -> None:
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
def test_unknown_names_and_options_raise(tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path).fit(module(**options), batches(1))


def test_non_finite_scores_stop_the_training(tmp_path: Path) -> None:
    model = module()
    with torch.no_grad():
        model.cascade.stages["ranking"].mlp.last.bias.fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        trainer(tmp_path).fit(model, batches(1))


def test_label_options_come_from_the_data_unless_given() -> None:
    assert module(loss=DFTopKLoss()).loss.positive_above == 7.0
    assert module(loss=DFTopKLoss(positive_above=0.0)).loss.positive_above == 0.0
    assert module(loss=DFTopKLoss(positive_above=3.0)).loss.positive_above == 3.0
    places = replace(SCHEMA, labels="places")
    assert CascadeModule(places, STAGES, "lambdaloss").loss.gain == "linear"
    assert CascadeModule(SCHEMA, STAGES, "lambdaloss").loss.gain == "exponential"
    given = CascadeModule(places, STAGES, losses.get("lambdaloss", gain="exponential"))
    assert given.loss.gain == "exponential"


JOINT = "recsys_topk.cascades.objectives.joint.JointObjective"
DFTOPK = "recsys_topk.losses.DFTopKLoss"


def test_descriptions_of_version_0_1_build_the_same_cascade() -> None:
    """In 0.1.0 a threshold of 0 meant "from the data", and `reference_quirks: false` had no effect."""
    old = {key: value for key, value in SCHEMA.to_dict().items() if key not in ("version", "labels")}
    loss = {"class_path": DFTOPK, "init_args": {"tau": 2.0, "positive_above": 0.0}}
    objective = {"class_path": JOINT, "init_args": {"eps": 0.0, "reference_quirks": False}}
    model = CascadeModule(old, STAGES, loss, objective, k=3)
    assert model.loss.positive_above == 7.0
    assert type(model.objective) is JointObjective
    objective["init_args"] = {"reference_quirks": True}
    assert type(CascadeModule(old, STAGES, loss, objective, k=3).objective) is PublishedJoint
    assert CascadeModule(SCHEMA, STAGES, loss, k=3).loss.positive_above == 0.0


def test_upgrade_changes_complete_old_configs_only() -> None:
    loss = {"class_path": DFTOPK, "init_args": {"positive_above": 0.0}}
    whole = {**module().hparams, "loss": loss}
    whole = {name: value for name, value in whole.items() if name not in ("schema", "metrics", "monitor")}
    assert upgrade(whole)["loss"]["init_args"] == {}
    assert upgrade({**whole, "metrics": None})["loss"]["init_args"] == {"positive_above": 0.0}
    assert upgrade({"loss": loss})["loss"]["init_args"] == {"positive_above": 0.0}


def test_configured_metrics_are_logged_and_one_is_monitored(tmp_path: Path) -> None:
    entries = [
        "recall",
        {"metric": "ndcg", "k": 2, "stage": "ranking"},
        {"metric": "joint_recall", "k": 1},
        "kendall_tau",
        "selection_mass",
    ]
    model = module(metrics=entries, monitor="ranking_ndcg@2")
    run = trainer(tmp_path, enable_checkpointing=True)
    results = run.validate(model, batches(2), verbose=False)[0]
    assert list(results) == [
        "val/retrieval_recall@3@8", "val/ranking_recall@3@5", "val/ranking_ndcg@2", "val/joint_recall@1@5",
        "val/retrieval_kendall_tau", "val/ranking_kendall_tau",
        "val/retrieval_selection_mass@3", "val/ranking_selection_mass@3",
    ]  # fmt: skip
    expected = NDCGAt(2, positive_above=7.0)
    for batch in batches(2):
        with torch.no_grad():
            expected.update(model(batch)[1], batch.labels, batch.mask)
    assert results["val/ranking_ndcg@2"] == pytest.approx(expected.compute().item(), abs=1e-6)
    assert model.monitor == "ranking_ndcg@2"
    assert module(metrics=entries).monitor == "joint_recall@1@5"
    assert module().monitor == "joint_recall@3@5"
    assert module(metrics=["recall"]).monitor == "retrieval_recall@3@8"
    run.save_checkpoint(tmp_path / "model.ckpt")
    again = CascadeModule.load_from_checkpoint(tmp_path / "model.ckpt", weights_only=True)
    assert (list(again.metrics["val"]), again.monitor) == (list(model.metrics["val"]), model.monitor)


def test_gains_of_a_configured_ndcg_follow_the_labels() -> None:
    model = CascadeModule(replace(SCHEMA, labels="places"), STAGES, metrics=["ndcg"])
    assert {metric.gain for metric in model.metrics["val"].values()} == {"linear"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metrics": ["recal"]}, "did you mean 'recall'"),
        ({"metrics": [{"metric": "recall", "kk": 3}]}, "metric 'recall' has no option 'kk'; did you mean 'k'"),
        ({"metrics": [{"metric": "recall", "stage": "rerank"}]}, "unknown stage 'rerank'; the stages are retrieval"),
        ({"metrics": [{"metric": "joint_recall", "stage": "ranking"}]}, "measures the whole cascade"),
        ({"metrics": ["recall", "recall"]}, "two metrics would be logged as 'retrieval_recall@3@8'"),
        ({"metrics": [{"k": 3}]}, "or a mapping such as"),
        ({"metrics": []}, "name at least one"),
        ({"monitor": "val/joint_recall@3@5"}, "did you mean 'joint_recall@3@5'"),
    ],
)
def test_invalid_metrics_raise(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module(**options)


@pytest.mark.parametrize("entry", ["tests.cascades.batches.Metric", {"metric": "tests.cascades.batches.Metric"}])
def test_file_cannot_name_a_metric_of_an_untrusted_package(tmp_path: Path, entry: object) -> None:
    with pytest.raises(UntrustedError, match=r"tests\.cascades\.batches\.Metric"):
        inspect_config({"model": {"metrics": [entry]}}, "config.yaml")
    run = trainer(tmp_path)
    run.strategy.connect(module())
    run.save_checkpoint(tmp_path / "model.ckpt")
    content = torch.load(tmp_path / "model.ckpt", weights_only=True)
    content["hyper_parameters"]["metrics"] = [entry]
    torch.save(content, tmp_path / "model.ckpt")
    with pytest.raises(UntrustedError, match=r"tests\.cascades\.batches\.Metric"):
        CascadeModule.load_from_checkpoint(tmp_path / "model.ckpt")


class OwnTerms(CascadeObjective):
    """Has a term whose name only begins like a stage's, and one that is assigned to a stage."""

    def compute(
        self,
        scores: Sequence[Tensor],
        labels: Tensor,
        mask: Tensor,
        groups: Tensor | None,
        quotas: Sequence[int],
        k: int,
    ) -> ObjectiveOutput:
        total = sum((x.square().mean() for x in scores), torch.zeros(()))
        return ObjectiveOutput(total, {"staged": total, "own": total}, {"own": 1})


def test_terms_are_logged_under_their_name_or_their_stage(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.fit(module(objective=OwnTerms), batches(1))
    logged = {name for name in run.logged_metrics if name.startswith("train/")}
    assert logged == {"train/loss", "train/loss_staged", "train/loss_ranking"}


class Lists(pl.LightningDataModule):  # type: ignore[misc]  # lightning is untyped here
    """Batches of 12 items per list, with a known list length."""

    def __init__(self, length: int = 12) -> None:
        super().__init__()
        self.length = length

    def list_length(self, split: str) -> int:
        assert split == "train"
        return self.length

    def train_dataloader(self) -> DataLoader[CascadeBatch]:
        return batches(2)


WIDE = [StageConfig("two_tower", "retrieval", 50), StageConfig("mlp", "ranking", 40)]


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"k": 12}, True),
        ({"k": 11}, False),
        ({"k": 12, "loss": "softmax"}, False),
        ({"k": 5, "loss": DFTopKLoss(k=20)}, True),
        ({"k": 20, "loss": DFTopKLoss(k=5)}, False),
        ({"k": 5, "objective": {"class_path": JOINT, "init_args": {"stage_k": "quota"}}}, True),
        ({"k": 5, "loss": "arf"}, True),
        ({"k": 12, "objective": "bce"}, False),
    ],
)
def test_k_that_covers_every_list_raises_before_training(
    tmp_path: Path, options: dict[str, object], refused: bool
) -> None:
    model = CascadeModule(SCHEMA, WIDE, **options)  # type: ignore[arg-type]
    run = trainer(tmp_path)
    if not refused:
        run.fit(model, datamodule=Lists())
        return
    with pytest.raises(
        ValueError, match=r"at most 12 items, .* nothing is learned \(quotas \[50, 40\]\); use a smaller"
    ):
        run.fit(model, datamodule=Lists())
    assert run.global_step == 0


def test_k_that_covers_every_list_raises_after_the_first_epoch_if_list_length_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the best 12 items of each list, but training lists have at most 12 items"):
        trainer(tmp_path, max_epochs=2).fit(CascadeModule(SCHEMA, WIDE, k=12), batches(2))
    trainer(tmp_path).fit(CascadeModule(SCHEMA, WIDE, k=11), batches(2))


@pytest.mark.parametrize("number", [3, 102])
def test_data_without_positives_raises_after_100_batches_or_one_epoch(tmp_path: Path, number: int) -> None:
    stages = [StageConfig("mlp", "ranking", 5, {"hidden": [2]})]
    made = [random_batch(SCHEMA, size=2, seed=0)] * number
    without_positives = [batch.replace(labels=batch.labels.clamp_max(7.0)) for batch in made]
    run = trainer(tmp_path)
    seen = min(number, 100)
    with pytest.raises(
        ValueError, match=f"no list of the first {seen} training batches has a label above 7, .*positive_"
    ):
        run.fit(CascadeModule(SCHEMA, stages, k=3, dim=2), DataLoader(without_positives, batch_size=None))  # type: ignore[arg-type]
    assert run.global_step == (99 if number > 100 else 3)


def test_k_or_dim_of_0_raises() -> None:
    with pytest.raises(ValueError, match=r"k, the number of items .* must be at least 1, got 0"):
        CascadeModule(SCHEMA, STAGES, k=0)
    with pytest.raises(ValueError, match="at least 1"):
        CascadeModule(SCHEMA, STAGES, dim=0)
