"""Later stages train on held-out requests with what the first stage passes on; counts of which item follows which."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from lightning.pytorch import Trainer

from recsys_topk.cascades import CascadeModule
from recsys_topk.cascades.catalogue_training import (
    catalogue_terms,
    check_catalogue_options,
    held_out_requests,
    passed_on,
    sample_items,
)
from recsys_topk.cascades.count_sequences import count_sequences
from recsys_topk.cascades.likeness import Likeness
from recsys_topk.cascades.popularity_shift import popularity_shift
from recsys_topk.cascades.singular_vectors import unit_vectors
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
    return data.add_negatives(next(batch for batch in data.train_dataloader() if batch.held_out.numel()))


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


def dense_likeness(user: np.ndarray, item: np.ndarray, size: int, dim: int) -> np.ndarray:
    """Return the scores of all items after each single item, from numpy's decomposition of the dense matrix."""
    matrix = np.zeros((user.max() + 1, size))
    matrix[user, item] = 1
    root = np.sqrt(np.maximum(matrix.sum(0), 1e-300))
    right = np.linalg.svd(matrix / np.sqrt(np.maximum(matrix.sum(1, keepdims=True), 1)) / np.maximum(root, 1))[2][:dim]
    known = root > 0.5
    return np.where(known[:, None] & known, right.T @ right / np.maximum(root, 1)[:, None] * root, 0.0)


def test_the_likeness_of_an_item_counts_how_much_it_has_the_same_users() -> None:
    user, item = np.array([0, 0, 1, 1, 1, 2, 2]), np.array([1, 2, 1, 2, 3, 4, 5])
    likeness = Likeness(8, 4)  # the rank of the matrix is 3, so the decomposition is exact
    likeness.count(user, item)
    history = torch.tensor([[1, 7], [4, 0], [0, 0]])
    real = torch.tensor([[True, False], [True, False], [False, False]])
    found = likeness(history, real, torch.arange(8).expand(3, 8))
    matrix = dense_likeness(user, item, 8, 3)
    torch.testing.assert_close(found[0], torch.from_numpy(matrix[1] / matrix[1].mean()).float().clamp_min(0))
    assert found[1].round().tolist() == [0, 0, 0, 0, 4, 4, 0, 0]  # the only user of 4 has 4 and 5
    assert found[2].tolist() == [0] * 8  # no history


@pytest.mark.parametrize("hidden", [[], [4]])
def test_transitions_start_at_the_logarithms_of_share_and_likeness(
    data: InteractionsDataModule, hidden: list[int]
) -> None:
    options = {"hidden": hidden, "newest": 2, "gaps": 3, "damping": 0.0, "likeness": 5}
    stages = [STAGES[0], {**STAGES[1], "options": options}]
    cascade = CascadeModule(data.schema, stages, loss="softmax", dim=4, k=5).cascade  # type: ignore[arg-type]
    count_sequences(cascade, data)
    stage = cascade.stages["ranking"]
    user, item = data.shard("train").sequences(held_out=False)
    ids, column = (
        data.catalogue("train").item_id.numpy(),
        data.catalogue("train").features[:, stage.item_column].numpy(),
    )
    item = column[np.searchsorted(ids, item)]
    counts = brute_force_counts(user, item, 3)
    likeness = dense_likeness(user, item, len(stage.likeness.users), 5)
    batch = data.shard("val").batch(np.arange(6))
    found = stage(batch)
    for row in range(6):
        views = batch.history[row, : batch.history_length[row], stage.view_column].tolist()[::-1][:2]
        total = sum(c / (1 + age) for age, i in enumerate(views) for (a, _), c in counts.items() if a == i)
        after = int(batch.items[batch.candidates[row, 0], stage.item_column])
        share = sum(counts.get((i, after), 0.0) / (1 + age) for age, i in enumerate(views)) / max(total, 1e-6)
        history = batch.history[row, : batch.history_length[row], stage.view_column].numpy()
        like = likeness[history].sum(0)
        like = max(like[after], 0) / like.mean()
        expected = 0.5 * math.log(share + 1e-4) + 0.5 * math.log(like + 0.1)
        assert found[row, 0].item() == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_held_out_requests_are_those_of_some_users(data: InteractionsDataModule) -> None:
    shard = data.shard("train")
    every = shard.batch(np.arange(len(shard)))
    user = np.asarray(data.prepared.table("train")["user"])
    chosen = set(user[every.held_out.numpy()])
    assert every.held_out.tolist() == [row for row, one in enumerate(user) if one in chosen]
    assert 0.05 < len(chosen) / len(set(user)) < 0.4
    counted, _ = shard.sequences(held_out=False)
    assert set(counted) == set(user) - chosen
    assert set(shard.sequences()[0]) == set(user)


