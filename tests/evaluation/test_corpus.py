"""Evaluation over the whole catalogue against plain Python loops that score every pair with the full model."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from recsys_topk import CascadeModule, Feature, Schema, StageConfig, Table
from recsys_topk.datamodules import CascadeDataModule, Catalogue, TensorShard
from recsys_topk.evaluation.corpus import CorpusEvaluation
from recsys_topk.evaluation.corpus_metrics import CorpusMetrics, evaluate_corpus
from recsys_topk.evaluation.search import Candidates, ExactSearch, Requests, requests_of, with_items
from recsys_topk.tabular.schema import VARIANT

ITEMS, REQUESTS, K = 45, 26, 3


class Tiny(CascadeDataModule):
    """Features of all four kinds, pairs of equal items (exact ties), short and empty lists, excluded items."""

    def __init__(self, graded: bool = False, twins: bool = True, **options: Any) -> None:
        super().__init__(**{"batch_size": 8, "eval_negatives": 5, **options})
        draw = torch.Generator().manual_seed(3)
        ids = torch.arange(ITEMS)
        twin = ids // 2 if twins else ids
        genres = torch.randint(0, 5, (ITEMS, 2), generator=draw)[twin]
        values = torch.randint(-1, 2, (ITEMS, 3), generator=draw)[twin].float()
        self.items = Catalogue(10 + 3 * ids, torch.cat([1 + twin[:, None], genres], 1), values=values)
        self.graded = graded

    @property
    def schema(self) -> Schema:
        return Schema(
            tables=(Table("user", 12), Table("item", ITEMS + 1), Table("genre", 5)),
            request=(Feature("user", "user"), Feature("age", kind="numeric")),
            history=(Feature("item", "item"),),
            items=(
                Feature("item", "item"),
                Feature("genres", "genre", "bag", 2),
                Feature("price", kind="numeric"),
                Feature("text", kind="vector", size=2),
            ),
            groups=("shown",),
        )

    def open_shard(self, name: str) -> TensorShard:
        draw = torch.Generator().manual_seed(("train", "val", "test").index(name))
        lists = torch.rand(REQUESTS, ITEMS, generator=draw).argsort(1)[:, :7]
        labels = torch.randint(0, 4 if self.graded else 2, lists.shape, generator=draw).float()
        labels[4] = 0.0  # a request without positives
        lists[5] = -1  # and one without a list
        lists = torch.where(torch.rand(lists.shape, generator=draw) < 0.15, -1, lists)
        views = torch.randint(0, 20, (REQUESTS, 2, 1), generator=draw)  # means of 1 or 2 are exact
        excluded = torch.randint(-1, ITEMS, (REQUESTS, 6), generator=draw)
        excluded[0, :2] = lists[0].amax()  # an item of the list, twice
        return TensorShard(
            name,
            self.items,
            torch.arange(REQUESTS),
            lists,
            labels,
            request=torch.randint(1, 12, (REQUESTS, 1), generator=draw),
            history=views.sort(1, descending=True).values,
            history_length=(views > 0).sum((1, 2)),
            request_values=torch.randint(-1, 2, (REQUESTS, 1), generator=draw).float(),
            excluded=excluded,
        )


STAGES: dict[str, tuple[StageConfig, ...]] = {
    "two towers first": (
        StageConfig("two_tower", "retrieval", 12, {"hidden": [8, 4]}),
        StageConfig("mlp", "ranking", 5, {"hidden": [8, 4]}),
    ),
    "three stages": (
        StageConfig("two_tower", "retrieval", 20, {"hidden": [8, 4]}),
        StageConfig("mlp", "prerank", 9, {"hidden": [8, 4]}),
        StageConfig("din", "ranking", 4, {"hidden": [8], "attention": 4}),
    ),
    "no towers": (StageConfig("mlp", "retrieval", 50, {"hidden": [8]}), StageConfig("mlp", "ranking", 6)),
    "added scores": (
        StageConfig("two_tower", "retrieval", 20, {"hidden": [8, 4]}),
        StageConfig("mlp", "prerank", 9, {"hidden": [8, 4]}, previous="add"),
        StageConfig("two_tower", "ranking", 4, {"hidden": [8, 4]}, previous="add_detached"),
    ),
    "one stage": (StageConfig("two_tower", "retrieval", 6, {"hidden": [8, 4]}),),
}


def make_model(data: Tiny, stages: Sequence[StageConfig], exact: bool) -> CascadeModule:
    """Return a model; with `exact`, all weights are multiples of 1/2, so that sums are exact and many scores tie."""
    torch.manual_seed(1)
    model = CascadeModule(data.schema, stages, "softmax", k=K, dim=3)
    if exact:
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_((weight * 4).round().clamp(-1, 1) / 2)
    return model.eval()


def pair_scores(model: CascadeModule, data: Tiny) -> tuple[Any, list[list[list[float]]]]:
    """Score every pair of request and item through the full model, one item at a time."""
    shard = data.shard("test")
    batch = shard.batch(torch.arange(REQUESTS).numpy())
    columns = []
    with torch.no_grad():
        for row in range(ITEMS):
            one = with_items(batch, data.items, torch.tensor([row]), torch.zeros(REQUESTS, 1, dtype=torch.int64))
            columns.append(torch.stack(model(one)))
    return batch, torch.cat(columns, 2).permute(1, 0, 2).tolist()


def labels_and_candidates(data: Tiny, batch: Any, request: int) -> tuple[dict[int, float], set[int]]:
    """Return the labels of a request's items by row, and all candidate rows."""
    rows = data.items.rows(batch.item_id)[batch.candidates[request]].tolist()
    labels = {}
    for row, label, real in zip(rows, batch.labels[request].tolist(), batch.mask[request].tolist(), strict=True):
        if real:
            labels[row] = label
    found = data.shard("test").excluded(torch.tensor([request]).numpy())
    assert found is not None
    return labels, {row for row in range(ITEMS) if row in labels or row not in found[0].tolist()}


