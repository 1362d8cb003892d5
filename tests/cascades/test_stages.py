"""Each stage against a simple implementation: one embedding look-up per slot, one concatenation per candidate."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from recsys_topk.cascades.cascade import Cascade
from recsys_topk.cascades.features import FeatureEmbedding, table_sizes
from recsys_topk.cascades.layers import MLP
from recsys_topk.cascades.stage import StageConfig
from recsys_topk.cascades.stages.din import DIN
from recsys_topk.cascades.stages.mlp import MLPStage
from recsys_topk.cascades.stages.two_tower import TwoTower
from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.ops.stages import attention
from recsys_topk.ops.stages.attention import attention_logits
from recsys_topk.tabular.schema import Feature, Schema, Table
from tests.cascades.batches import random_batch, recflow_like_schema

SCHEMA = recflow_like_schema()


def table_weight(embedding: FeatureEmbedding, name: str) -> Tensor:
    for key, weight in embedding.state_dict().items():
        if key.endswith(f".{name}.weight"):
            return weight
    raise KeyError(name)


def look_up(embedding: FeatureEmbedding, kind: str, row: Tensor) -> Tensor:
    """Embed one row of ids, feature by feature, in the order that the stage uses."""
    order = [t.name for kinds, tables in embedding.groups.items() if kind in kinds for t in tables]
    column = {feature.table: i for i, feature in enumerate(getattr(SCHEMA, kind))}
    parts = []
    for name in order:
        identity = int(row[column[name]])
        weight = table_weight(embedding, name)[identity]
        parts.append(torch.zeros_like(weight) if identity == SCHEMA.table(name).padding else weight)
    return torch.cat(parts)


def run(mlp: MLP, x: Tensor) -> Tensor:
    return nn.Sequential(mlp.first, *mlp.tail)(x)


def score_simply(stage: nn.Module, batch: CascadeBatch, b: int, n: int) -> Tensor:
    embedding = stage.embedding
    request = look_up(embedding, "request", batch.request[b])
    item = look_up(embedding, "items", batch.items[batch.candidates[b, n]])
    count = int(batch.history_length[b])
    views = [look_up(embedding, "history", batch.history[b, step]) for step in range(count)]
    width = embedding.dims["history"]
    if isinstance(stage, DIN):
        interest = torch.zeros(width)
        if views:
            pairs = torch.stack([torch.cat([view, item[:width]]) for view in views])
            weights = torch.softmax(run(stage.attention, pairs)[:, 0], 0)
            interest = (weights[:, None] * torch.stack(views)).sum(0)
        return run(stage.mlp, torch.cat([request, interest, item])[None])[0, 0]
    mean = torch.stack(views).mean(0) if views else torch.zeros(width)
    if isinstance(stage, MLPStage):
        return run(stage.mlp, torch.cat([request, mean, item])[None])[0, 0]
    assert isinstance(stage, TwoTower)
    user = run(stage.user_tower, torch.cat([request, mean])[None])[0]
    return user @ run(stage.item_tower, item[None])[0]


@pytest.mark.parametrize("stage_class", [TwoTower, DIN, MLPStage])
@pytest.mark.parametrize("activation", ["relu", "prelu"])
def test_scores_equal_the_simple_implementation(stage_class: type, activation: str) -> None:
    torch.manual_seed(1)
    stage = stage_class(FeatureEmbedding(SCHEMA, 4), hidden=(16, 8), activation=activation)
    batch = random_batch(SCHEMA)
    with torch.no_grad():
        scores = stage(batch)
        for b in range(batch.size):
            for n in range(batch.candidates.shape[1]):
                if batch.mask[b, n]:
                    torch.testing.assert_close(scores[b, n], score_simply(stage, batch, b, n), rtol=1e-5, atol=1e-5)


def test_default_architecture_matches_the_paper_code() -> None:
    embedding = FeatureEmbedding(SCHEMA, 8)
    shapes = {name: [tuple(layer.weight.shape) for layer in mlp.modules() if isinstance(layer, nn.Linear)]
              for name, mlp in [("user", TwoTower(embedding).user_tower), ("item", TwoTower(embedding).item_tower),
                                ("attention", DIN(embedding).attention), ("din", DIN(embedding).mlp),
                                ("mlp", MLPStage(embedding).mlp)]}  # fmt: skip
    assert shapes == {
        "user": [(128, 104), (64, 128), (32, 64)],
        "item": [(128, 64), (64, 128), (32, 64)],
        "attention": [(80, 80), (1, 80)],
        "din": [(128, 168), (128, 128), (32, 128), (1, 32)],
        "mlp": [(128, 168), (64, 128), (32, 64), (1, 32)],
    }


@pytest.mark.parametrize("budget", [8 * 3 * 5, 8 * 3 * 5 * 3, 8 * 3 * 5 * 4 * 2, 10**6])
def test_attention_logits_equal_the_formula_in_blocks_of_any_size(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one item, three items, two lists and everything; float64 does not use the compiled loop."""
    monkeypatch.setattr(attention, "_CPU_BYTES", budget)
    torch.manual_seed(0)
    history, items, weight = (
        torch.randn(shape, dtype=torch.double, requires_grad=True) for shape in [(9, 5, 3), (7, 3), (3,)]
    )
    candidates, lengths = torch.randint(7, (9, 4)), torch.full((9,), 5)
    expected = torch.relu(history[:, None] + items[candidates][:, :, None]) @ weight
    torch.testing.assert_close(attention_logits(history, items, weight, candidates, lengths), expected)
    assert torch.autograd.gradcheck(attention_logits, (history, items, weight, candidates, lengths))


