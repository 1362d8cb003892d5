"""`recsys-topk bench serve`: search in a large catalogue, and the service under load compared with in-process calls."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recsys_topk.bench.load import Load, put_load, running_service, wait_for_export
from recsys_topk.bench.result import BenchResult
from recsys_topk.bench.timing import peak_memory, threads
from recsys_topk.cascades.features import FeatureEmbedding
from recsys_topk.cascades.stage import Stage
from recsys_topk.cascades.stages import MLPStage, TwoTower
from recsys_topk.serving.export import models_of, write_stage
from recsys_topk.serving.funnel import search_exactly
from recsys_topk.serving.index import FACTS, CatalogueIndex, build_index, encode_catalogue
from recsys_topk.serving.manifest import read_manifest, write_manifest
from recsys_topk.serving.recommend import CascadeRecommender
from recsys_topk.tabular.export_tables import ITEMS, USERS, ItemTable, UserTable
from recsys_topk.tabular.schema import Feature, Schema, Table

NUMBER = 30
QUICK = {"items": 2000, "users": 50, "requests": 60, "seconds": 20.0, "queries": 8, "concurrency": "1,4"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the suite."""
    parser.add_argument("--items", type=int, default=1_000_000, help="number of items in the catalogue")
    parser.add_argument("--users", type=int, default=2000, help="number of users in the export")
    parser.add_argument("--kinds", default="ivf", help="indexes to compare: ivf, hnsw (slow to build)")
    parser.add_argument("--concurrency", default="1,8,32", help="number of connections of each load test")
    parser.add_argument("--requests", type=int, default=2000, help="maximum number of requests per load test")
    parser.add_argument("--seconds", type=float, default=20.0, help="maximum seconds per load test")
    parser.add_argument("--queries", type=int, default=64, help="number of requests for timing searches")
    parser.add_argument("--quick", action="store_true", help=f"small sizes: {QUICK}")


def run(args: argparse.Namespace) -> BenchResult:
    """Measure searches, the funnel, the service and a reload."""
    if args.quick:
        vars(args).update(QUICK)
    kinds = [kind for kind in str(args.kinds).split(",") if kind]
    with threads(1), tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        export = folder / "export-1"
        make_export(export, args.items, args.users)
        rows, indexes = _searches(export, folder, kinds, args)
        index = indexes[kinds[0]]
        inside, cpu = _inside(CascadeRecommender.from_export(export, index), args)
        row = {"part": f"funnel in-process, {kinds[0]}", "requests/s": round(inside), "ratio": 1.0, "cpu ms": cpu}
        rows.append(row)
        rows += _service(export, index, folder, inside, args)
    return BenchResult(
        suite="serve",
        baseline="in-process calls of the same funnel, one request after another",
        rows=rows,
        notes=[
            f"{args.items:,} items, {args.users:,} users, random weights (without structure, the hardest case for an "
            f"approximate index); two_tower keeps 200, mlp keeps 30; one thread per model.",
            f"top-{NUMBER} ms: median wall time of one request. recall: share of the {NUMBER} exact best items that "
            f"are found, with request vectors as queries.",
            "load: keep-alive connections from this machine; client and service share its cores. ratio: seconds per "
            "response of the service divided by those of in-process calls (target: at most 2 with concurrency). "
            "cpu ms: CPU time of the answering process per response.",
            f"peak resident memory of the measuring process: {peak_memory():.0f} MB.",
        ],
    )


def _searches(
    export: Path, folder: Path, kinds: list[str], args: argparse.Namespace
) -> tuple[list[dict[str, Any]], dict[str, Path]]:
    """Measure exact search and the indexes, with the vectors of real requests."""
    recommender = CascadeRecommender.from_export(export, None)
    users = list(range(min(args.queries, args.users)))
    queries = recommender.funnel.first.request_vectors(recommender.requests(users))
    vectors = encode_catalogue(recommender.funnel.first, recommender.items)
    wanted, seconds = _timed(lambda one: search_exactly(one, vectors, NUMBER)[0], queries)
    rows: list[dict[str, Any]] = [{"part": "search, exact", f"top-{NUMBER} ms": seconds * 1000, "recall": 1.0}]
    indexes = {}
    for kind in kinds:
        indexes[kind] = folder / f"index-{kind}"
        facts = build_index(export, indexes[kind], kind)  # type: ignore[arg-type]
        opened = CatalogueIndex(indexes[kind], recommender.manifest)
        found, seconds = _timed(lambda one, opened=opened: opened.search(one, NUMBER)[0], queries)
        shared = sum(len(np.intersect1d(one, other)) for one, other in zip(wanted, found, strict=True))
        rows.append(
            {
                "part": f"search, {kind}",
                f"top-{NUMBER} ms": seconds * 1000,
                "recall": shared / wanted.size,
                "build s": round(facts.seconds, 1),
                "bytes per item": round(facts.bytes_per_item),
            }
        )
    return rows, indexes


