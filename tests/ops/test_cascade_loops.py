"""The compiled loops give the scores, gradients and errors of torch, for any sizes and number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from recsys_topk.cascades.features import FeatureEmbedding
from recsys_topk.cascades.stages.din import DIN
from recsys_topk.cascades.stages.mlp import MLPStage
from recsys_topk.cascades.stages.two_tower import TwoTower
from recsys_topk.ops.dispatch import backend
from recsys_topk.ops.stages.attention import attention_logits
from recsys_topk.ops.stages.join_relu import join_relu
from recsys_topk.ops.stages.look_up import Slot, look_up
from recsys_topk.ops.stages.pooled_dot import dot
from tests.cascades.batches import random_batch, recflow_like_schema

SCHEMA = recflow_like_schema()


@pytest.fixture(params=[1, 3], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def gradients(stage: nn.Module, scores: Tensor) -> dict[str, Tensor]:
    weights = torch.linspace(-1.0, 1.0, scores.numel()).view_as(scores)
    stage.zero_grad()
    (scores * weights).sum().backward()
    return {name: p.grad.clone() for name, p in stage.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("activation", ["relu", "prelu"])
@pytest.mark.parametrize("stage_class", [TwoTower, DIN, MLPStage])
def test_stages_match_the_scores_and_gradients_of_torch(stage_class: type, activation: str) -> None:
    torch.manual_seed(1)
    stage = stage_class(FeatureEmbedding(SCHEMA, {"default": 4, "video_id": 6}), hidden=(16, 8), activation=activation)
    batch = random_batch(SCHEMA)
    scores = stage(batch)
    ours = gradients(stage, scores)
    with torch.no_grad():
        torch.testing.assert_close(stage(batch), scores, rtol=1e-5, atol=1e-5)
    with backend("torch"):
        plain = stage(batch)
        theirs = gradients(stage, plain)
    torch.testing.assert_close(scores, plain, rtol=1e-5, atol=1e-5)
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 9])
def test_attention_matches_torch_for_any_list_length_and_short_histories(number: int) -> None:
    torch.manual_seed(number)
    history, items, weight = torch.randn(6, 5, 7), torch.randn(8, 7), torch.randn(7)
    candidates, lengths = torch.randint(8, (6, number)), torch.tensor([0, 1, 2, 3, 4, 5])
    real = (torch.arange(5) < lengths[:, None])[:, None].expand(6, number, 5)
    upstream = torch.randn(6, number, 5) * real
    found, expected = [], []
    for into, simple in ((found, False), (expected, True)):
        leaves = [x.clone().requires_grad_() for x in (history, items, weight)]
        if simple:
            logits = torch.relu(leaves[0][:, None] + leaves[1][candidates][:, :, None]) @ leaves[2]
        else:
            logits = attention_logits(*leaves, candidates, lengths)
        (logits * upstream).sum().backward()
        into += [torch.where(real, logits, 0.0), *(x.grad for x in leaves)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_nan_is_propagated() -> None:
    history, items, weight = torch.randn(2, 3, 4), torch.randn(5, 4), torch.ones(4)
    items[1, 2] = float("nan")
    candidates = torch.tensor([[0, 1], [2, 3]])
    logits = attention_logits(history, items, weight, candidates, torch.tensor([3, 3]))
    assert logits.isnan().any(-1).tolist() == [[False, True], [False, False]]
    assert join_relu(None, torch.zeros(2, 4), items, candidates).isnan().any(-1).tolist() == [False, True, False, False]
    assert dot(torch.ones(2, 4), items, candidates).isnan().tolist() == [[False, True], [False, False]]


@pytest.mark.parametrize("identity", [-1, 10**6])
@pytest.mark.parametrize("kind", ["items", "history"])
@pytest.mark.parametrize("form", ["rows", "mean"])
def test_error_for_id_outside_its_table_names_the_id(identity: int, kind: str, form: str) -> None:
    batch = random_batch(SCHEMA)
    ids = getattr(batch, kind).clone()
    place = (int(batch.history_length.argmax()), 0, 0) if kind == "history" else (0, 0)
    ids[place] = identity
    with pytest.raises(IndexError, match=rf"{SCHEMA.history[0].table}: id {identity} is not in the table"):
        FeatureEmbedding(SCHEMA, 4)(batch.replace(**{kind: ids}), history=form)


def test_look_up_of_views_with_other_strides() -> None:
    slots = [Slot(kind=0, column=1, table=0, name="item", padding=0, start=0, dim=3)]
    ids, table = torch.tensor([[1, 2, 3], [4, 0, 2]]), torch.randn(5, 3)
    expected = table[ids[1]] * (ids[1] != 0)[:, None]
    for weights in (table, table.T.contiguous().T):
        found = look_up(slots, [ids.T], [weights.clone(memory_format=torch.preserve_format).requires_grad_()], None)
        torch.testing.assert_close(found[0], expected)


@pytest.mark.parametrize("stage_class", [TwoTower, DIN, MLPStage])
@pytest.mark.parametrize(("field", "wrong"), [("candidates", 10**6), ("candidates", -1), ("history_length", 10**6)])
def test_indices_outside_the_pool_raise(stage_class: type, field: str, wrong: int) -> None:
    batch = random_batch(SCHEMA)
    values = getattr(batch, field).clone()
    values.view(-1)[0] = wrong
    stage = stage_class(FeatureEmbedding(SCHEMA, 4), hidden=(16, 8))
    with pytest.raises(IndexError, match=rf"must be at least 0 and below \d+, got values from .*{wrong}"):
        stage(batch.replace(**{field: values}))