def test_stage_has_towers_unless_it_overrides_the_score() -> None:
    class Scaled(TwoTower):
        def score(self, batch: CascadeBatch) -> Tensor:
            return 2 * super().score(batch)

    embedding = FeatureEmbedding(SCHEMA, 4)
    stage = TwoTower(embedding)
    assert stage.towers is stage
    assert [other.towers for other in (Scaled(embedding), DIN(embedding), MLPStage(embedding))] == [None] * 3


def test_embedding_dimension_per_table() -> None:
    embedding = FeatureEmbedding(SCHEMA, {"default": 4, "video_id": 16})
    assert embedding.dims == {"request": 32, "items": 44, "history": 32}
    assert table_sizes(embedding)[0]["table"] == "video_id"
    with pytest.raises(ValueError, match="unknown tables \\['vidoe_id'\\]"):
        FeatureEmbedding(SCHEMA, {"default": 4, "vidoe_id": 16})
    with pytest.raises(ValueError, match="no embedding dimension for tables"):
        FeatureEmbedding(SCHEMA, {"video_id": 16})


def test_unknown_table_in_schema_raises() -> None:
    with pytest.raises(ValueError, match="names table 'b'"):
        Schema((Table("a", 3),), (Feature("x", "b"),), (), ())


def test_invalid_stages_raise() -> None:
    two_tower = StageConfig("two_tower", "retrieval", 30)
    with pytest.raises(ValueError, match="must not exceed that of the stage before it"):
        Cascade(SCHEMA, [two_tower, StageConfig("din", "ranking", 40)])
    with pytest.raises(ValueError, match="must be unique"):
        Cascade(SCHEMA, [two_tower, two_tower])
    with pytest.raises(ValueError, match="did you mean 'two_tower'"):
        Cascade(SCHEMA, [StageConfig("two_towers", "retrieval", 30)])
    with pytest.raises(ValueError, match="does not accept these options"):
        Cascade(SCHEMA, [StageConfig("din", "ranking", 20, {"hiden": [3]})])
    with pytest.raises(ValueError, match="at least one item"):
        StageConfig("din", "ranking", 0)


@pytest.mark.parametrize("name", ["", "a.b", "../a", "a\\b", "a\x1b[2Jb", "a\nb"])
def test_stage_name_that_is_no_folder_and_no_key_raises(name: str) -> None:
    with pytest.raises(ValueError, match="a stage name must be printable text without"):
        StageConfig("two_tower", name, 10)
    assert StageConfig("two_tower", "Vorauswahl für Gäste-1", 10).name == "Vorauswahl für Gäste-1"


@pytest.mark.parametrize("std", [float("nan"), -1.0, float("inf")])
def test_spread_of_tables_that_is_no_finite_number_raises(std: float) -> None:
    with pytest.raises(ValueError, match="init_std must be a finite number >= 0"):
        Cascade(recflow_like_schema(), [StageConfig("two_tower", "a", 10)], init_std=std)


def test_shared_embeddings_are_one_set_of_parameters() -> None:
    stages = [StageConfig("two_tower", "retrieval", 5), StageConfig("din", "ranking", 3)]
    apart = sum(p.numel() for p in Cascade(SCHEMA, stages).parameters())
    shared_cascade = Cascade(SCHEMA, stages, share_embeddings=True)
    tables = sum(p.numel() for p in FeatureEmbedding(SCHEMA).parameters())
    assert apart - sum(p.numel() for p in shared_cascade.parameters()) == tables
    assert [scores.shape for scores in shared_cascade(random_batch(SCHEMA))] == [(6, 12), (6, 12)]
