"""Encoders of histories against loops, torch's transformer layer, and worlds in which only order or time matters."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from recsys_topk.cascades.cascade import Cascade
from recsys_topk.cascades.encoders import RecencyEncoder, TransformerEncoder
from recsys_topk.cascades.encoders.relative_bias import BUCKETS, RelativeBias
from recsys_topk.cascades.features import FeatureEmbedding
from recsys_topk.cascades.stage import Stage, StageConfig, registry
from recsys_topk.cascades.stages import DIN, MLPStage, TwoTower
from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.tabular.schema import Feature, Schema, Table
from tests.cascades.batches import mixed_schema, random_batch

LENGTHS = torch.tensor([5, 3, 0, 1])


def draw_history(dim: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    real = torch.arange(5) < LENGTHS[:, None]
    ages = torch.rand(4, 5, generator=draw).mul(25.0).exp().sort(1, descending=True).values
    return torch.randn(4, 5, dim, generator=draw) * real[..., None], ages * real


def randomise(module: nn.Module) -> None:
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))


def logit(bias: RelativeBias, head: int, distance: int, gap: float | None) -> float:
    value = bias.by_distance[head, min(distance, bias.by_distance.shape[1] - 1)].item()
    if gap is None:
        return value
    assert bias.by_gap is not None
    return value + bias.by_gap[head, min(int(math.log2(1.0 + gap)), BUCKETS - 1)].item()


@pytest.mark.parametrize("timed", [False, True])
def test_recency_equals_a_loop_over_views(timed: bool) -> None:
    encoder = RecencyEncoder(3, timed, heads=2, distances=3)
    randomise(encoder)
    views, ages = draw_history(3)
    found = encoder(views, LENGTHS, ages if timed else None)
    for row, length in enumerate(LENGTHS.tolist()):
        for head in range(2):
            newest = length - 1
            gaps = [float(ages[row, j] - ages[row, newest]) if timed else None for j in range(length)]
            weights = [math.exp(logit(encoder.bias, head, newest - j, gap)) for j, gap in enumerate(gaps)]
            expected = sum((w / sum(weights) * views[row, j] for j, w in enumerate(weights)), torch.zeros(3))
            torch.testing.assert_close(found[row, 3 * head : 3 * head + 3], expected)


def test_transformer_equals_the_layers_of_torch() -> None:
    encoder = TransformerEncoder(8, blocks=2, heads=2, feedforward=3, distances=4, scale=2.0).eval()
    randomise(encoder)
    views, _ = draw_history(8)
    states = 2.0 * views
    for block in encoder.blocks:
        layer = nn.TransformerEncoderLayer(8, 2, 24, 0.0, "gelu", batch_first=True, norm_first=True).eval()
        layer.self_attn.load_state_dict(
            {
                "in_proj_weight": block.query_key_value.weight, "in_proj_bias": block.query_key_value.bias,
                "out_proj.weight": block.output.weight, "out_proj.bias": block.output.bias,
            }
        )  # fmt: skip
        parts = ((layer.norm1, block.attention_norm), (layer.norm2, block.feedforward_norm),
                 (layer.linear1, block.feedforward[0]), (layer.linear2, block.feedforward[2]))  # fmt: skip
        for theirs, ours in parts:
            theirs.load_state_dict(ours.state_dict())
        mask = torch.full((2, 5, 5), -torch.inf)
        for i in range(5):
            for j in range(i + 1):
                mask[:, i, j] = torch.tensor([logit(block.bias, head, i - j, None) for head in range(2)])
        states = layer(states, src_mask=mask.repeat(4, 1, 1))
    states = encoder.norm(states)
    found = encoder(views, LENGTHS)
    for row, length in enumerate(LENGTHS.tolist()):
        expected = states[row, length - 1] if length else torch.zeros(8)
        torch.testing.assert_close(found[row], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [TwoTower, MLPStage, DIN])
@pytest.mark.parametrize("history", ["mean", "recency", "transformer"])
def test_order_matters_unless_the_history_is_a_mean(kind: type[Stage], history: str) -> None:
    schema = mixed_schema()
    stage = kind(FeatureEmbedding(schema, 4), history=history).eval()
    if stage.encoder is not None:
        randomise(stage.encoder)
    if isinstance(stage, DIN) and stage.bias is not None:
        randomise(stage.bias)
    batch = random_batch(schema).replace(history_length=torch.full((6,), 7))
    turned = batch.replace(history=batch.history.flip(1), history_values=batch.history_values.flip(1))
    with torch.no_grad():
        apart = (stage(batch) - stage(turned))[batch.mask].abs().max()
    assert (apart < 1e-4) == (history == "mean")


ITEMS = 12
VIDEO = (Feature("video", "video"),)


def requests(draw: torch.Generator, timed: bool) -> CascadeBatch:
    """Histories of 6 views. The positive is the newest view or, if timed, the newest view of an earlier session."""
    views = torch.rand(64, ITEMS, generator=draw).argsort(1)[:, :6]
    last = torch.full((64,), 5)
    values = torch.empty(0, 0)
    if timed:
        last, steps = torch.randint(0, 5, (64,), generator=draw), torch.arange(6)
        values = ((5 - steps) * 60.0 + torch.where(steps <= last[:, None], 7200.0, 0.0))[..., None]
    return CascadeBatch(
        request_id=torch.arange(64),
        request=torch.empty(64, 0, dtype=torch.int64),
        history=1 + views[..., None],
        history_length=torch.full((64,), 6),
        history_values=values,
        item_id=torch.arange(ITEMS),
        items=1 + torch.arange(ITEMS)[:, None],
        candidates=torch.arange(ITEMS).expand(64, -1),
        labels=nn.functional.one_hot(views.gather(1, last[:, None])[:, 0], ITEMS).float(),
        mask=torch.ones(64, ITEMS, dtype=torch.bool),
        group=torch.zeros(64, ITEMS, dtype=torch.int64),
    )


@pytest.mark.parametrize(
    ("kind", "history", "timed", "learns"),
    [
        (TwoTower, "mean", False, False),
        (TwoTower, "recency", False, True),
        (TwoTower, {"kind": "transformer", "dropout": 0.0}, False, True),
        (DIN, "mean", False, False),
        (DIN, "recency", False, True),
        (TwoTower, "recency", True, True),
        (DIN, "recency", True, True),
    ],
)
def test_stage_learns_the_newest_view(kind: type[Stage], history: object, timed: bool, learns: bool) -> None:
    """Without order, the best accuracy is 1 / 6; with sessions, the distance alone is not enough."""
    torch.manual_seed(0)
    ages = (Feature("seconds", kind="age"),) if timed else ()
    schema = Schema((Table("video", ITEMS + 1),), (), (*VIDEO, *ages), VIDEO)
    stage = kind(FeatureEmbedding(schema, 16), hidden=(32, 16), history=history)
    optimizer, draw = torch.optim.Adam(stage.parameters(), lr=0.02), torch.Generator().manual_seed(0)
    for _ in range(120):
        batch = requests(draw, timed)
        loss = nn.functional.cross_entropy(stage(batch), batch.labels.argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    batch = requests(draw, timed)
    accuracy = (stage.eval()(batch).argmax(1) == batch.labels.argmax(1)).float().mean()
    assert accuracy > 0.8 if learns else accuracy < 0.4


def test_transitions_add_the_product_of_two_tables() -> None:
    schema = mixed_schema()
    stage = TwoTower(FeatureEmbedding(schema, 4), hidden=[8, 4], transitions=3).eval()
    assert (stage.width, len(table_weights(stage.pairs))) == (7, 2)
    batch = random_batch(schema)
    views, items = batch.history[..., 0], batch.items[:, list(schema.id_columns("items")).index("video_id") + 3]
    a, b = (table_weights(stage.pairs)[name] for name in ("history:video", "video"))
    with torch.no_grad():
        found = stage(batch) - TwoTower.score(without_pairs(stage), batch)
    for row in range(batch.size):
        length = int(batch.history_length[row])
        weights = torch.softmax(stage.recency.bias.by_distance[0, :length].flip(0), 0)
        user = (weights[:, None] * a[views[row, :length]]).sum(0)
        torch.testing.assert_close(found[row], b[items[batch.candidates[row]]] @ user, rtol=1e-4, atol=1e-4)


def table_weights(embedding: FeatureEmbedding) -> dict[str, Tensor]:
    return {name.split(".")[-2]: weight for name, weight in embedding.named_parameters()}


def without_pairs(stage: TwoTower) -> TwoTower:
    other = copy.deepcopy(stage)
    other.pairs = None
    return other


def test_encoder_options_that_do_not_fit_raise() -> None:
    schema = mixed_schema()
    for history, message in (
        ("recent", "did you mean 'recency'"),
        ({"heads": 2}, "mapping with its name as kind"),
        ({"kind": "recency", "head": 2}, "does not accept these options"),
        ({"kind": "transformer", "width": 8, "heads": 5}, "multiple of its heads"),
    ):
        with pytest.raises(ValueError, match=message):
            Cascade(schema, [StageConfig("mlp", "ranking", 5, {"history": history})])
    items_only = Schema((), (), (), (Feature("bm25", kind="numeric"),))
    with pytest.raises(ValueError, match="no history features"):
        Cascade(items_only, [StageConfig("mlp", "ranking", 5, {"history": "recency"})])
    with pytest.raises(ValueError, match="last feature of the history"):
        Schema((), (Feature("seconds", kind="age"),), (), (Feature("bm25", kind="numeric"),))


@pytest.mark.parametrize("kind", ["two_tower", "mlp", "din"])
def test_state_dict_keys_of_the_default_encoder_are_those_without_encoders(kind: str) -> None:
    stage = registry.resolve(kind)(FeatureEmbedding(mixed_schema(), 4))
    assert {key.split(".")[0] for key in stage.state_dict()} <= {
        "embedding", "mlp", "attention", "user_tower", "item_tower"
    }  # fmt: skip
