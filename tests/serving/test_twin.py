"""Export copies of stages, and their ONNX files in onnxruntime, against the stages."""

from __future__ import annotations

import pytest
import torch

from recsys_topk.cascades.features import FeatureEmbedding
from recsys_topk.cascades.stage import Stage
from recsys_topk.cascades.stages import DIN, MLPStage, TwoTower
from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.serving.twin import ExportedModel, ItemVectors, ListScores, RequestVectors
from recsys_topk.tabular.schema import Feature, Schema
from tests.cascades.batches import mixed_schema, random_batch, recflow_like_schema

NUMERIC = Schema((), (Feature("age", kind="numeric"),), (), (Feature("picture", kind="vector", size=4),))
SCHEMAS = {"recflow": recflow_like_schema(), "mixed": mixed_schema(), "numeric": NUMERIC}
ORDERED = ["recency", {"kind": "transformer", "width": 8, "blocks": 2}]


def trained_stage(kind: type[Stage], schema: Schema, **options: object) -> Stage:
    """Return a stage in evaluation mode whose batch norm has non-default statistics."""
    torch.manual_seed(0)
    stage = kind(FeatureEmbedding(schema, dim=4), **options)
    with torch.no_grad():
        stage(random_batch(schema, seed=3))
    return stage.eval()


def inputs(model: ExportedModel, batch: CascadeBatch) -> list[torch.Tensor]:
    found = []
    for one in model.inputs:
        tensor = getattr(batch, one.name)
        lists = one.name.startswith("item") and isinstance(model, ListScores)
        found.append(tensor[batch.candidates] if lists else tensor)
    return found


CASES = [
    (kind, name)
    for kind in (TwoTower, DIN, MLPStage)
    for name, schema in SCHEMAS.items()
    if schema.history or kind != DIN
]


@pytest.mark.parametrize(("kind", "name"), CASES, ids=[f"{kind.name}-{name}" for kind, name in CASES])
@pytest.mark.parametrize("options", [{}, {"batch_norm": 0.9, "activation": "prelu"}], ids=["plain", "batch_norm"])
def test_export_copy_gives_the_scores_of_its_stage(kind: type[Stage], options: dict[str, object], name: str) -> None:
    schema = SCHEMAS[name]
    stage = trained_stage(kind, schema, **options)
    batch = random_batch(schema, seed=5)
    with torch.no_grad():
        wanted = stage(batch)[batch.mask]
        model = ListScores(stage, schema)
        found = model(*inputs(model, batch))[batch.mask]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6 * float(wanted.abs().max()))


@pytest.mark.parametrize("kind", [TwoTower, DIN, MLPStage])
@pytest.mark.parametrize("history", ORDERED, ids=["recency", "transformer"])
def test_export_copy_encodes_ordered_histories(kind: type[Stage], history: object) -> None:
    schema = mixed_schema(ages=True)
    stage, batch = trained_stage(kind, schema, history=history), random_batch(schema, seed=5)
    model = ListScores(stage, schema)
    with torch.no_grad():
        torch.testing.assert_close(
            model(*inputs(model, batch))[batch.mask], stage(batch)[batch.mask], rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_separate_towers_give_the_scores_of_the_stage_and_hold_only_their_tables(schema: Schema) -> None:
    stage = trained_stage(TwoTower, schema)
    batch = random_batch(schema, seed=5)
    requests, items = RequestVectors(stage, schema), ItemVectors(stage, schema)
    with torch.no_grad():
        wanted = stage(batch)
        users, pool = requests(*inputs(requests, batch)), items(*inputs(items, batch))
    found = (users[:, None] * pool[batch.candidates]).sum(-1)
    torch.testing.assert_close(found[batch.mask], wanted[batch.mask], rtol=0, atol=1e-6 * float(wanted.abs().max()))
    read = {part: {f.table for f in schema.features(part) if f.table} for part in ("request", "history", "items")}
    assert set(requests.stage.embedding.tables) == read["request"] | read["history"]
    assert set(items.stage.embedding.tables) == read["items"]
    assert not any(name.startswith("stage.item_tower") for name in requests.state_dict())
    assert not any(name.startswith("stage.user_tower") for name in items.state_dict())


def test_export_copy_shares_the_tables_of_its_stage() -> None:
    stage = trained_stage(DIN, SCHEMAS["recflow"])
    addresses = {weight.data_ptr() for weight in stage.embedding.parameters()}
    assert {
        weight.data_ptr() for weight in ListScores(stage, SCHEMAS["recflow"]).stage.embedding.parameters()
    } == addresses
