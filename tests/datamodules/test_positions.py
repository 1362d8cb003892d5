"""Every position of a training sequence as a request: shared histories, shared negatives, the whole catalogue."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch

from recsys_topk.cascades import CascadeModule
from recsys_topk.datamodules import InteractionsDataModule
from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.losses import SoftmaxLoss

LENGTH = 6


def clicks() -> pa.Table:
    """Sequences of 3 to 30 items out of 40, some at equal times, with some repeats."""
    draw = np.random.default_rng(0)
    user = np.repeat(np.arange(25), draw.integers(3, 31, 25))
    return pa.table(
        {"user": user, "item": draw.integers(0, 40, user.size), "time": 1_000_000 + np.arange(user.size) // 2}
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("positions"))


def data(cache: str, **options: object) -> InteractionsDataModule:
    chosen: dict[str, object] = {"split": "leave_last", "history_length": LENGTH, "batch_size": 8, "cache_dir": cache}
    return InteractionsDataModule(interactions=clicks(), **{**chosen, **options})  # type: ignore[arg-type]


def test_positions_are_the_requests_of_a_window_of_one(cache: str) -> None:
    shard, plain = data(cache, every_position=True).shard("train"), data(cache, window=1).shard("train")
    batch = shard.batch(np.arange(len(shard)))
    assert batch.history.shape[0] == len(shard) < len(plain)
    expected, found = plain.batch(np.arange(len(plain))), batch.with_own_histories()
    assert torch.equal(batch.request_id, expected.request_id)
    assert torch.equal(batch.item_id[batch.candidates], expected.item_id[expected.candidates])
    assert torch.equal(batch.request, expected.request)
    for row in range(batch.size):
        ours, theirs = int(found.history_length[row]), int(expected.history_length[row])
        # A sequence begins at most half a history before the oldest view of a request.
        assert ours == theirs or (theirs == LENGTH and LENGTH // 2 <= ours < LENGTH)
        assert torch.equal(found.history[row, :ours], expected.history[row, theirs - ours : theirs])


def test_with_repeats_only_tied_items_are_excluded(cache: str) -> None:
    shard = data(cache, every_position=True, repeats=True).shard("train")
    log = clicks().to_pandas()
    tied = log.groupby(["user", "time"]).item.agg(lambda items: set(items) if len(set(items)) > 1 else set())
    excluded, places = shard.excluded(np.arange(len(shard))), shard.catalogue().item_id.tolist()
    batch = shard.batch(np.arange(len(shard)))
    assert excluded is not None
    for request, row in enumerate(batch.history_row.tolist()):
        user = int(shard.prepared.user_ids[shard._requests["user"][batch.request_id[request]]])
        mine, found = tied[user], {places[i] for i in excluded[row].tolist() if i >= 0}
        positive = int(batch.item_id[batch.candidates[request, 0]])
        for together in mine:
            if positive in together and log[(log.user == user) & (log.item == positive)].shape[0] == 1:
                assert together & set(places) <= found
        assert found <= set().union(*mine)


def test_shared_negatives_are_the_same_items_without_those_of_the_user(cache: str) -> None:
    module = data(cache, every_position=True, negative_source="shared", train_negatives=15, logq_correction=True)
    loader = next(iter(module.train_dataloader()))
    batch = module.add_negatives(loader)
    items = batch.item_id[batch.candidates]
    assert items.shape[1] == 16
    assert (items[:, 1:] == items[:1, 1:]).all()
    assert len(set(items[0, 1:].tolist())) == 15
    catalogue = module.catalogue("train").item_id
    assert loader.excluded is not None
    for row in range(batch.size):
        excluded = loader.excluded[batch.history_row[row]]
        had = set(catalogue[excluded[excluded >= 0]].tolist()) | {int(items[row, 0])}
        assert batch.mask[row, 1:].tolist() == [item not in had for item in items[row, 1:].tolist()]
    expected = torch.where(batch.mask[:, 1:], float(np.log(15 / len(catalogue))), 0.0)
    torch.testing.assert_close(batch.log_q[:, 1:], expected)
    assert not batch.log_q[:, 0].any()
    assert module.add_negatives(loader).candidates.equal(batch.candidates)


def catalogue_batch(cache: str, **options: object) -> tuple[InteractionsDataModule, CascadeBatch]:
    module = data(cache, negative_source="catalogue", **options)
    return module, module.add_negatives(next(iter(module.train_dataloader())))


@pytest.mark.parametrize("options", [{"every_position": True}, {"window": 3}])
def test_catalogue_loss_equals_softmax_over_all_items(cache: str, options: dict[str, object]) -> None:
    module, batch = catalogue_batch(cache, **options)
    torch.manual_seed(0)
    stages = [{"kind": "two_tower", "name": "retrieval", "quota": 5, "options": {"hidden": [], "history": "recency"}}]
    model = CascadeModule(module.schema, stages, loss=SoftmaxLoss(tau=0.5), dim=4)
    found = model.compute_objective(batch).total
    size = len(module.catalogue("train"))
    assert len(batch.item_id) == size
    whole = batch.with_own_histories().replace(
        candidates=torch.arange(size).expand(batch.size, -1), mask=torch.ones(batch.size, size, dtype=torch.bool)
    )
    own = torch.zeros(batch.size, size).scatter_add_(1, batch.candidates, batch.mask.float())
    expected = model.loss(model(whole)[0], own)
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(x, list(model.cascade.parameters()), retain_graph=True) for x in (found, expected)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)


def test_the_whole_catalogue_needs_a_softmax_and_towers(cache: str) -> None:
    module, batch = catalogue_batch(cache, every_position=True)
    tower = {"kind": "two_tower", "name": "retrieval", "quota": 5, "options": {"hidden": [4]}}
    with pytest.raises(ValueError, match=r"'dftopk' has no softmax over the list.*--loss softmax"):
        CascadeModule(module.schema, [tower], loss="dftopk", objective="independent").compute_objective(batch)
    with pytest.raises(ValueError, match=r"needs a first stage with towers, got 'mlp'"):
        CascadeModule(module.schema, [{**tower, "kind": "mlp"}], loss="softmax").compute_objective(batch)
