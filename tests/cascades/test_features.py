"""FeatureEmbedding with four kinds of features, for every way of reading the tables and kind of device."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from recsys_topk.cascades import features
from recsys_topk.cascades.cascade import Cascade
from recsys_topk.cascades.features import Embedded, FeatureEmbedding, HistoryForm
from recsys_topk.cascades.optimizers import fused_optimizer, make_optimizer, table_collections
from recsys_topk.cascades.stage import StageConfig
from recsys_topk.cascades.stages.din import DIN
from recsys_topk.cascades.stages.mlp import MLPStage
from recsys_topk.cascades.stages.two_tower import TwoTower
from recsys_topk.cascades.tables import is_fused, is_plain
from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.ops import backend
from recsys_topk.tabular.schema import Feature, Schema, Table
from tests.cascades.batches import mixed_schema, random_batch, recflow_like_schema

MIXED, RECFLOW = mixed_schema(), recflow_like_schema()
# The features of the mixed schema in output order: those shared with the history, other ids, values.
ORDER = {
    "request": ["query", "user_id", "age", "place"],
    "items": ["video_id", "genres", "similar_id", "title", "price", "picture"],
    "history": ["video_id", "genres", "dwell"],
}
DIMS = {"default": 4, "video": 8}


def weights_of(embedding: FeatureEmbedding) -> dict[str, Tensor]:
    return {name.split(".")[-2]: weight for name, weight in embedding.state_dict().items()}


def embed_row_simply(embedding: FeatureEmbedding, part: str, ids: Tensor, values: Tensor) -> Tensor:
    """Embed one row feature by feature, from the definitions in `Feature`."""
    weights, found, next_id, next_value = weights_of(embedding), {}, 0, 0
    for feature in MIXED.features(part):  # type: ignore[arg-type]
        if feature.table is None:
            found[feature.name] = values[next_value : next_value + feature.size]
            next_value += feature.size
            continue
        own = [int(i) for i in ids[next_id : next_id + feature.size]]
        next_id += feature.size
        real = [i for i in own if i != MIXED.table(feature.table).padding]
        rows = [weights[feature.table][i] for i in real]
        found[feature.name] = sum(rows) / len(rows) if rows else torch.zeros(weights[feature.table].shape[1])
    return torch.cat([found[name] for name in ORDER[part]])


def embed_simply(embedding: FeatureEmbedding, batch: CascadeBatch, history: HistoryForm) -> Embedded:
    request = [
        embed_row_simply(embedding, "request", *row) for row in zip(batch.request, batch.request_values, strict=True)
    ]
    items = [embed_row_simply(embedding, "items", *row) for row in zip(batch.items, batch.item_values, strict=True)]
    lists = []
    for b in range(batch.size):
        steps = zip(batch.history[b], batch.history_values[b], strict=True)
        views = torch.stack([embed_row_simply(embedding, "history", *row) for row in steps])
        lists.append(views if history == "rows" else views.sum(0) / max(int(batch.history_length[b]), 1))
    return Embedded(torch.stack(request), torch.stack(items), torch.stack(lists))


def parts(embedded: Embedded) -> dict[str, Tensor]:
    return {"request": embedded.request, "items": embedded.items, "history": embedded.history}


def assert_same(found: Embedded, expected: Embedded) -> None:
    for name, part in parts(expected).items():
        torch.testing.assert_close(parts(found)[name], part, rtol=1e-5, atol=1e-6, msg=lambda t, n=name: f"{n}: {t}")


def gradients(embedding: FeatureEmbedding, embedded: Embedded) -> dict[str, Tensor]:
    embedding.zero_grad()
    total = sum((x * torch.linspace(-1.0, 2.0, x.numel()).view_as(x)).sum() for x in parts(embedded).values())
    total.backward()  # type: ignore[union-attr]
    return {name: weight.grad.clone() for name, weight in embedding.named_parameters()}


@pytest.mark.parametrize("history", ["rows", "mean"])
@pytest.mark.parametrize("static", [False, True])
def test_four_kinds_equal_the_simple_implementation(
    history: HistoryForm, static: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "needs_static_shapes", lambda _: static)
    embedding = FeatureEmbedding(MIXED, DIMS)
    batch = random_batch(MIXED)
    assert embedding.dims == {"request": 11, "items": 28, "history": 13}
    assert embedding.shared_dim == 12
    with torch.no_grad():
        assert_same(embedding(batch, history=history), embed_simply(embedding, batch, history))


@pytest.mark.parametrize("schema", [MIXED, RECFLOW], ids=["mixed", "recflow"])
@pytest.mark.parametrize("history", ["rows", "mean"])
def test_static_shapes_and_torch_backend_give_the_values_and_gradients_of_the_cpu_path(
    schema: Schema, history: HistoryForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    embedding = FeatureEmbedding(schema, 4)
    batch = random_batch(schema)
    expected = embedding(batch, history=history)
    wanted = gradients(embedding, expected)
    for static in (False, True):
        monkeypatch.setattr(features, "needs_static_shapes", lambda _, static=static: static)
        with backend("torch"):
            found = embedding(batch, history=history)
        assert_same(found, expected)
        for name, gradient in gradients(embedding, found).items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("static", [False, True])
def test_fused_tables_give_the_same_result_in_training_and_inference_mode(
    name: str, static: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "needs_static_shapes", lambda _: static)
    torch.manual_seed(0)
    embedding = FeatureEmbedding(MIXED, DIMS, fused=fused_optimizer(name, 0.1))
    batch = random_batch(MIXED)
    for history in ("rows", "mean"):
        trained = embedding(batch, history=history)
        assert trained.items.requires_grad
        with torch.inference_mode():
            assert_same(embedding(batch, history=history), trained)


def test_fused_sgd_updates_tables_like_ordinary_sgd(monkeypatch: pytest.MonkeyPatch) -> None:
    """With bags, with two features on one table, and with both shapes of ids."""
    torch.manual_seed(0)
    ordinary = FeatureEmbedding(MIXED, DIMS)
    batch = random_batch(MIXED)
    step = gradients(ordinary, ordinary(batch, history="mean"))
    for static in (False, True):
        with torch.device("meta" if static else "cpu"):  # tables from the meta device are ready for static shapes
            fused = FeatureEmbedding(MIXED, DIMS, fused=fused_optimizer("sgd", 0.5))
        fused.to_empty(device="cpu") if static else fused
        fused.load_state_dict(ordinary.state_dict())
        monkeypatch.setattr(features, "needs_static_shapes", lambda _, static=static: static)
        found = fused(batch, history="mean")
        sum((x * torch.linspace(-1.0, 2.0, x.numel()).view_as(x)).sum() for x in parts(found).values()).backward()  # type: ignore[union-attr]
        for name, weight in ordinary.state_dict().items():
            torch.testing.assert_close(fused.state_dict()[name], weight - 0.5 * step[name], rtol=1e-5, atol=1e-5)


def schema_of(request: list[Feature], history: list[Feature], items: list[Feature]) -> Schema:
    tables = (Table("user", 9), Table("video", 30), Table("author", 9))
    return Schema(tables, tuple(request), tuple(history), tuple(items))


VIDEO, USER, PRICE = Feature("video_id", "video"), Feature("user_id", "user"), Feature("price", kind="numeric")


@pytest.mark.parametrize(
    ("schema", "stages"),
    [
        (schema_of([USER], [], [VIDEO]), [TwoTower, MLPStage]),
        (schema_of([], [VIDEO], [VIDEO]), [TwoTower, DIN, MLPStage]),
        (schema_of([], [], [VIDEO]), [MLPStage]),
        (schema_of([USER], [VIDEO], [PRICE]), [TwoTower, DIN, MLPStage]),
        (schema_of([PRICE], [PRICE], [PRICE]), [TwoTower, DIN, MLPStage]),
        (schema_of([USER], [VIDEO, Feature("author_id", "author")], [PRICE, VIDEO]), [TwoTower, DIN, MLPStage]),
    ],
    ids=["no history", "no request", "items only", "numeric items", "no tables", "table of the history only"],
)
def test_parts_that_a_stage_does_not_need_may_be_absent(schema: Schema, stages: list[type]) -> None:
    batch = random_batch(schema)
    for stage_class in (TwoTower, DIN, MLPStage):
        if stage_class not in stages:
            with pytest.raises(ValueError, match=f"stage '{stage_class.name}' .* use the stage 'mlp'"):
                stage_class(FeatureEmbedding(schema, 4))
            continue
        stage = stage_class(FeatureEmbedding(schema, 4), hidden=(8, 4))
        scores = stage(batch)
        assert scores.shape == batch.candidates.shape
        scores.sum().backward()
        unused = [name for name, p in stage.named_parameters() if p.requires_grad and p.grad is None]
        assert unused == []


def test_attention_reads_only_features_shared_by_items_and_history() -> None:
    schema = schema_of([USER], [Feature("author_id", "author"), VIDEO], [PRICE, VIDEO])
    stage = DIN(FeatureEmbedding(schema, {"default": 4, "author": 3}), hidden=(8,))
    assert stage.attention.inputs == [7, 4]
    nothing_shared = schema_of([USER], [Feature("author_id", "author")], [PRICE, VIDEO])
    assert DIN(FeatureEmbedding(nothing_shared, 4), hidden=(8,)).attention.inputs == [4, 5]


def test_invalid_arguments_raise() -> None:
    with pytest.raises(ValueError, match=r"multiple of 4, got \{'video': 6, .*use embedding_optimizer 'same'"):
        FeatureEmbedding(MIXED, 6, fused=fused_optimizer("sgd", 0.1))
    with pytest.raises(ValueError, match="no item features"):
        FeatureEmbedding(schema_of([USER], [VIDEO], []))
    with pytest.raises(ValueError, match=r"at least 1, got \{'default': 0\}"):
        FeatureEmbedding(RECFLOW, 0)
    batch = random_batch(MIXED)
    with pytest.raises(ValueError, match=r"4 values for items .price, picture., but the batch has 0; .* item_values"):
        FeatureEmbedding(MIXED)(batch.replace(item_values=torch.empty(0, 0)))


@pytest.mark.parametrize("fused", [None, fused_optimizer("adagrad", 0.1)], ids=["plain", "fused"])
@pytest.mark.parametrize("history", ["rows", "mean"])
def test_meta_device_gives_shapes_without_allocating_weights(fused: object, history: HistoryForm) -> None:
    huge = schema_of([USER], [VIDEO], [VIDEO]).to_dict()
    huge["tables"][1]["rows"] = 10**12
    schema = Schema.from_dict(huge)
    batch = random_batch(schema_of([USER], [VIDEO], [VIDEO]))
    embedding = FeatureEmbedding(schema, 96, fused=fused, device="meta")  # type: ignore[arg-type]
    assert all(weight.is_meta for weight in embedding.parameters())
    found = embedding(batch.to("meta"), history=history)
    assert found.items.shape == (40, 96)
    assert found.history.shape == ((6, 7, 96) if history == "rows" else (6, 96))
    with torch.device("meta"):
        assert all(weight.is_meta for weight in FeatureEmbedding(schema).parameters())


@pytest.mark.parametrize("name", ["same", "adagrad"])
def test_tables_are_initialised_by_to_empty(name: str) -> None:
    embedding = FeatureEmbedding(RECFLOW, 8, init_std=0.5, fused=fused_optimizer(name, 0.1), device="meta")
    keys = list(embedding.state_dict())
    embedding.to_empty(device="cpu")
    assert list(embedding.state_dict()) == keys == list(FeatureEmbedding(RECFLOW, 8).state_dict())
    weight = weights_of(embedding)["video_id"]
    assert weight.std().item() == pytest.approx(0.5, rel=0.1)
    wanted = is_plain if name == "same" else is_fused
    assert all(wanted(collection) for collection in embedding.collections.values())


@pytest.mark.parametrize("name", ["same", "adagrad"])
def test_shared_tables_are_materialised_once(name: str) -> None:
    stages = [StageConfig("two_tower", "retrieval", 5), StageConfig("mlp", "ranking", 3)]
    with torch.device("meta"):
        cascade = Cascade(RECFLOW, stages, share_embeddings=True, fused=fused_optimizer(name, 0.1))
    cascade.to_empty(device="cpu")
    embedding = cascade.stages["ranking"].embedding
    assert embedding is cascade.stages["retrieval"].embedding
    assert weights_of(embedding)["video_id"].std().item() == pytest.approx(1.0, rel=0.1)


def test_moved_embedding_can_be_pickled_and_copied() -> None:
    embedding = FeatureEmbedding(MIXED, 4).to("cpu")
    batch = random_batch(MIXED)
    for again in (pickle.loads(pickle.dumps(embedding)), copy.deepcopy(embedding)):
        assert_same(again(batch), embedding(batch))


class Moved(nn.Module):
    """Moves the parameters to new memory with the same values, as `.to(another device)` does."""

    def __init__(self, embedding: FeatureEmbedding) -> None:
        super().__init__()
        self.embedding = embedding
        self._apply(lambda tensor: tensor.detach().clone())


def test_fused_tables_update_their_weights_after_a_move() -> None:
    embedding = FeatureEmbedding(RECFLOW, 4, fused=fused_optimizer("sgd", 1.0))
    before = {name: weight.clone() for name, weight in embedding.state_dict().items()}
    Moved(embedding)
    batch = random_batch(RECFLOW)
    for name, weight in embedding.state_dict().items():
        assert torch.equal(weight, before[name])
    embedding(batch).items.sum().backward()  # the kernel must update the weights of the state dict
    used = batch.items[:, 0].unique()
    moved = weights_of(embedding)["video_id"]
    old = next(weight for name, weight in before.items() if ".video_id." in name)
    assert (moved[used] < old[used]).all()
    assert all(is_plain(collection) for collection in copy.deepcopy(embedding).to("meta").collections.values())
    with pytest.raises(ValueError, match=r"hold float32, got torch\.float64"):
        embedding.double()


def test_defuse_keeps_the_weights_and_returns_the_optimizer() -> None:
    fused = fused_optimizer("rowwise_adagrad", 0.3)
    embedding = FeatureEmbedding(MIXED, 4, fused=fused)
    before = {name: weight.clone() for name, weight in embedding.state_dict().items()}
    assert embedding.defuse() is fused
    assert embedding.defuse() is None
    assert all(is_plain(collection) for collection in embedding.collections.values())
    assert all(torch.equal(weight, before[name]) for name, weight in embedding.state_dict().items())
    assert embedding(random_batch(MIXED)).items.requires_grad


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by torch when the next line is imported
def test_optimizer_of_defused_tables_can_be_applied_later() -> None:
    """A strategy places plain tables first, then applies their optimizer inside backward."""
    from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward

    torch.manual_seed(0)
    fused = FeatureEmbedding(RECFLOW, 4, fused=fused_optimizer("sgd", 0.5))
    later = FeatureEmbedding(RECFLOW, 4, fused=fused_optimizer("sgd", 0.5))
    later.load_state_dict(fused.state_dict())
    optimizer = later.defuse()
    assert optimizer is not None
    apply_optimizer_in_backward(optimizer.optimizer, later.collections.parameters(), dict(optimizer.options))
    assert layers_of_the_dense_optimizer(MLPStage(later, hidden=(8,))) == ["mlp.first", "mlp.tail.1"]
    batch = random_batch(RECFLOW)
    for embedding in (fused, later):
        embedding(batch).items.square().sum().backward()
    for name, weight in fused.state_dict().items():
        torch.testing.assert_close(later.state_dict()[name], weight, rtol=1e-5, atol=1e-6)


def layers_of_the_dense_optimizer(stage: nn.Module) -> list[str]:
    """Return the layers that the ordinary optimizer of a stage updates."""
    chosen = {id(p) for group in make_optimizer("sgd", stage, 0.1, {}).param_groups for p in group["params"]}
    return sorted({name.rpartition(".")[0] for name, p in stage.named_parameters() if id(p) in chosen})


class OwnTables(nn.Module):
    """A collection of a class that this package does not know, such as a sharded one."""

    def __init__(self, optimizer: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 2))
        self.fused_optimizer = optimizer


def test_optimizer_finds_tables_of_any_class() -> None:
    stage = MLPStage(FeatureEmbedding(RECFLOW, 4), hidden=(8,))
    assert set(table_collections(stage)) == {
        "embedding.collections.items_history", "embedding.collections.request_items", "embedding.collections.request"
    }  # fmt: skip
    inner = FeatureEmbedding(RECFLOW, 4, fused=fused_optimizer("sgd", 0.1)).collections["request"].fused_optimizer()
    stage.embedding.collections["request"] = OwnTables(inner)
    made = make_optimizer("sgd", stage, 0.1, {})
    assert list(made.state_dict()["fused"]) == ["embedding.collections.request"]
    dense = {id(p) for group in made.param_groups for p in group["params"]}
    assert id(stage.embedding.collections["request"].weight) not in dense
    assert id(next(stage.embedding.collections["items_history"].parameters())) in dense
    later = next(stage.embedding.collections["items_history"].parameters())
    later._in_backward_optimizers = [inner]  # type: ignore[attr-defined]  # set by apply_optimizer_in_backward
    dense = {id(p) for group in make_optimizer("sgd", stage, 0.1, {}).param_groups for p in group["params"]}
    assert id(later) not in dense
