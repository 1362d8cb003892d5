"""Fused table updates inside backward: our loops against fbgemm's kernels and PyTorch's optimizers."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from recsys_topk.cascades import features
from recsys_topk.cascades.features import Embedded, FeatureEmbedding, HistoryForm
from recsys_topk.cascades.optimizers import DenseAndFused, fused_optimizer, make_optimizer
from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.ops.backends.parallel import run_chains
from recsys_topk.ops.dispatch import backend
from recsys_topk.ops.stages.row_update import number_rows
from recsys_topk.tabular.schema import Feature, Schema, Table
from tests.cascades.batches import random_batch

NAMES = ("sgd", "adagrad", "rowwise_adagrad")
VIDEO, AUTHOR = Feature("video_id", "video"), Feature("author_id", "author")
# Items read the author table twice; the history reads both tables too.
SCHEMA = Schema(
    tables=(Table("user", 9), Table("video", 40), Table("author", 12)),
    request=(Feature("user_id", "user"),),
    history=(VIDEO, AUTHOR),
    items=(VIDEO, AUTHOR, Feature("editor_id", "author")),
)
DIMS = {"user": 4, "video": 12, "author": 8}


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def train(embedding: FeatureEmbedding, batch: CascadeBatch, history: HistoryForm, rates: list[float]) -> None:
    """Take one step per learning rate on a loss that uses every output."""
    optimizer = make_optimizer("sgd", torch.nn.ModuleDict({"a": embedding, "b": torch.nn.Linear(1, 1)}), 0.1, {})
    assert isinstance(optimizer, DenseAndFused)
    for rate in rates:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.sync_tables()
        found = embedding(batch, history=history)
        weighted_sum(found).backward()


def weighted_sum(found: Embedded) -> Tensor:
    parts = [found.request, found.items, found.history]
    return torch.stack([(x * torch.linspace(-1, 2, x.numel()).view_as(x) + x**2).sum() for x in parts]).sum()


def weights_and_states(embedding: FeatureEmbedding) -> dict[str, Tensor]:
    """Return the weights and the optimizer state of all tables."""
    found = dict(embedding.state_dict())
    for path, collection in embedding.collections.items():
        for values in collection.fused_optimizer().state_dict()["state"].values():
            found |= {f"{path} {name}": value for name, value in values.items()}
    return {name: value.clone() for name, value in found.items()}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("history", ["rows", "mean"])
def test_updates_match_fbgemm(name: str, history: HistoryForm, threads: int) -> None:
    torch.manual_seed(0)
    ours = FeatureEmbedding(SCHEMA, DIMS, fused=fused_optimizer(name, 0.1))
    theirs = FeatureEmbedding(SCHEMA, DIMS, fused=fused_optimizer(name, 0.1))
    theirs.load_state_dict(ours.state_dict())
    before = weights_and_states(ours)
    batch, rates = random_batch(SCHEMA), [0.1, 0.02, 0.3]
    train(ours, batch, history, rates)
    with backend("torch"):
        train(theirs, batch, history, rates)
    found, expected = weights_and_states(ours), weights_and_states(theirs)
    assert len(found) == (3 if name == "sgd" else 6)
    for key, value in expected.items():
        assert not torch.equal(value, before[key])
        torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-6, msg=lambda text, k=key: f"{k}: {text}")
    assert all(weight.grad is None for weight in ours.collections.parameters())


def test_adagrad_matches_pytorch_and_padding_rows_do_not_change() -> None:
    torch.manual_seed(0)
    ours = FeatureEmbedding(SCHEMA, DIMS, fused=fused_optimizer("adagrad", 0.1))
    plain = FeatureEmbedding(SCHEMA, DIMS)
    plain.load_state_dict(ours.state_dict())
    before = {key: value.clone() for key, value in plain.state_dict().items()}
    batch = random_batch(SCHEMA)
    train(ours, batch, "rows", [0.1, 0.1])
    optimizer = torch.optim.Adagrad(plain.parameters(), lr=0.1, eps=1e-10)
    for _ in range(2):
        optimizer.zero_grad()
        found = plain(batch, history="rows")
        weighted_sum(found).backward()
        optimizer.step()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[key], value, rtol=1e-5, atol=1e-6)
        assert torch.equal(ours.state_dict()[key][0], before[key][0])  # the padding row is not trained


@pytest.mark.parametrize("name", NAMES)
def test_updates_are_identical_for_any_number_of_threads_and_for_copies(name: str) -> None:
    torch.manual_seed(0)
    first = FeatureEmbedding(SCHEMA, DIMS, fused=fused_optimizer(name, 0.1))
    second = copy.deepcopy(first)
    batch, number = random_batch(SCHEMA), torch.get_num_threads()
    for embedding, threads in ((first, 1), (second, 3)):
        torch.set_num_threads(threads)
        train(embedding, batch, "rows", [0.1, 0.1])
    torch.set_num_threads(number)
    expected = weights_and_states(first)
    for key, value in weights_and_states(second).items():
        assert torch.equal(value, expected[key]), key


def test_fused_tables_on_a_cpu_use_the_compiled_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "read_torchrec", None)
    monkeypatch.setattr(features, "read_weights", None)
    train(
        FeatureEmbedding(SCHEMA, DIMS, fused=fused_optimizer("rowwise_adagrad", 0.1)),
        random_batch(SCHEMA),
        "mean",
        [0.1],
    )


@pytest.mark.parametrize("form", ["rows", "mean"])
@pytest.mark.parametrize("identity", [-1, 40])
def test_error_for_id_outside_a_fused_table_names_the_id(form: HistoryForm, identity: int) -> None:
    batch = random_batch(SCHEMA)
    items = batch.items.clone()
    items[3, 0] = identity
    with pytest.raises(IndexError, match=f"video: id {identity} is not in the table, which has the ids 0 to 39"):
        FeatureEmbedding(SCHEMA, DIMS, fused=fused_optimizer("sgd", 0.1))(batch.replace(items=items), history=form)


@pytest.mark.parametrize(("size", "number"), [(1, 5), (7, 300), (10**6, 5000), (2**62, 5000), (300, 0)])
def test_number_rows_numbers_each_row_once(size: int, number: int) -> None:
    rng = np.random.default_rng(0)
    one = rng.integers(0, size, (number, 2))
    # Multiples of a power of two and consecutive ids, which collide under a poor hash.
    other = np.stack([np.arange(60) * 2**10 % size, np.arange(60) % size], 1).reshape(20, 3, 2)
    found = number_rows(size, [(one, 1, 3), (other, 0, 5)])
    run_chains([found.calls])
    rows = found.rows[: found.count[0]]
    assert sorted(rows.tolist()) == sorted(
        (set(one[:, 1].tolist()) - {3}) | (set(other[..., 0].ravel().tolist()) - {5})
    )
    for ids, numbers, padding in ((one[:, 1], found.numbers[0], 3), (other[..., 0], found.numbers[1], 5)):
        assert numbers.shape == (*ids.shape, 1)
        expected = np.where(ids == padding, -1, ids)
        np.testing.assert_array_equal(np.where(numbers[..., 0] < 0, -1, rows[numbers[..., 0]]), expected)


def test_number_rows_skips_ids_outside_the_table() -> None:
    found = number_rows(4, [(np.array([[-1], [4], [2], [2**60]]), 0, 0)])
    run_chains([found.calls])
    assert found.rows[: found.count[0]].tolist() == [2]
    assert found.numbers[0].ravel().tolist() == [-1, -1, 0, -1]
