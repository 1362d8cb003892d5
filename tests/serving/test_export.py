"""Exported stages against the trained_stage stages, for sizes other than the traced ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from recsys_topk.cascades.stage import Stage
from recsys_topk.cascades.stages import DIN, MLPStage, TwoTower
from recsys_topk.serving.export import TOLERANCE, check, compare, models_of, onnx_scores, write_stage
from recsys_topk.serving.manifest import ManifestError, read_manifest, write_manifest
from tests.cascades.batches import mixed_schema, random_batch
from tests.serving.test_twin import NUMERIC, trained_stage

SIZES = [(1, 40, 1, 1), (1, 60, 50, 3), (7, 90, 20, 30), (33, 200, 5, 2)]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("export")
    schema = mixed_schema()
    options = {"batch_norm": 0.9, "activation": "prelu"}
    stages = {
        "retrieval": trained_stage(TwoTower, schema, **options),
        "preranking": trained_stage(MLPStage, schema),
        "ranking": trained_stage(DIN, schema, **options),
    }
    entries = tuple(
        write_stage(folder, name, stage.name, quota, models_of(stage, schema), programs=name == "ranking")
        for (name, stage), quota in zip(stages.items(), (4, 3, 2), strict=True)
    )
    write_manifest(folder, schema, entries, 2, {})
    return folder, schema, stages


@pytest.mark.parametrize("quotas", [{"retrieval": 4, "preranking": 3, "ranking": 2}, {"retrieval": 4, "ranking": 2}])
def test_exported_stages_match_the_trained_stages_at_any_size(exported, quotas: dict[str, int]) -> None:
    folder, schema, trained_stages = exported
    stages = {name: trained_stages[name] for name in quotas}
    manifest = read_manifest(folder)
    scores = {entry.name: onnx_scores(folder, entry) for entry in manifest.stages}
    batches = [
        random_batch(schema, size, pool, items, length, seed)
        for seed, (size, pool, items, length) in enumerate(SIZES)
        if items > 1
    ]
    agreement = compare(stages, list(quotas.values()), lambda name, batch: scores[name](batch), batches)
    assert agreement.same_sets
    assert agreement.requests == sum(batch.size for batch in batches)
    assert max(agreement.differences.values()) < TOLERANCE
    check(agreement)


def test_check_fails_for_a_stage_with_other_weights(exported) -> None:
    folder, schema, stages = exported
    manifest = read_manifest(folder)
    scores = {entry.name: onnx_scores(folder, entry) for entry in manifest.stages}
    other = {**stages, "preranking": trained_stage(MLPStage, schema, hidden=(8,))}
    agreement = compare(other, [4, 3, 2], lambda name, batch: scores[name](batch), [random_batch(schema)])
    with pytest.raises(RuntimeError, match="stage 'preranking' differs by"):
        check(agreement)


def test_numeric_features_alone_can_be_exported(tmp_path: Path) -> None:
    stage = trained_stage(TwoTower, NUMERIC)
    entry = write_stage(tmp_path, "only", "two_tower", 3, models_of(stage, NUMERIC), programs=False)
    score = onnx_scores(tmp_path, entry)
    check(compare({"only": stage}, [3], lambda name, batch: score(batch), [random_batch(NUMERIC, 5)]))


@pytest.mark.parametrize(
    ("kind", "history"),
    [
        pytest.param(TwoTower, "recency", marks=pytest.mark.long),
        (DIN, {"kind": "transformer", "width": 8, "blocks": 2}),
    ],
)
def test_stages_with_ordered_histories_are_exported(tmp_path: Path, kind: type[Stage], history: object) -> None:
    schema = mixed_schema(ages=True)
    options = {"transitions": 4, "popularity": True} if kind is TwoTower else {}
    stage = trained_stage(kind, schema, history=history, dropout=0.1, **options)
    entry = write_stage(tmp_path, "only", kind.name, 3, models_of(stage, schema), programs=False)
    score = onnx_scores(tmp_path, entry)
    batches = [random_batch(schema, *size, seed=seed) for seed, size in enumerate(SIZES)]
    check(compare({"only": stage}, [3], lambda name, batch: score(batch), batches))


def test_torch_program_gives_the_scores_of_its_stage(exported) -> None:
    import torch

    from recsys_topk.serving.twin import ListScores
    from tests.serving.test_twin import inputs

    folder, schema, stages = exported
    program = torch.export.load(folder / "ranking" / "scores.pt2").module()
    batch = random_batch(schema, 9, 50, 11, 4, seed=8)
    model = ListScores(stages["ranking"], schema)
    with torch.no_grad():
        wanted = stages["ranking"](batch)
        found = program(*inputs(model, batch))
    torch.testing.assert_close(found[batch.mask], wanted[batch.mask], rtol=0, atol=1e-5 * float(wanted.abs().max()))


def test_dynamic_axes_have_names(exported) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(exported[0] / "ranking" / "scores.onnx")
    axes = {one.name: one.shape[:-1] for one in session.get_inputs()}
    assert axes["items"] == ["batch", "items"]
    assert axes["history"] == ["batch", "views"]
    assert axes["history_length"] == []
    assert session.get_outputs()[0].shape == ["batch", "items"]


def test_exported_model_holds_only_the_tables_it_reads(exported) -> None:
    import onnx

    folder, schema, _ = exported
    rows = {table.name: table.rows for table in schema.tables}
    read = {"requests": {"user", "word", "video", "genre"}, "items": {"word", "video", "genre"}}
    for role, tables in read.items():
        weights = onnx.load(folder / "retrieval" / f"{role}.onnx").graph.initializer
        found = sorted(next(iter(one.dims)) for one in weights if list(one.dims)[1:] == [4] and "tables" in one.name)
        assert found == sorted(rows[name] for name in tables)


@pytest.mark.parametrize("name", ["ranking/scores.onnx", "retrieval/items.onnx", "ranking/scores.pt2"])
def test_flipped_byte_raises(exported, tmp_path: Path, name: str) -> None:
    import shutil

    folder = tmp_path / "copy"
    shutil.copytree(exported[0], folder)
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(bytes(content))
    with pytest.raises(ManifestError, match=r"does not match the manifest: .*export again"):
        read_manifest(folder)


@pytest.mark.parametrize("name", ["../outside.onnx", "/etc/passwd", "ranking/../../x", "..\\x"])
def test_manifest_that_names_a_file_outside_its_folder_raises(exported, tmp_path: Path, name: str) -> None:
    import json

    plain = json.loads((exported[0] / "manifest.json").read_text())
    plain["stages"][0]["models"]["items"]["file"] = name
    (tmp_path / "manifest.json").write_text(json.dumps(plain))
    with pytest.raises(ManifestError, match="not a path inside its folder"):
        read_manifest(tmp_path)


def test_link_out_of_the_folder_raises(exported, tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "copy"
    shutil.copytree(exported[0], folder)
    target = tmp_path / "elsewhere.onnx"
    (folder / "ranking/scores.onnx").rename(target)
    (folder / "ranking/scores.onnx").symlink_to(target)
    with pytest.raises(ManifestError, match="is a link to a path outside the folder"):
        read_manifest(folder)


def test_files_of_two_exports_mixed_raise(exported, tmp_path: Path) -> None:
    import shutil

    folder, _, _ = exported
    mixed = tmp_path / "mixed"
    shutil.copytree(folder, mixed)
    (mixed / "preranking" / "scores.onnx").write_bytes((folder / "ranking" / "scores.onnx").read_bytes())
    with pytest.raises(ManifestError, match="mixed with another one"):
        read_manifest(mixed)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 9}', '{"format": 1, "schema": 3}'])
def test_damaged_manifest_raises_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ManifestError, match=r"manifest\.json"):
        read_manifest(tmp_path)


def test_single_mlp_stage_with_numeric_features_is_exported_and_recommends(tmp_path: Path) -> None:
    import numpy as np
    import torch

    from recsys_topk.cascades.module import CascadeModule
    from recsys_topk.serving.export import export_cascade
    from recsys_topk.serving.index import build_index
    from recsys_topk.serving.recommend import CascadeRecommender
    from tests.datamodules.numeric_only import NumericOnly

    data = NumericOnly()
    stages = [{"kind": "mlp", "name": "only", "quota": 6}]
    model = CascadeModule(loss="dftopk", schema=data.schema, stages=stages, k=4)
    report = export_cascade(model, data, tmp_path / "export", programs=False)
    assert report.agreement.same_sets
    recommender = CascadeRecommender.from_export(tmp_path / "export")
    found = recommender.funnel.run(_requests_without_features(2))
    with torch.no_grad():
        batch = next(iter(data.test_dataloader()))
        scores = model(batch.plain())[0]
    # Scores depend on the item alone here, so an item has the same score in a list and in the catalogue.
    wanted = {int(item): float(score) for item, score in zip(
        batch.item_id[batch.candidates][batch.mask], scores[batch.mask], strict=True)}  # fmt: skip
    every = np.concatenate([scores[0] for _, scores in recommender.funnel.chunks(_requests_without_features(1))])
    for item, score in wanted.items():
        assert every[item] == pytest.approx(score, rel=1e-4, abs=1e-5)
    best = np.argsort(-every, kind="stable")[:6]
    assert [own[0].rows.tolist() for own in found] == [best.tolist()] * 2
    with pytest.raises(ValueError, match="has no item vectors, so it cannot be indexed"):
        build_index(tmp_path / "export", tmp_path / "index")
    with pytest.raises(ValueError, match="has no users"):
        recommender.recommend([1])


@pytest.mark.parametrize("spoiled", ["all weights", "one bias", "scores"])
def test_weights_or_scores_that_are_not_finite_fail_the_export(tmp_path: Path, spoiled: str) -> None:
    import torch

    from recsys_topk.cascades.module import CascadeModule
    from recsys_topk.serving.export import export_cascade
    from tests.datamodules.numeric_only import NumericOnly

    data = NumericOnly()
    stages = [{"kind": "mlp", "name": "only", "quota": 6}]
    model = CascadeModule(loss="dftopk", schema=data.schema, stages=stages, k=4)
    with torch.no_grad():
        for name, weight in model.cascade.stages["only"].named_parameters():
            if spoiled == "all weights":
                weight.fill_(torch.nan)
            elif spoiled == "scores":
                weight.fill_(3e38)
            elif name.endswith("bias"):
                weight[0] = torch.inf
    with pytest.raises(ValueError, match=r"not finite.*; no export was written: export an earlier checkpoint"):
        export_cascade(model, data, tmp_path / "export", programs=False)
    assert list(tmp_path.iterdir()) == []


def test_comparison_with_scores_that_are_not_finite_fails(exported) -> None:
    folder, schema, stages = exported
    scores = {entry.name: onnx_scores(folder, entry) for entry in read_manifest(folder).stages}

    def score(name: str, batch):
        found = scores[name](batch)
        return found * float("nan") if name == "preranking" else found

    agreement = compare(stages, [4, 3, 2], score, [random_batch(schema)])
    with pytest.raises(RuntimeError, match="stage 'preranking' differs by inf"):
        check(agreement)


def _requests_without_features(number: int):
    import numpy as np

    from recsys_topk.serving.requests import EncodedRequests

    none = np.empty((number, 0), dtype=np.float32)
    views = np.empty((number, 1, 0), dtype=np.float32)
    return EncodedRequests(none, none, views, np.zeros(number), views, (np.empty(0, dtype=np.int64),) * number)