def _timed(search: Any, queries: Any) -> tuple[Any, float]:
    """Return the search results for all queries, one at a time, and the median seconds per query."""
    found, seconds = [], []
    for row in range(len(queries)):
        began = time.perf_counter()
        found.append(search(queries[row : row + 1])[0])
        seconds.append(time.perf_counter() - began)
    return np.stack(found), float(np.median(seconds))


def _inside(recommender: CascadeRecommender, args: argparse.Namespace) -> tuple[float, float]:
    """Return responses per second of in-process calls, and CPU milliseconds per response."""
    recommender.recommend([0])
    began, cpu, number = time.perf_counter(), time.process_time(), 0
    while number < args.requests and time.perf_counter() - began < args.seconds:
        recommender.recommend([number % args.users])
        number += 1
    return number / (time.perf_counter() - began), (time.process_time() - cpu) / number * 1000


def _service(export: Path, index: Path, folder: Path, inside: float, args: argparse.Namespace) -> list[dict[str, Any]]:
    links = folder / "current", folder / "current-index"
    other = republish(export, index, folder)
    for link, target in zip(links, (export, index), strict=True):
        link.symlink_to(target)
    rows = []
    levels = [int(text) for text in str(args.concurrency).split(",")]
    with running_service(*links) as service:
        put_load(service, args.users, 1, 10, args.seconds)
        for level in levels:
            load = put_load(service, args.users, level, args.requests, args.seconds)
            rows.append(_row(f"service, {level} at once", load, inside))

        async def publish() -> None:
            # The index is replaced first: a change of the export makes the service open both.
            for link, target in reversed(list(zip(links, other, strict=True))):
                fresh = link.with_name("next")
                fresh.symlink_to(target)
                fresh.rename(link)
            await wait_for_export(service, read_manifest(other[0], verify=False).identity, args.seconds)

        load = put_load(service, args.users, levels[-1], args.requests, args.seconds, publish)
        rows.append(_row(f"service, {levels[-1]} at once, reload", load, inside))
    return rows


def _row(part: str, load: Load, inside: float) -> dict[str, Any]:
    return {
        "part": part,
        "requests/s": round(load.rate),
        "ratio": inside / load.rate,
        "cpu ms": None if load.cpu is None else load.cpu / len(load.latencies) * 1000,
        "p50 ms": load.percentile(50),
        "p95 ms": load.percentile(95),
        "p99 ms": load.percentile(99),
        "errors": load.errors,
        "exports": len(load.exports),
    }


QUOTAS = (200, 30)
VIEWS = 20


def make_export(folder: Path, items: int, users: int, seed: int = 0) -> None:
    """Write an export of two stages, two_tower and mlp, with quotas 200 and 30."""
    topics = 64
    schema = Schema(
        (Table("user", users + 1), Table("video", items + 1), Table("topic", topics + 1)),
        (Feature("user", "user"),),
        (Feature("video", "video"), Feature("topic", "topic")),
        (Feature("video", "video"), Feature("topic", "topic")),
    )
    torch.manual_seed(seed)
    generator = np.random.default_rng(seed)
    folder.mkdir()
    entries = []
    stages: list[tuple[str, type[Stage]]] = [("retrieval", TwoTower), ("ranking", MLPStage)]
    for (name, kind), quota in zip(stages, QUOTAS, strict=True):
        stage = kind(FeatureEmbedding(schema, dim=8)).eval()
        entries.append(write_stage(folder, name, kind.name, quota, models_of(stage, schema), programs=False))
    ids = np.stack([np.arange(1, items + 1), generator.integers(1, topics + 1, items)], axis=1).astype(np.int32)
    counted = np.ones(items, dtype=np.int64)
    ItemTable(np.arange(items), ids, np.empty((items, 0), dtype=np.float32), counted).write(folder / ITEMS)
    seen = generator.integers(0, items, (users, VIEWS))
    UserTable(
        names=np.arange(users),
        request=np.arange(1, users + 1, dtype=np.int32)[:, None],
        request_values=np.empty((users, 0), dtype=np.float32),
        history=ids[seen],
        history_length=np.full(users, VIEWS),
        history_values=np.empty((users, VIEWS, 0), dtype=np.float32),
        seen=seen.reshape(-1),
        seen_ends=np.arange(1, users + 1) * VIEWS,
    ).write(folder / USERS)
    write_manifest(folder, schema, tuple(entries), 10, {"views": VIEWS})


def republish(export: Path, index: Path, target: Path) -> tuple[Path, Path]:
    """Return copies of an export and its index with a new identity. Large files are hard links."""
    other, other_index = target / "export-2", target / "index-2"
    for source, made in ((export, other), (index, other_index)):
        shutil.copytree(source, made, copy_function=os.link)
    manifest = read_manifest(other, verify=False)
    fresh = write_manifest(other, manifest.schema, manifest.stages, manifest.k + 1, manifest.facts)
    facts = json.loads((index / FACTS).read_text(encoding="utf-8"))
    (other_index / FACTS).unlink()
    (other_index / FACTS).write_text(json.dumps({**facts, "export": fresh.identity}), encoding="utf-8")
    return other, other_index