def best(rows: set[int], score: Callable[[int], float], labels: dict[int, float], number: int) -> list[int]:
    return sorted(rows, key=lambda row: (-score(row), labels.get(row, 0.0), row))[:number]


def recall(chosen: set[int], labels: dict[int, float], k: int) -> float:
    """Return the share of the true top k that was chosen; if labels tie at rank k, the largest share."""
    positive = [row for row, label in labels.items() if label > 0]
    wanted = min(k, len(positive))
    total = sum(sorted((labels[row] for row in positive), reverse=True)[:wanted])
    true_sets = [s for s in itertools.combinations(positive, wanted) if sum(labels[row] for row in s) == total]
    return max(len(chosen & set(s)) / wanted for s in true_sets)


def ndcg(ranked: list[int], labels: dict[int, float], k: int) -> float:
    gain = [2.0 ** labels.get(row, 0.0) - 1 for row in ranked[:k]]
    ideal = sorted((2.0**label - 1 for label in labels.values()), reverse=True)[:k]
    dcg, top = (sum(g / math.log2(2 + i) for i, g in enumerate(values)) for values in (gain, ideal))
    return dcg / top


def brute_force(model: CascadeModule, data: Tiny, cuts: Sequence[int], popularity: dict[int, int]) -> dict[str, float]:
    batch, scores = pair_scores(model, data)
    quotas, names = model.cascade.quotas, model.cascade.names
    rows_of: dict[str, list[float]] = {}
    shown: dict[str, list[int]] = {"corpus": [0] * ITEMS, "popularity": [0] * ITEMS}

    def add(name: str, value: float) -> None:
        rows_of.setdefault(name, []).append(value)

    for request in range(REQUESTS):
        labels, candidates = labels_and_candidates(data, batch, request)
        positive = {row for row, label in labels.items() if label > 0}
        if not positive:
            continue
        alive, ranked = candidates, [0]
        for own, name, quota in zip(scores[request], names, quotas, strict=True):
            ranked = best(alive, own.__getitem__, labels, quota)
            add(f"lost_{name}/corpus", len((positive & alive) - set(ranked)) / len(positive))
            alive = set(ranked)
            alone = best(candidates, own.__getitem__, labels, quota)
            add(f"{name}_recall@{K}@{quota}/corpus", recall(set(alone), labels, K))
        add("kept/corpus", len(positive & alive) / len(positive))
        popular = best(candidates, lambda row: popularity.get(row, 0), labels, quotas[-1])
        for column, final in (("corpus", ranked), ("popularity", popular)):
            for row in final[: max(cuts)]:
                shown[column][row] += 1
            add(f"joint_recall@{K}@{quotas[-1]}/{column}", recall(set(final), labels, K))
            for cut in cuts:
                add(f"recall@{cut}/{column}", recall(set(final[:cut]), labels, cut))
                add(f"ndcg@{cut}/{column}", ndcg(final, labels, cut))
    for column, counts in shown.items():
        pairs = sum(abs(a - b) for a in counts for b in counts)
        rows_of[f"coverage@{max(cuts)}/{column}"] = [sum(map(bool, counts)) / ITEMS]
        rows_of[f"gini@{max(cuts)}/{column}"] = [pairs / (2 * ITEMS * sum(counts))]
    return {name: sum(values) / len(values) for name, values in rows_of.items()}


