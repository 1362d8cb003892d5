"""Recommendations of an export against the checkpoint with hard inference in torch, over all items."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from recsys_topk.cascades.inference import apply_quotas
from recsys_topk.cascades.module import CascadeModule
from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.serving.funnel import search_exactly
from recsys_topk.serving.index import build_index
from recsys_topk.serving.manifest import ManifestError
from recsys_topk.serving.recommend import CascadeRecommender, UnknownUserError


def whole_catalogue_batch(
    recommender: CascadeRecommender, rows: list[int], mask: np.ndarray | None = None
) -> CascadeBatch:
    """Return a batch in which the list of each user is the whole catalogue."""
    users, items = recommender.users, recommender.items
    assert users is not None
    number, size = len(rows), len(items.names)
    shape = (number, size)
    return CascadeBatch(
        request_id=torch.arange(number),
        request=torch.from_numpy(users.request[rows].astype(np.int64)),
        history=torch.from_numpy(users.history[rows].astype(np.int64)),
        history_length=torch.from_numpy(users.history_length[rows].astype(np.int64)),
        item_id=torch.arange(size),
        items=torch.from_numpy(items.ids.astype(np.int64)),
        candidates=torch.arange(size).expand(shape),
        labels=torch.zeros(shape),
        mask=torch.ones(shape, dtype=torch.bool) if mask is None else torch.from_numpy(mask),
        group=torch.zeros(shape, dtype=torch.int64),
    )


def items_kept_by_checkpoint(
    model: CascadeModule, recommender: CascadeRecommender, batch: CascadeBatch
) -> list[list[object]]:
    """Return the names of the kept items, best first, by the checkpoint and `cascades.inference`."""
    with torch.no_grad():
        result = apply_quotas(model.eval()(batch), batch.mask, model.cascade.quotas)
    found = []
    for rank in result.rank:
        kept = torch.nonzero(rank)[:, 0]
        found.append(recommender.items.names[kept[rank[kept].argsort()].numpy()].tolist())
    return found


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> CascadeModule:
    return CascadeModule.load_from_checkpoint(checkpoint, map_location="cpu")


def names_of(recommender: CascadeRecommender, rows: list[int]) -> list[object]:
    assert recommender.users is not None
    return recommender.users.names[rows].tolist()


def test_recommendations_match_the_checkpoint(model: CascadeModule, recommender: CascadeRecommender) -> None:
    rows = [0, 3, 7, 20]
    wanted = items_kept_by_checkpoint(model, recommender, whole_catalogue_batch(recommender, rows))
    found = recommender.recommend(names_of(recommender, rows), recommender.most)
    assert [[one.item for one in own] for own in found] == wanted
    assert [one.rank for one in found[0]] == list(range(1, 11))
    with torch.no_grad():
        scores = model.eval()(whole_catalogue_batch(recommender, rows[:1]))
    for one in found[0]:
        row = recommender.items.index.rows([one.item])[0]
        assert one.scores == pytest.approx({name: float(own[0, row]) for name, own in zip(
            ("retrieval", "preranking", "ranking"), scores, strict=True)}, rel=1e-4, abs=1e-5)  # fmt: skip


def test_seen_blocked_and_disallowed_items_are_excluded_before_the_first_stage(
    model: CascadeModule, recommender: CascadeRecommender
) -> None:
    users, items = recommender.users, recommender.items
    assert users is not None
    rows = [int(row) for row in np.argsort(-np.diff(users.seen_ends, prepend=0))[:3]]
    best = [one.item for one in recommender.recommend(names_of(recommender, rows[:1]), recommender.most)[0]]
    allowed = [*items.names[::2].tolist(), *best, "nothing of this name"]
    together = {"allowed": allowed, "blocked": best, "exclude_seen": True}
    for options in ({"exclude_seen": True}, {"blocked": best}, {"allowed": allowed}, together):
        mask = np.ones((len(rows), len(items.names)), dtype=bool)
        for own, row in zip(mask, rows, strict=True):
            if "allowed" in options:
                own &= np.isin(items.names.astype(str), np.array(options["allowed"]).astype(str))
            own &= ~np.isin(items.names, options.get("blocked", []))
            if "exclude_seen" in options:
                assert len(users.seen_of(row))
                own[users.seen_of(row)] = False
        wanted = items_kept_by_checkpoint(model, recommender, whole_catalogue_batch(recommender, rows, mask))
        found = recommender.recommend(names_of(recommender, rows), recommender.most, **options)
        assert [[one.item for one in own] for own in found] == wanted, options


def test_user_given_by_features_is_encoded_like_the_user_of_the_export(recommender: CascadeRecommender) -> None:
    users, items, encoder = recommender.users, recommender.items, recommender.encoder
    assert users is not None
    assert encoder is not None
    raw = {feature.name: None for feature in recommender.manifest.schema.request}
    row = 5
    for name, column in recommender.manifest.schema.id_columns("request").items():
        wanted = int(users.request[row, column.start])
        for value in range(3000):
            if int(encoder.encode("user", [{**raw, name: value}], partial=True).ids[0, column.start]) == wanted:
                raw[name] = value
                break
    requests = recommender.requests([{**raw, "history": []}])
    np.testing.assert_array_equal(requests.request[0], users.request[row])
    assert requests.history_length.tolist() == [0]
    assert len(recommender.recommend([{**raw, "history": items.names[:3].tolist()}])[0]) == 5


def test_explain_names_the_stage_and_the_distance_to_its_cut(
    model: CascadeModule, recommender: CascadeRecommender
) -> None:
    batch = whole_catalogue_batch(recommender, [2])
    with torch.no_grad():
        scores = [own[0] for own in model.eval()(batch)]
    user = names_of(recommender, [2])[0]
    alive = torch.ones(len(recommender.items.names), dtype=torch.bool)
    first_dropped = {}
    for name, own, quota in zip(("retrieval", "preranking", "ranking"), scores, model.cascade.quotas, strict=True):
        ordered = own.masked_fill(~alive, -torch.inf).argsort(descending=True, stable=True)
        passed = torch.zeros_like(alive).index_fill(0, ordered[:quota], True)
        first_dropped[name] = (int(ordered[quota]), float(own[ordered[quota - 1]] - own[ordered[quota]]), quota + 1)
        alive &= passed
    for number, (stage, (row, distance, rank)) in enumerate(first_dropped.items()):
        verdicts = recommender.explain(user, recommender.items.names[row].item())
        assert [one.passed for one in verdicts] == [True] * number + [False]
        assert verdicts[-1].stage == stage
        assert verdicts[-1].rank == rank
        assert verdicts[-1].cut - verdicts[-1].score == pytest.approx(distance, rel=1e-3, abs=1e-5)
    best = recommender.recommend([user])[0][0].item
    assert [one.passed for one in recommender.explain(user, best)] == [True, True, True]


def test_invalid_requests_raise(recommender: CascadeRecommender) -> None:
    first = names_of(recommender, [0])[0]
    with pytest.raises(UnknownUserError, match="has no user 'nobody'"):
        recommender.recommend(["nobody"])
    with pytest.raises(UnknownUserError, match="has no user"):
        recommender.recommend([10**40])
    with pytest.raises(ValueError, match=r"number must be between 1 and 10, .*got 11"):
        recommender.recommend([first], 11)
    with pytest.raises(ValueError, match="got both in one call"):
        recommender.recommend([first, {"history": []}])
    with pytest.raises(ValueError, match="has no item 'x'"):
        recommender.explain(first, "x")
    for history in ("abc", [["a"]], [{"item": None}], [{"thing": 1}], 3):
        with pytest.raises(ValueError, match=r"history|view"):
            recommender.recommend([{"history": history}])
    assert len(recommender.recommend([{}])[0]) == 5
    assert len(recommender.recommend([{"history": [-1, 10**20, "?"]}])[0]) == 5
    assert recommender.recommend([first], allowed=[])[0] == []
    assert len(recommender.recommend([first], allowed=recommender.items.names[:2].tolist())[0]) == 2


@pytest.mark.parametrize("kind", ["flat", "ivf", "hnsw"])
def test_index_agrees_with_exact_search(export: Path, tmp_path: Path, kind: str) -> None:
    facts = build_index(export, tmp_path / "index", kind, effort=100)  # type: ignore[arg-type]
    assert facts.recall > {"flat": 0.9999, "ivf": 0.9999, "hnsw": 0.95}[kind]
    assert facts.items == 285
    exact, indexed = CascadeRecommender.from_export(export), CascadeRecommender.from_export(export, tmp_path / "index")
    users = names_of(exact, list(range(8)))
    found = [[{x.item for x in own} for own in one.recommend(users)] for one in (exact, indexed)]
    shared = sum(len(one & other) for one, other in zip(*found, strict=True))
    assert shared >= (0.9 if kind == "hnsw" else 1) * sum(map(len, found[0]))


def test_damaged_index_or_index_of_another_export_raises(export: Path, stream_export: Path, tmp_path: Path) -> None:
    build_index(stream_export, tmp_path / "other")
    with pytest.raises(ManifestError, match="built for a different export"):
        CascadeRecommender.from_export(export, tmp_path / "other")
    file = tmp_path / "other" / "index.faiss"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(ManifestError, match="does not match its SHA-256"):
        CascadeRecommender.from_export(stream_export, tmp_path / "other")


def test_export_with_half_tables_keeps_90_percent_of_the_items_of_the_checkpoint(
    stream_checkpoint: Path, stream_export: Path
) -> None:
    recommender = CascadeRecommender.from_export(stream_export)
    facts = recommender.manifest.facts
    assert facts["half_tables"]
    assert abs(facts["recalls"]["export"] - facts["recalls"]["checkpoint"]) < 0.02
    model = CascadeModule.load_from_checkpoint(stream_checkpoint, map_location="cpu")
    rows = [0, 3, 7, 20]
    wanted = items_kept_by_checkpoint(model, recommender, whole_catalogue_batch(recommender, rows))
    found = recommender.recommend(names_of(recommender, rows), recommender.most)
    shared = [len({x.item for x in one} & set(other)) for one, other in zip(found, wanted, strict=True)]
    assert sum(shared) >= 0.9 * sum(map(len, wanted))


def test_exact_search_returns_the_first_of_equal_scores_for_any_block_size() -> None:
    draw = np.random.default_rng(0)
    queries, vectors = draw.integers(-2, 3, (5, 3)).astype(np.float32), draw.integers(-2, 3, (60, 3)).astype(np.float32)
    wanted = np.argsort(-(queries @ vectors.T), axis=1, kind="stable")[:, :7]
    for block in (1, 4, 59, 100):
        rows, scores = search_exactly(queries, vectors, 7, block)
        np.testing.assert_array_equal(rows, wanted)
        np.testing.assert_array_equal(scores, np.take_along_axis(queries @ vectors.T, wanted, 1))