def test_the_first_stage_passes_on_its_best_items_that_the_user_does_not_have(
    data: InteractionsDataModule, batch: CascadeBatch
) -> None:
    draw = torch.Generator().manual_seed(0)
    requests, items = torch.randn(batch.size, 3, generator=draw), torch.randn(len(batch.item_id), 3, generator=draw)
    rows = batch.held_out
    lists, scores = passed_on(held_out_requests(batch), requests[rows], items, batch.mask[rows], 12)
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
    every, scores = passed_on(held_out_requests(batch), requests[rows], items, batch.mask[rows], 200)
    assert every.candidates.max() < len(items)  # all items of the catalogue, and those that the user has are masked
    assert scores.isfinite().all()
    for place, row in enumerate(rows.tolist()):
        known = set(batch.known[batch.history_row[row]].tolist()) - {int(batch.candidates[row, 0]), -1}
        left = every.candidates[place][every.mask[place]].tolist()
        assert sorted(left) == [j for j in range(len(items)) if j not in known]


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
    none = batch.replace(held_out=torch.empty(0, dtype=torch.int64))
    assert catalogue_terms(cascade.cascade, cascade.loss, none)[1].item() == 0.0


def test_held_out_requests_are_scored_without_dropout(data: InteractionsDataModule, batch: CascadeBatch) -> None:
    stages = [{**STAGES[0], "options": {"hidden": [], "history": {"kind": "transformer", "dropout": 0.9}}}, STAGES[1]]
    cascade = CascadeModule(data.schema, stages, loss="softmax", dim=4, k=5).train()  # type: ignore[arg-type]
    found = [catalogue_terms(cascade.cascade, cascade.loss, batch) for _ in range(2)]
    assert found[0][0] != found[1][0]
    assert found[0][1] == found[1][1]
    assert cascade.cascade.stages["retrieval"].training


def test_a_sampled_softmax_estimates_that_of_the_catalogue(data: InteractionsDataModule, batch: CascadeBatch) -> None:
    targets = torch.tensor([3, 3, 7])
    draws = [sample_items(targets, 50, 20) for _ in range(4000)]
    for rows, shift in draws[:20]:
        assert len(set(rows.tolist())) == 20
        expected = [0.0 if row in (3, 7) else math.log(18 / 48) for row in rows.tolist()]
        torch.testing.assert_close(shift, torch.tensor(expected))
        assert {3, 7} <= set(rows.tolist())
    x = torch.randn(50, generator=torch.Generator().manual_seed(0)).exp()
    sums = torch.stack([(x[rows] / shift.exp()).sum() for rows, shift in draws])
    assert abs(sums.mean() - x.sum()) < 4 * sums.std() / math.sqrt(len(draws))
    cascade = model(data)
    whole = catalogue_terms(cascade.cascade, cascade.loss, batch)[0]
    torch.testing.assert_close(catalogue_terms(cascade.cascade, cascade.loss, batch.replace(sampled=10_000))[0], whole)
    kept = ("candidates", "labels", "mask", "group", "history_row", "history_prefix", "request", "request_id")
    none = torch.empty(0, dtype=torch.int64)
    some = batch.replace(**{name: getattr(batch, name)[:8] for name in kept}, held_out=none)
    whole = catalogue_terms(cascade.cascade, cascade.loss, some)[0]
    near = [catalogue_terms(cascade.cascade, cascade.loss, some.replace(sampled=30))[0] for _ in range(200)]
    assert abs(torch.stack(near).mean() - whole) < 0.05 * whole


def test_the_popularity_term_counts_items_of_users_that_are_not_held_out(data: InteractionsDataModule) -> None:
    stages = [{**STAGES[0], "options": {"hidden": [], "popularity": True}}, STAGES[1]]
    cascade = CascadeModule(data.schema, stages, loss="softmax", dim=4, k=5, init_std=1e-9)  # type: ignore[arg-type]
    count_sequences(cascade.cascade, data)
    user, item = data.shard("train").sequences(held_out=False)
    catalogue = data.catalogue("train")
    counts = np.array([(item == one).sum() for one in catalogue.item_id.tolist()])
    stage = cascade.cascade.stages["retrieval"]
    batch = data.add_negatives(next(iter(data.train_dataloader())))
    scores = stage.towers.encode(batch)
    torch.testing.assert_close(
        (scores[0] @ scores[1].T)[0], torch.from_numpy(np.log1p(counts)).float(), atol=1e-5, rtol=1e-5
    )
    pairs = sum(max(0, n - gap) / gap for n in np.bincount(user) for gap in range(1, 6))
    assert float(cascade.cascade.stages["ranking"].successors.counts.sum()) == pytest.approx(pairs, rel=1e-4)