@pytest.mark.parametrize("exact", [True, False], ids=["ties", "no ties"])
@pytest.mark.parametrize("stages", STAGES.values(), ids=STAGES)
def test_evaluation_equals_loop_over_all_pairs(stages: tuple[StageConfig, ...], exact: bool) -> None:
    data = Tiny(graded=exact, twins=exact)  # equal items have equal scores only in exact arithmetic
    model = make_model(data, stages, exact)
    cuts = (1, 4)
    counts: dict[int, int] = {}
    for batch in data.train_dataloader():
        for row in data.items.rows(batch.item_id)[batch.candidates[batch.mask & (batch.labels > 0)]].tolist():
            counts[row] = counts.get(row, 0) + 1
    later = [config.name for config in stages[1:]]
    evaluation = evaluate_corpus(model, data, cuts=cuts, alone=later, items_at_once=7)
    found = {name: value for name, value in evaluation.compute().items() if not name.endswith("/random")}
    expected = brute_force(model, data, cuts, counts)
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, abs=1e-6)
    assert sum(value for name, value in found.items() if name.startswith(("lost", "kept"))) == pytest.approx(1)
    assert evaluation.counts()["requests"] + evaluation.counts()["requests_without_positives"] == REQUESTS


def test_result_does_not_depend_on_batch_size_or_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for size, pairs in ((3, 1 << 22), (64, 100)):
        monkeypatch.setattr("recsys_topk.evaluation.search.PAIRS_AT_ONCE", pairs)
        data = Tiny(batch_size=size)
        model = make_model(data, STAGES["three stages"], exact=True)
        results.append(evaluate_corpus(model, data, items_at_once=size).compute())
    assert results[0] == pytest.approx(results[1], abs=1e-6)


def one_request(own: list[int], labels: list[float], excluded: list[int], items: Catalogue) -> Requests:
    lists, y = torch.tensor([own]), torch.tensor([labels])
    shard = TensorShard("x", items, torch.tensor([0]), lists, y, excluded=torch.tensor([excluded]))
    rows = torch.tensor([0]).numpy()
    return requests_of(shard.batch(rows), items, shard.excluded(rows))


def test_excluded_positive_stays_a_candidate() -> None:
    items = Tiny().items
    requests = one_request([4, 9, -1], [1.0, 0.0, 0.0], [4, 2, 2, -1, 9], items)
    assert sorted(row for row in requests.excluded[0].tolist() if row >= 0) == [2]
    kept = {(int(row), float(label)) for row, label in zip(requests.own[0], requests.labels[0], strict=True)}
    assert {(4, 1.0), (9, 0.0)} <= kept
    assert int(requests.own_excluded.sum()) == 2


def test_variants_are_merged_into_one_item_with_the_larger_label() -> None:
    items = Tiny().items
    batch = TensorShard("x", items, torch.tensor([0]), torch.tensor([[4, 5, 6]]), torch.zeros(1, 3)).batch(
        torch.tensor([0]).numpy()
    )
    ids = batch.item_id.clone()
    ids[1] = ids[0] + VARIANT
    requests = requests_of(batch.replace(item_id=ids, labels=torch.tensor([[1.0, 3.0, 2.0]])), items)
    real = requests.mask[0]
    assert sorted(zip(requests.own[0][real].tolist(), requests.labels[0][real].tolist(), strict=True)) == [
        (4, 3.0),
        (6, 2.0),
    ]


def test_item_outside_the_catalogue_raises() -> None:
    batch = Tiny().shard("test").batch(torch.arange(3).numpy())
    with pytest.raises(ValueError, match="items of the lists are not in the evaluated catalogue of 45 items"):
        requests_of(batch.replace(item_id=batch.item_id + 1), Tiny().items)


