"""Stages that add the scores of the stage before them, and options of the tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recsys_topk import CascadeModule
from recsys_topk.cascades.cascade import Cascade
from recsys_topk.cascades.features import FeatureEmbedding
from recsys_topk.cascades.memory import plan_memory
from recsys_topk.cascades.stage import StageConfig
from recsys_topk.testing.host_reads import DEVICE, no_host_reads
from tests.cascades.batches import mixed_schema, random_batch

SCHEMA = mixed_schema()


def make(*previous: Any) -> Cascade:
    torch.manual_seed(0)
    kinds = ("two_tower", "mlp", "din")
    return Cascade(SCHEMA, [StageConfig(k, k, 5, {"hidden": [8, 4]}, p) for k, p in zip(kinds, previous, strict=False)])


def test_scores_are_added_along_the_chain() -> None:
    batch, plain, summed = random_batch(SCHEMA), make(*["ignore"] * 3), make("ignore", "add", "add_detached")
    with torch.no_grad():
        summed.scales["mlp"].fill_(0.5)
        summed.scales["din"].fill_(-2.0)
    a, b, c = plain(batch)
    torch.testing.assert_close(summed(batch), [a, b + 0.5 * a, c - 2.0 * (b + 0.5 * a)])
    torch.testing.assert_close(summed.scorer("din")(batch), summed(batch)[2])
    assert plain.scorer("din") is plain.stages["din"]


@pytest.mark.parametrize("previous", ["add", "add_detached"])
def test_gradient_reaches_the_stage_before_unless_detached(previous: str) -> None:
    cascade = make("ignore", previous)
    cascade(random_batch(SCHEMA))[1].square().sum().backward()
    assert cascade.scales["mlp"].grad is not None
    trained = any(weight.grad is not None for weight in cascade.stages["two_tower"].parameters())
    assert trained == (previous == "add")


def test_checkpoint_keeps_the_scale_and_a_plain_cascade_has_none(tmp_path: Any) -> None:
    stages = [StageConfig("two_tower", "a", 5), StageConfig("mlp", "b", 4, previous="add")]
    model = CascadeModule(SCHEMA, stages, k=3, init_std=0.1, tie_history=False)
    with torch.no_grad():
        model.cascade.scales["b"].fill_(0.25)
    torch.save({"state_dict": model.state_dict(), "hyper_parameters": dict(model.hparams),
                "pytorch-lightning_version": "2.0"}, tmp_path / "m.ckpt")  # fmt: skip
    loaded = CascadeModule.load_from_checkpoint(tmp_path / "m.ckpt")
    assert loaded.cascade.scales["b"].item() == 0.25
    assert not [key for key in make("ignore", "ignore").state_dict() if "scales" in key]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([StageConfig("mlp", "a", 5, previous="add")], "no scores to add"),
        ([StageConfig("mlp", "a", 5, hard_negatives=2)], "use --model.hard_negatives"),
    ],
)
def test_first_stage_has_no_stage_before_it(stages: list[StageConfig], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cascade(SCHEMA, stages)
    with pytest.raises(ValueError, match="one of ignore, add, add_detached"):
        StageConfig("mlp", "a", 5, previous="sum")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 hard and 3 random"):
        StageConfig("mlp", "a", 5, random_negatives=3)


def test_training_reads_no_values_with_added_scores_and_negatives_per_stage() -> None:
    stages = [StageConfig("two_tower", "a", 5), StageConfig("mlp", "b", 4, {}, "add", 3, 1)]
    model = CascadeModule(SCHEMA, stages, "softmax", k=3).to(DEVICE)
    batch = random_batch(SCHEMA).replace(sampled=8).to(DEVICE)
    with no_host_reads():
        model.compute_objective(batch).total.backward()


def test_history_has_tables_of_its_own_unless_tied() -> None:
    batch = random_batch(SCHEMA)
    tied, apart = (FeatureEmbedding(SCHEMA, 4, tie_history=tie) for tie in (True, False))
    assert tied.dims == apart.dims
    names = {key.split(".")[-2] for key in apart.state_dict()}
    assert names == {"user", "video", "genre", "word", "history:video", "history:genre"}
    (apart(batch).history.sum()).backward()
    touched = {name.split(".")[-2] for name, weight in apart.named_parameters() if weight.grad is not None}
    assert touched == {"history:video", "history:genre"}
    one, two = (plan_memory(SCHEMA, 1, 4, tie_history=tie).total for tie in (True, False))
    assert two - one == 4 * 4 * 4 * (60 + 12)  # weights, gradient and two states of Adam


def test_tables_start_with_the_given_standard_deviation() -> None:
    model = CascadeModule(SCHEMA, [StageConfig("mlp", "a", 5)], k=3, dim=64, init_std=0.02)
    weights = [weight for name, weight in model.named_parameters() if "embedding_bags" in name]
    assert torch.cat([w.flatten() for w in weights]).std().item() == pytest.approx(0.02, rel=0.05)