def test_the_shift_of_popularity_is_added_outside_of_training_if_the_split_is_by_time(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    time = np.arange(3000)
    item = draw.integers(0, 10, 3000) + time // 100  # what is popular changes
    user = draw.integers(0, 60, 3000)
    table = pa.table({"user": user, "item": item, "time": time})
    options: dict[str, object] = {"every_position": True, "negative_source": "catalogue", "cache_dir": str(tmp_path)}
    stages = [{**STAGES[0], "options": {"hidden": [], "popularity": True}}]
    for split in ("time", "leave_last"):
        data = InteractionsDataModule(interactions=table, repeats=True, split=split, **options)  # type: ignore[arg-type]
        cascade = CascadeModule(data.schema, stages, loss="softmax", dim=4, k=5).cascade  # type: ignore[arg-type]
        count_sequences(cascade, data)
        stage = cascade.stages["retrieval"]
        with torch.no_grad():
            stage.popularity_scale.fill_(0.5)
        shift = popularity_shift(user[:2400], item[:2400], time[:2400], len(stage.shift))
        batch = data.shard("val").batch(np.arange(5))
        training = stage.train().towers.encode(batch)
        differences = (
            stage.eval().towers.encode(batch)[0][0] @ stage.towers.encode(batch)[1].T - training[0][0] @ training[1].T
        )
        ids = batch.items[:, stage.item_column]
        if split == "time":
            assert stage.shift.std() > 0.5
            assert np.corrcoef(shift, np.arange(len(shift)))[0, 1] > 0.5
        expected = stage.shift[ids] if split == "time" else torch.zeros(len(ids))
        torch.testing.assert_close(differences, expected, atol=1e-4, rtol=1e-4)
        whole = data.add_negatives(next(iter(data.train_dataloader())))
        encoded = stage.train().towers.encode(whole)[1]
        assert stage.eval().towers.encode(whole)[1].equal(encoded)  # later stages train without it


@pytest.mark.parametrize("heavy", [False, True])
def test_a_shift_of_popularity_equals_a_loop_in_which_each_user_counts_the_same(heavy: bool) -> None:
    draw = np.random.default_rng(1)
    item = np.r_[draw.integers(0, 20, 900), draw.integers(0, 30, 100)]
    time = np.sort(draw.permutation(5000)[:1000])
    user = np.where((item >= 20) & heavy, 99, np.arange(1000) % 50)  # new items of one user, or of many

    def shifts(number: int) -> list[np.ndarray]:
        share = np.bincount(item[:number], minlength=30) + 0.5
        share /= share.sum()
        made = []
        for half_life in [2.0**-n for n in range(1, 9)]:
            span = time[number - 1] - time[0]
            weight = [2.0 ** ((one - time[number - 1]) / (half_life * span)) for one in time[:number]]
            recent = np.bincount(item[:number], weight, 30)
            made += [np.log((recent + s * share) / (sum(weight) + s) / share) for s in (10, 100, 1000, 10000)]
        return made

    users = set(user[900:].tolist())
    gains = [np.mean([one[item[900:][user[900:] == who]].mean() for who in users]) for one in shifts(900)]
    expected = shifts(1000)[int(np.argmax(gains))] if max(gains) > 0 else np.zeros(30)
    order = draw.permutation(1000)
    found = popularity_shift(user[order], item[order], time[order], 30)
    np.testing.assert_allclose(found, expected, atol=1e-9)


def test_items_that_were_had_before_get_a_term_if_they_may_be_repeated(data: InteractionsDataModule) -> None:
    cascade = CascadeModule(data.schema, [STAGES[0], {**STAGES[1], "options": {}}], loss="softmax", dim=4, k=5).cascade  # type: ignore[arg-type]
    stage = cascade.stages["ranking"]
    count_sequences(cascade, data)
    batch = data.shard("val").batch(np.arange(6))
    own = batch.items[batch.candidates[:, 0], stage.item_column]
    assert not stage.shares(batch).any()
    batch.history[:, 0, stage.view_column] = own
    batch.history[:, -1, stage.view_column] = own
    number = 1 + (batch.history_length == batch.history.shape[1])
    assert stage.shares(batch)[:, 0].tolist() == pytest.approx((number / batch.history_length).tolist())
    before = stage(batch)[:, 0]
    with torch.no_grad():
        stage.repeated.fill_(2.0)
    share = 1000 * number / batch.history_length
    torch.testing.assert_close(stage(batch)[:, 0] - before, 1.5 * share.log1p())
    stage.likeness.users[own] = 0
    assert not stage.shares(batch)[:, 0].any()


def test_singular_vectors_equal_those_of_a_dense_decomposition() -> None:
    draw = np.random.default_rng(2)
    user, item = draw.integers(0, 12, 60), draw.integers(0, 9, 60)
    matrix = np.zeros((12, 10))
    matrix[user, item] = 1  # twice is once; the last item has no user
    users, items = matrix.sum(1, keepdims=True), matrix.sum(0, keepdims=True)
    _, singular, right = np.linalg.svd(matrix / np.sqrt(np.maximum(users, 1) * np.maximum(items, 1)))
    expected = right[:4].T * np.sqrt(singular[:4])
    expected /= np.maximum(np.linalg.norm(expected, axis=1, keepdims=True), 1e-12)
    vectors, known = unit_vectors(user, item, 10, 4)
    assert known.tolist() == [True] * 9 + [False]
    found = vectors.double().numpy()[:9]
    np.testing.assert_allclose(found @ found.T, (expected @ expected.T)[:9, :9], atol=1e-3)
    assert unit_vectors(user, item, 10, 30)[0].shape == (10, 30)  # wider than the matrix


@pytest.mark.parametrize("optimizer", ["same", "rowwise_adagrad"])
def test_warm_start_writes_the_item_table_once(data: InteractionsDataModule, optimizer: str) -> None:
    stages = [{**STAGES[0], "options": {"hidden": [], "warm_start": True}}]
    options = {"loss": "softmax", "dim": 4, "k": 5, "init_std": 0.1, "embedding_optimizer": optimizer}
    cascade = CascadeModule(data.schema, stages, **options).cascade  # type: ignore[arg-type]
    stage = cascade.stages["retrieval"]
    table = stage.embedding.table(stage.item_table.name)
    before = table.detach().clone()
    count_sequences(cascade, data)
    user, item = data.shard("train").sequences(held_out=False)
    column = data.catalogue("train").features.numpy()[:, stage.item_column]
    item = column[np.searchsorted(data.catalogue("train").item_id.numpy(), item)]
    vectors, known = unit_vectors(user, item, *table.shape)
    torch.testing.assert_close(table[known], 0.1 * 2 * vectors[known])
    torch.testing.assert_close(table[~known], before[~known])
    with torch.no_grad():
        table.mul_(2)  # trained
    trained = table.detach().clone()
    resumed = CascadeModule(data.schema, stages, **options).cascade  # type: ignore[arg-type]
    resumed.load_state_dict(cascade.state_dict())
    count_sequences(resumed, data)
    torch.testing.assert_close(resumed.stages["retrieval"].embedding.table(stage.item_table.name), trained)
    stage.embedding.collections.clear()
    with pytest.raises(ValueError, match=r"is sharded: no process has all of it; use the stage without warm_start"):
        stage.embedding.table(stage.item_table.name)


def test_the_whole_catalogue_needs_held_out_requests_and_tables_in_one_place(
    data: InteractionsDataModule, batch: CascadeBatch
) -> None:
    cascade = model(data)
    cascade.cascade.stages["retrieval"].embedding.agree = lambda batch: (1, 1, 1)
    with pytest.raises(ValueError, match=r"sharded tables do not allow; use --data.negative_source shared"):
        catalogue_terms(cascade.cascade, cascade.loss, batch)
    with pytest.raises(ValueError, match=r"held_out needs every_position"):
        InteractionsDataModule(interactions=clicks(), held_out=0.1)


def test_options_that_would_have_no_effect_are_refused(data: InteractionsDataModule) -> None:
    cascade = model(data).cascade
    check_catalogue_options(data, cascade, "independent", 1)
    sampled = InteractionsDataModule(interactions=clicks())
    check_catalogue_options(sampled, cascade, "joint", 2)
    with pytest.raises(ValueError, match=r"got the objective 'joint'; use --objective independent"):
        check_catalogue_options(data, cascade, "joint", 1)
    with pytest.raises(ValueError, match=r"need one process, got 2"):
        check_catalogue_options(data, cascade, "independent", 2)
    every = InteractionsDataModule(interactions=clicks(), every_position=True, negative_source="catalogue")
    with pytest.raises(ValueError, match=r"set --data.held_out, e.g. 0.1"):
        check_catalogue_options(every, cascade, "independent", 1)
    cascade.configs[1].previous = "add"
    with pytest.raises(ValueError, match=r"use previous: add_detached"):
        check_catalogue_options(data, cascade, "independent", 1)
    cascade.configs[1].hard_negatives = 3
    with pytest.raises(ValueError, match=r"hard_negatives of stage 'ranking' has no effect"):
        check_catalogue_options(data, cascade, "independent", 1)


def test_fit_refuses_an_objective_that_would_be_ignored(data: InteractionsDataModule) -> None:
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = Trainer(max_epochs=1, limit_val_batches=0, enable_model_summary=False, **options)
    with pytest.raises(ValueError, match=r"use --objective independent"):
        trainer.fit(model(data, objective="icc"), data)
