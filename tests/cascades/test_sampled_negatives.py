"""Hard negatives, and the correction for sampling, in the module."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from recsys_topk import CascadeModule
from recsys_topk.callbacks.diagnostics import Diagnostics
from recsys_topk.callbacks.progress import Pace
from recsys_topk.cascades.sampled_negatives import keep_hard_negatives
from recsys_topk.losses import ListNetLoss
from tests.evaluation.test_corpus import STAGES, Tiny

TWO = STAGES["two towers first"]


def batch_and_model(**options: Any) -> tuple[Any, CascadeModule, Tiny]:
    data = Tiny(**{"train_negatives": 9, "negative_source": "uniform", **options})
    torch.manual_seed(0)
    model = CascadeModule(data.schema, TWO, "softmax", k=3, dim=3)
    return data.add_negatives(next(iter(data.train_dataloader()))), model, data


def test_hard_negatives_equal_the_highest_scored_by_a_loop() -> None:
    batch, model, _ = batch_and_model()
    stage = model.cascade.stages["retrieval"]
    kept = keep_hard_negatives(batch, stage, hard=3, random=2)
    width = batch.candidates.shape[1] - 9
    scores = stage(batch).detach()
    assert kept.candidates.shape[1] == width + 5
    assert kept.sampled == 5
    for row in range(batch.size):
        own = batch.candidates[row].tolist()
        assert kept.candidates[row, : width + 2].tolist() == own[: width + 2]
        rest = sorted(range(width + 2, width + 9), key=lambda column: -float(scores[row, column]))
        assert set(kept.candidates[row, width + 2 :].tolist()) == {own[column] for column in rest[:3]}
    assert kept.labels[:, width:].eq(0).all()
    assert kept.mask[:, width:].all()


def test_hard_negatives_are_neither_list_items_nor_excluded() -> None:
    batch, model, data = batch_and_model(train_negatives=60)  # more than there are items
    kept = keep_hard_negatives(batch, model.cascade.stages["retrieval"], hard=20)
    shard = data.shard("train")
    rows = {int(request): number for number, request in enumerate(range(len(shard)))}
    for row in range(kept.size):
        width = batch.candidates.shape[1] - 60
        own = set(kept.candidates[row, :width][kept.mask[row, :width]].tolist())
        hard = kept.candidates[row, width:][kept.mask[row, width:]]
        found = shard.excluded(torch.tensor([rows[int(kept.request_id[row])]]).numpy())
        assert found is not None
        assert not own & set(hard.tolist())
        assert not set(data.items.rows(kept.item_id[hard]).tolist()) & set(found[0].tolist())
        assert hard.unique().numel() == hard.numel() == 20


def test_module_trains_on_hard_negatives_and_their_selection_has_no_gradient() -> None:
    batch, model, data = batch_and_model()
    torch.manual_seed(0)
    hard = CascadeModule(data.schema, TWO, "softmax", k=3, dim=3, hard_negatives=2, random_negatives=1)
    expected = model.compute_objective(keep_hard_negatives(batch, model.cascade.stages["retrieval"], 2, 1))
    found = hard.compute_objective(batch)
    assert torch.equal(found.total, expected.total)
    for total in (found.total, expected.total):
        total.backward()
    for one, other in zip(hard.parameters(), model.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)


RANKER = dataclasses.replace(TWO[1], hard_negatives=2, random_negatives=1)


def test_stage_trains_on_the_negatives_that_the_stage_before_it_scores_highest() -> None:
    batch, model, data = batch_and_model(logq_correction=True)
    torch.manual_seed(0)
    cascade = [TWO[0], dataclasses.replace(RANKER, previous="add")]
    found = CascadeModule(data.schema, cascade, "softmax", k=3, dim=3).compute_objective(batch)
    first, second = (stage(batch).detach() for stage in model.cascade.stages.values())
    width, terms = batch.candidates.shape[1] - 9, []
    for row in range(batch.size):
        drawn = sorted(range(width + 1, width + 9), key=lambda column: -float(first[row, column]))
        kept = [*range(width + 1), *drawn[:2]]
        own, labels, mask = ((x[row, kept])[None] for x in (first + second, batch.labels, batch.mask))
        if (labels * mask > 0).any():
            terms.append(model.loss(own, labels, mask))
    torch.testing.assert_close(found.terms["stage1"], torch.stack(terms).mean())
    torch.testing.assert_close(found.terms["stage0"], model.loss(first - batch.log_q, batch.labels, batch.mask))


def test_run_with_negatives_per_stage_and_progress_trains() -> None:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
    for options in ({"stages": [TWO[0], RANKER]}, {"stages": TWO, "hard_negatives": 2}):
        data, pace = Tiny(train_negatives=9), Pace(every=0.0)
        model = CascadeModule(data.schema, loss="softmax", k=3, dim=3, **options)
        Trainer(**quiet, enable_model_summary=False, max_steps=2, callbacks=[pace, Diagnostics(1)]).fit(model, data)
        assert pace.train_length == (width_of(data) - 7 if "hard_negatives" in options else 0)


def width_of(data: Tiny) -> int:
    return data.add_negatives(next(iter(data.train_dataloader()))).candidates.shape[1]


def test_correction_is_subtracted_from_the_scores_of_every_stage() -> None:
    batch, model, _ = batch_and_model(logq_correction=True, negative_source="popularity")
    assert batch.log_q.shape == batch.candidates.shape
    assert batch.log_q[:, -9:].lt(0).any()
    loss = model.loss
    terms = [loss(x - batch.log_q, batch.labels, batch.mask) for x in model(batch)]
    found = model.compute_objective(batch)
    torch.testing.assert_close(list(found.terms.values()), terms)
    plain = model.compute_objective(batch.replace(log_q=torch.empty(0, 0)))
    assert (plain.total - found.total).abs() > 1e-3


def test_evaluation_is_not_corrected() -> None:
    _, _, data = batch_and_model(logq_correction=True)
    assert not data.add_negatives(next(iter(data.test_dataloader()))).log_q.numel()


@pytest.mark.parametrize(
    ("model", "data", "text"),
    [
        ({"loss": "dftopk"}, {"logq_correction": True}, "the loss 'dftopk' has no softmax over the list"),
        ({"loss": "listnet"}, {"logq_correction": True}, "the loss 'listnet' has no softmax over the list"),
        ({"loss": "softmax", "objective": "bce"}, {"logq_correction": True}, "'bce' objective does not use --loss"),
        ({"loss": "softmax", "hard_negatives": 2}, {"logq_correction": True}, "their sampling probability is unknown"),
        ({"loss": "softmax", "hard_negatives": 9}, {}, "need more than 9 sampled negatives per list, got 9"),
        ({"loss": "softmax", "random_negatives": 2}, {}, "random_negatives requires hard_negatives"),
        ({"loss": "dftopk", "k": 9, "hard_negatives": 1, "random_negatives": 1}, {}, "lists have at most 9"),
        ({"loss": "dftopk", "stages": [TWO[0], RANKER]}, {}, "use --objective independent"),
        (
            {"loss": "dftopk", "objective": "independent", "k": 10, "stages": [TWO[0], RANKER]},
            {},
            "lists have at most 10",
        ),
    ],
)
def test_contradictory_options_raise_before_training(model: dict[str, Any], data: dict[str, Any], text: str) -> None:
    source = Tiny(train_negatives=9, **data)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
    trainer = Trainer(**quiet, enable_model_summary=False, max_steps=1)
    with pytest.raises(ValueError, match=text):
        trainer.fit(CascadeModule(source.schema, dim=3, **{"stages": TWO, "k": 3, **model}), source)


def test_listnet_with_normalised_target_can_be_corrected() -> None:
    x, log_q = torch.randn(2, 3), -torch.rand(2, 3)
    assert torch.allclose(ListNetLoss(target="normalised", tau=2.0).correct_sampling(x, log_q), x - 2 * log_q)
