"""Later stages train on held-out requests with what the first stage passes on; counts of which item follows which."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pyarrow as pa
import pytest
import torch
from lightning.pytorch import Trainer

from recsys_topk.cascades import CascadeModule
from recsys_topk.cascades.catalogue_training import catalogue_terms, check_catalogue_options, passed_on
from recsys_topk.cascades.successors import Successors
from recsys_topk.datamodules import InteractionsDataModule
from recsys_topk.datamodules.batch import CascadeBatch

STAGES = [
    {"kind": "two_tower", "name": "retrieval", "quota": 12, "options": {"hidden": [], "history": "recency"}},
    {"kind": "transitions", "name": "ranking", "quota": 5, "options": {"hidden": [4]}, "previous": "add_detached"},
]


def clicks() -> pa.Table:
    draw = np.random.default_rng(0)
    user = np.repeat(np.arange(30), draw.integers(4, 25, 30))
    return pa.table({"user": user, "item": draw.integers(0, 40, user.size), "time": np.arange(user.size) + 1_000_000})


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> InteractionsDataModule:
    return InteractionsDataModule(
        interactions=clicks(), split="leave_last", history_length=8, batch_size=8, every_position=True, held_out=0.2,
        negative_source="catalogue", cache_dir=str(tmp_path_factory.mktemp("clicks")),
    )  # fmt: skip


@pytest.fixture(scope="module")
def batch(data: InteractionsDataModule) -> CascadeBatch:
    return data.add_negatives(next(iter(data.train_dataloader())))


def model(data: InteractionsDataModule, **options: object) -> CascadeModule:
    torch.manual_seed(0)
    chosen: dict[str, object] = {"loss": "softmax", "dim": 4, "k": 5, **options}
    return CascadeModule(data.schema, STAGES, **chosen)  # type: ignore[arg-type]


def brute_force_counts(user: np.ndarray, item: np.ndarray, gaps: int) -> dict[tuple[int, int], float]:
    counts: dict[tuple[int, int], float] = defaultdict(float)
    for i in range(len(user)):
        for gap in range(1, gaps + 1):
            if i + gap < len(user) and user[i + gap] == user[i]:
                counts[int(item[i]), int(item[i + gap])] += 1 / gap
    return counts


@pytest.mark.parametrize("most", [1, 3, 100])
def test_counts_of_successors_equal_a_loop(most: int) -> None:
    draw = np.random.default_rng(1)
    user, item = np.sort(draw.integers(0, 6, 80)), draw.integers(0, 9, 80)
    found = Successors(9, most=most, gaps=3)
    found.count(user, item)
    counts = brute_force_counts(user, item, 3)
    before, after = torch.arange(9)[:, None], torch.arange(9).expand(9, -1)
    dense = found(before, after)[:, 0]
    for i in range(9):
        row = sorted(((counts.get((i, j), 0.0), -j) for j in range(9)), reverse=True)
        kept = {-j for count, j in row[:most] if count}
        expected = [counts.get((i, j), 0.0) if j in kept else 0.0 for j in range(9)]
        torch.testing.assert_close(dense[i], torch.tensor(expected))
    damp = [(1 + sum(counts.get((i, j), 0.0) for i in range(9))) ** 0.3 for j in range(9)]
    torch.testing.assert_close(found.damps, torch.tensor(damp))
    share, _ = found.shares(torch.tensor([[2, 5]]), torch.tensor([[4]]), torch.tensor([[1.0, 0.5]]))
    total = sum(w * counts.get((i, j), 0.0) / damp[j] for i, w in ((2, 1.0), (5, 0.5)) for j in range(9))
    if most == 100:
        one = (counts.get((2, 4), 0.0) + 0.5 * counts.get((5, 4), 0.0)) / damp[4] / total
        assert share.item() == pytest.approx(one)


def test_held_out_requests_are_the_last_ones_of_each_user(data: InteractionsDataModule) -> None:
    shard = data.shard("train")
    every = shard.batch(np.arange(len(shard)))
    start, stop, seen = (np.asarray(data.prepared.table("train")[name]) for name in ("start", "stop", "seen"))
    expected = [r for r in range(len(start)) if stop[r] >= seen[r] - math.ceil(0.2 * (seen[r] - start[r]))]
    assert every.held_out.tolist() == expected
    assert 0.1 < len(expected) / len(start) < 0.4


def test_the_first_stage_passes_on_its_best_items_that_the_user_does_not_have(
    data: InteractionsDataModule, batch: CascadeBatch
) -> None:
    draw = torch.Generator().manual_seed(0)
    requests, items = torch.randn(batch.size, 3, generator=draw), torch.randn(len(batch.item_id), 3, generator=draw)
    lists, scores = passed_on(batch, requests, items, batch.mask, 12)
    for place, row in enumerate(batch.held_out.tolist()):
        target = int(batch.candidates[row, 0])
        known = set(batch.known[batch.history_row[row]].tolist()) - {target}
        x = requests[row] @ items.T
        best = sorted((j for j in range(len(items)) if j not in known), key=lambda j: -float(x[j]))[:12]
        assert lists.candidates[place].tolist() == best
        torch.testing.assert_close(scores[place], x[best])
        assert lists.labels[place].tolist() == [float(j == target) for j in best]
    assert lists.mask.all()
    assert torch.equal(lists.request_id, batch.request_id[batch.held_out])


def test_held_out_requests_train_later_stages_only(data: InteractionsDataModule, batch: CascadeBatch) -> None:
    cascade = model(data)
    stages = cascade.cascade.stages
    first, ranking = catalogue_terms(cascade.cascade, cascade.loss, batch)
    others = torch.ones(batch.size, dtype=torch.bool).index_fill(0, batch.held_out, False)
    users, items = stages["retrieval"].towers.encode(batch)
    expected = torch.nn.functional.cross_entropy((users @ items.T)[others], batch.candidates[others, 0])
    torch.testing.assert_close(first, expected)
    grads = torch.autograd.grad(ranking, list(stages["retrieval"].parameters()), allow_unused=True)
    assert all(grad is None for grad in grads)
    assert all(grad is not None for grad in torch.autograd.grad(ranking, list(stages["ranking"].mlp.parameters())))
    refitted, none = catalogue_terms(cascade.cascade, cascade.loss, batch, first_only=True)
    assert none.item() == 0.0
    assert not none.requires_grad
    torch.testing.assert_close(refitted, torch.nn.functional.cross_entropy(users @ items.T, batch.candidates[:, 0]))


def test_fit_counts_without_held_out_interactions_and_refits_the_first_stage(data: InteractionsDataModule) -> None:
    cascade = model(data, refit_epochs=1)
    seen: list[tuple[float, torch.Tensor]] = []

    class Watch(CascadeModule):
        def on_train_epoch_end(self) -> None:
            super().on_train_epoch_end()
            stage = self.cascade.stages["ranking"]
            seen.append((float(stage.successors.counts.sum()), stage.linear.weight.detach().clone()))

    cascade.__class__ = Watch
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = Trainer(max_epochs=3, limit_val_batches=0, enable_model_summary=False, **options)
    trainer.fit(cascade, data)
    user, _ = data.shard("train").sequences()
    length = np.bincount(user)

    def pairs(lengths: np.ndarray) -> float:
        return float(sum(max(0, n - gap) / gap for n in lengths for gap in range(1, 6)))

    assert seen[0][0] == pytest.approx(pairs(length - np.ceil(0.2 * length)), rel=1e-4)
    assert seen[2][0] == pytest.approx(pairs(length), rel=1e-4)
    assert not torch.equal(seen[0][1], seen[1][1])
    assert torch.equal(seen[1][1], seen[2][1])


def test_the_whole_catalogue_needs_held_out_requests_and_tables_in_one_place(
    data: InteractionsDataModule, batch: CascadeBatch
) -> None:
    cascade = model(data)
    with pytest.raises(ValueError, match=r"set --data.held_out, e.g. 0.1"):
        catalogue_terms(cascade.cascade, cascade.loss, batch.replace(held_out=torch.empty(0, dtype=torch.int64)))
    cascade.cascade.stages["retrieval"].embedding.agree = lambda batch: (1, 1, 1)
    with pytest.raises(ValueError, match=r"sharded tables do not allow; use --data.negative_source shared"):
        catalogue_terms(cascade.cascade, cascade.loss, batch)
    with pytest.raises(ValueError, match=r"held_out needs every_position"):
        InteractionsDataModule(interactions=clicks(), held_out=0.1)


def test_options_that_would_have_no_effect_are_refused(data: InteractionsDataModule) -> None:
    cascade = model(data).cascade
    check_catalogue_options(data, cascade, "independent", 1, 1)
    sampled = InteractionsDataModule(interactions=clicks())
    check_catalogue_options(sampled, cascade, "joint", 0, 2)
    with pytest.raises(ValueError, match=r"refit_epochs needs --data.negative_source catalogue"):
        check_catalogue_options(sampled, cascade, "independent", 1, 1)
    with pytest.raises(ValueError, match=r"got the objective 'joint'; use --objective independent"):
        check_catalogue_options(data, cascade, "joint", 0, 1)
    with pytest.raises(ValueError, match=r"need one process, got 2"):
        check_catalogue_options(data, cascade, "independent", 0, 2)
    cascade.configs[1].hard_negatives = 3
    with pytest.raises(ValueError, match=r"hard_negatives of stage 'ranking' has no effect"):
        check_catalogue_options(data, cascade, "independent", 0, 1)


def test_fit_refuses_an_objective_that_would_be_ignored(data: InteractionsDataModule) -> None:
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = Trainer(max_epochs=1, limit_val_batches=0, enable_model_summary=False, **options)
    with pytest.raises(ValueError, match=r"use --objective independent"):
        trainer.fit(model(data, objective="icc"), data)
