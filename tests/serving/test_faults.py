"""Exports that must never be used: damaged, changed, with models that fail. And what the service says about them."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from recsys_topk.serving.current import CurrentExport
from recsys_topk.serving.funnel import ModelFaultError
from recsys_topk.serving.index import build_index
from recsys_topk.serving.manifest import FILE, SEAL, ManifestError, read_manifest, write_manifest
from recsys_topk.serving.recommend import CascadeRecommender
from recsys_topk.serving.service import ServiceOptions, make_app
from tests.serving.conftest import OLD_EXPORT


def copy(sealed: Path, target: Path, k: int | None = None) -> Path:
    """Copy an export, with another k."""
    shutil.copytree(sealed, target)
    if k is not None:
        seal(target, k)
    return target


def seal(folder: Path, k: int | None = None) -> None:
    """Write the manifest of a folder again, for the files as they are."""
    manifest = read_manifest(folder, verify=False)
    write_manifest(folder, manifest.schema, manifest.stages, k or manifest.k, manifest.facts)


def point(link: Path, target: Path) -> None:
    """Change a link as a publisher does."""
    fresh = link.with_name("fresh")
    fresh.symlink_to(target)
    fresh.rename(link)


def spoil(path: Path, value: float = float("nan")) -> None:
    """Set all weights of an ONNX file."""
    import onnx

    model = onnx.load(path)
    for weight in model.graph.initializer:
        if weight.data_type == onnx.TensorProto.FLOAT:
            weight.CopyFrom(onnx.numpy_helper.from_array(np.full(weight.dims, value, np.float32), weight.name))
    onnx.save(model, path)


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "stages reversed": lambda plain: plain["stages"].reverse(),
    "another k": lambda plain: plain.update(k=plain["k"] - 1),
    "an entry dropped": lambda plain: plain["files"].pop("users.arrow"),
    "another fact": lambda plain: plain["facts"].update(views=1),
    "the seal removed": lambda plain: plain.pop("seal"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_manifest_raises_an_error_that_names_it(sealed_export: Path, tmp_path: Path, change: str) -> None:
    folder = copy(sealed_export, tmp_path / "export")
    plain = json.loads((folder / FILE).read_text())
    CHANGES[change](plain)
    (folder / FILE).write_text(json.dumps(plain))
    with pytest.raises(ManifestError, match=f"{folder / FILE}.* does not match its SHA-256 in {SEAL}"):
        read_manifest(folder)


def test_missing_seal_raises_but_an_export_of_version_0_2_only_warns(
    sealed_export: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copy(sealed_export, tmp_path / "export")
    (folder / SEAL).unlink()
    with pytest.raises(ManifestError, match=rf"{SEAL}' is missing"):
        read_manifest(folder)
    with caplog.at_level(logging.WARNING):
        read_manifest(OLD_EXPORT)
    assert f"has no {SEAL} (it was written by version 0.2)" in caplog.text


@pytest.mark.parametrize(("change", "text"), [
    ("another k", "stage.json' describes a different stage"), ("an entry dropped", "users.arrow' is not listed")
])  # fmt: skip
def test_changed_manifest_of_version_0_2_raises(tmp_path: Path, change: str, text: str) -> None:
    folder = copy(OLD_EXPORT, tmp_path / "export")
    plain = json.loads((folder / FILE).read_text())
    CHANGES[change](plain)
    (folder / FILE).write_text(json.dumps(plain))
    with pytest.raises(ManifestError, match=text):
        read_manifest(folder)


@pytest.mark.parametrize("place", ["ranking", ".."])
def test_external_onnx_data_that_the_manifest_does_not_list_raises(
    sealed_export: Path, tmp_path: Path, place: str
) -> None:
    import onnx

    folder = copy(sealed_export, tmp_path / "export")
    path = folder / "ranking" / "scores.onnx"
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights.bin", size_threshold=100)
    if place == "..":  # a path out of the folder of the stage
        model = onnx.load(path, load_external_data=False)
        for weight in model.graph.initializer:
            for entry in weight.external_data:
                entry.value = "../../weights.bin" if entry.key == "location" else entry.value
        path.write_bytes(model.SerializeToString())
        (path.parent / "weights.bin").rename(tmp_path / "weights.bin")
        seal(folder)
        with pytest.raises(ManifestError, match=rf"{path}' cannot be loaded"):
            CascadeRecommender.from_export(folder)
        return
    seal(folder)
    CascadeRecommender.from_export(folder)  # listed
    (folder / "ranking" / "weights.bin").rename(tmp_path / "weights.bin")
    seal(folder)
    shutil.copy(tmp_path / "weights.bin", folder / "ranking" / "weights.bin")
    with pytest.raises(ManifestError, match=r"ranking/weights\.bin' is not listed in the manifest"):
        CascadeRecommender.from_export(folder)


def test_reload_survives_every_failure_and_tries_again(
    sealed_export: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    link, outcomes = tmp_path / "current", list[bool]()
    link.symlink_to(sealed_export)
    current = CurrentExport(link, loaded=outcomes.append)
    first = current.recommender.identity
    other = copy(sealed_export, tmp_path / "other", k=3)
    rejected = copy(other, tmp_path / "rejected")
    (rejected / "ranking" / "scores.onnx").write_bytes(b"no model")
    seal(rejected)
    (tmp_path / "empty").mkdir()
    nan = copy(other, tmp_path / "nan")
    spoil(nan / "retrieval" / "items.onnx")
    seal(nan)
    reasons = {
        rejected: "rejected/ranking/scores.onnx' cannot be loaded",
        tmp_path / "empty": "manifest.json is missing",
        tmp_path / "nowhere": "has no export",
        nan: "retrieval/items.onnx gives values that are not finite",
    }
    for target, reason in reasons.items():
        point(link, target)
        assert not current.refresh()
        assert reason in str((current.failed or {})["reason"])
        assert reason in caplog.messages[-1]
        assert not current.refresh()  # nothing changed, so there is no second attempt
        assert current.recommender.identity == first
    assert outcomes == [False] * len(reasons)
    shutil.copy(other / "retrieval" / "items.onnx", nan / "retrieval" / "items.onnx")
    seal(nan)
    point(link, nan)
    assert current.refresh()  # repaired in place
    assert current.failed is None
    assert outcomes[-1]
    assert current.recommender.identity == read_manifest(other).identity


@pytest.mark.parametrize("order", [("export", "index"), ("index", "export")])
def test_export_and_index_may_be_published_in_any_order(
    sealed_export: Path, tmp_path: Path, order: tuple[str, str]
) -> None:
    new = {"export": copy(sealed_export, tmp_path / "new", k=3), "index": tmp_path / "new-index"}
    old = {"export": sealed_export, "index": tmp_path / "old-index"}
    links = {name: tmp_path / f"current-{name}" for name in order}
    for folders in (old, new):
        build_index(folders["export"], folders["index"])
    for name, link in links.items():
        link.symlink_to(old[name])
    current = CurrentExport(links["export"], links["index"])
    point(links[order[0]], new[order[0]])
    assert not current.refresh()
    assert "built for a different export" in str((current.failed or {})["reason"])
    point(links[order[1]], new[order[1]])
    assert current.refresh()
    assert current.recommender.manifest.k == 3


def test_ready_and_metrics_show_a_failed_load(sealed_export: Path, tmp_path: Path) -> None:
    link = tmp_path / "current"
    link.symlink_to(sealed_export)
    app = make_app(link, options=ServiceOptions(watch=0))
    with TestClient(app) as client:
        assert client.get("/ready").json()["failed_load"] is None
        point(link, tmp_path / "nowhere")
        app.state.current.refresh()
        assert "has no export" in client.get("/ready").json()["failed_load"]["reason"]
        metrics = client.get("/metrics").text
    assert 'recsys_topk_export_loads_total{outcome="failed"} 1.0' in metrics
    assert "recsys_topk_export_load_failed 1.0" in metrics


def test_model_fault_is_a_500_with_the_id_and_other_requests_are_answered(
    sealed_export: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app(sealed_export, options=ServiceOptions(watch=0))
    recommender = app.state.current.recommender
    ranking = recommender.funnel.stages[1]
    scores = ranking.scores
    bad = recommender.users.request[0]

    def failing(requests: Any, *rest: Any) -> Any:
        if (requests.request == bad).all(axis=1).any():
            raise ModelFaultError("ranking/scores.onnx failed")
        return scores(requests, *rest)

    monkeypatch.setattr(ranking, "scores", failing)
    names = recommender.users.names.tolist()
    with TestClient(app) as client:
        for path, body in (("/recommend", {"users": names[:1]}), ("/funnel", {"user": names[0]})):
            answer = client.post(path, json=body, headers={"X-Request-ID": "order-66"})
            assert (answer.status_code, answer.json()["request_id"]) == (500, "order-66")
            assert answer.headers["X-Request-ID"] == "order-66"
            assert "request order-66 failed" in caplog.messages[-1]
            assert "ranking/scores.onnx failed" in caplog.messages[-1]
        assert client.post("/recommend", json={"users": names[1:2]}).status_code == 200
        too_large = client.post("/recommend", json={"rows": [{"age": 1e300}]})
    assert too_large.status_code == 422  # the request is to blame, not the model
    assert "very large feature values" in too_large.text


def test_value_error_of_a_model_is_not_the_fault_of_the_request(
    sealed_export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recommender = CascadeRecommender.from_export(sealed_export)

    def wrong(*arguments: Any, **options: Any) -> Any:
        raise ValueError("shapes do not match")

    monkeypatch.setattr(recommender.funnel, "run", wrong)
    with pytest.raises(ModelFaultError, match=f"export {recommender.identity}: ValueError: shapes do not match"):
        recommender.recommend([recommender.users.names[0]])