@pytest.mark.parametrize("labels", [[1.0, 1.0, 1.0, 0.0], [3.0, 2.0, 2.0, 1.0], [2.0, 2.0, 1.0, 1.0]])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_random_column_equals_the_mean_over_all_orders(labels: list[float], k: int) -> None:
    items = Catalogue(torch.arange(7), torch.arange(1, 8)[:, None])
    requests = one_request([0, 1, 2, 3], labels, [6, -1, 6], items)
    schema = Schema((Table("item", 9),), (), (), (Feature("item", "item"),))
    cascade = CascadeModule(schema, [StageConfig("mlp", "only", 3, {"hidden": [2]})], "softmax", k=k).cascade
    evaluation = CorpusEvaluation(cascade, schema, k=k, cuts=[k, 3])
    evaluation.open(items)
    evaluation.update(requests.batch, torch.tensor([[6, -1, 6]]))
    found = evaluation.compute()
    by_row = dict(enumerate(labels))
    orders = list(itertools.permutations(range(6)))  # row 6 is left out
    for cut in {k, 3}:
        recalls = [recall(set(order[:cut]), by_row, cut) for order in orders]
        assert found[f"recall@{cut}/random"] == pytest.approx(sum(recalls) / len(orders))
        ndcgs = [ndcg(list(order), by_row, cut) for order in orders]
        assert found[f"ndcg@{cut}/random"] == pytest.approx(sum(ndcgs) / len(orders))
    joint = [recall(set(order[:3]), by_row, k) for order in orders]
    assert found[f"joint_recall@{k}@3/random"] == pytest.approx(sum(joint) / len(orders))


def test_search_of_the_first_stage_can_be_replaced() -> None:
    data = Tiny()
    model = make_model(data, STAGES["two towers first"], exact=False)

    def search_for_positives_only(stage: Any, items: Any) -> Any:
        exact = ExactSearch(stage, items)

        def search(requests: Requests, quota: int) -> Candidates:
            found = exact(requests, quota)
            return Candidates(found.rows, found.scores, found.labels, found.mask & (found.labels > 0))

        return search

    exact = evaluate_corpus(model, data).compute()
    other = evaluate_corpus(model, data, search=search_for_positives_only, column="own").compute()
    assert other["lost_retrieval/own"] == pytest.approx(exact["lost_retrieval/corpus"])
    assert other["lost_ranking/own"] < exact["lost_ranking/corpus"]


def test_invalid_arguments_raise() -> None:
    data = Tiny()
    model = make_model(data, STAGES["two towers first"], exact=False)
    with pytest.raises(ValueError, match=r"K must be between 1 and 5.*\(ranking\), got 20"):
        evaluate_corpus(model, data, cuts=[20])
    with pytest.raises(ValueError, match="cannot measure 'rankin' over all items; did you mean 'ranking'"):
        evaluate_corpus(model, data, alone=["rankin"])
    with pytest.raises(ValueError, match=r"call open\(items\)"):
        CorpusEvaluation(model.cascade, data.schema, k=K).update(data.shard("test").batch(torch.arange(2).numpy()))


def test_callback_logs_corpus_metrics_and_sampled_metrics(tmp_path: Path) -> None:
    data = Tiny()
    model = make_model(data, STAGES["two towers first"], exact=False)
    callback = CorpusMetrics(cuts=[2], alone=["ranking"], file=tmp_path / "corpus.json")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
    trainer = Trainer(**quiet, enable_model_summary=False, callbacks=[callback])
    (logged,) = trainer.test(model, data, verbose=False)
    expected = evaluate_corpus(model, data, cuts=[2], alone=["ranking"]).compute()
    assert {name: logged[f"test/{name}"] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert "test/joint_recall@3@5/12" in logged
    written = json.loads((tmp_path / "corpus.json").read_text())
    assert written["metrics"] == pytest.approx(expected, abs=1e-6)
    assert written["requests"] + written["requests_without_positives"] == REQUESTS


WORKER = """
import json, sys
import torch.distributed as dist
from recsys_topk.evaluation.corpus_metrics import evaluate_corpus
from tests.evaluation.test_corpus import STAGES, Tiny, make_model

dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=int(sys.argv[1]), world_size=2)
data = Tiny(batch_size=5)
evaluation = evaluate_corpus(make_model(data, STAGES["three stages"], exact=True), data)
print(json.dumps([evaluation.compute(), evaluation.counts()]))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_give_the_result_of_one(tmp_path: Path, warm_python: list[str]) -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    workers = [
        subprocess.Popen(
            [*warm_python, "-c", WORKER, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=root,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [worker.communicate(timeout=240) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    data = Tiny()
    evaluation = evaluate_corpus(make_model(data, STAGES["three stages"], exact=True), data)
    for out, _ in outputs:
        metrics, counts = json.loads(out.splitlines()[-1])
        assert metrics == pytest.approx(evaluation.compute(), abs=1e-6)
        assert counts == evaluation.counts()
