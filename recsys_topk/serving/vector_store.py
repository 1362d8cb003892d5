"""The catalogue in a Qdrant vector store: item vectors of the first stage, with attributes to filter by."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from recsys_topk.serving.filters import Filter
from recsys_topk.serving.funnel import search_exactly
from recsys_topk.serving.index import (
    IndexFacts,
    IndexKind,
    default_kind,
    encode_catalogue,
    first_stage,
    recall_of,
    sample_queries,
)
from recsys_topk.serving.manifest import Manifest, ManifestError, read_manifest
from recsys_topk.tabular.export_tables import ITEMS, ItemTable
from recsys_topk.types import Array

SCHEME: Final = "qdrant://"
_BATCH: Final = 256


def is_store(place: str | Path | None) -> bool:
    """Return whether the place of an index is the address of a vector store.

    Example:
        >>> is_store("qdrant://localhost/films"), is_store("export-index")
        (True, False)
    """
    return str(place).startswith(SCHEME)


def build_store(
    export: str | Path,
    store: str,
    kind: IndexKind | None = None,
    *,
    seed: int = 42,
    threads: int = 1,
    progress: Callable[[int], object] = lambda items: None,
) -> IndexFacts:
    """Write the items of an export to a new collection. An incomplete one is replaced; a complete one is an error.

    Args:
        export: Folder of the export.
        store: ``qdrant://HOST[:PORT]/COLLECTION``; also ``qdrant:///FOLDER/COLLECTION`` and
            ``qdrant://:memory:/COLLECTION``, which need no server. The key is read from ``QDRANT_API_KEY``.
        kind: ``"flat"`` (no graph, exact) or ``"hnsw"``; None = flat up to 200,000 items.
        seed: Seed of the queries for the recall.
        threads: Threads of the item tower.
        progress: Called with the number of items of each encoded batch.
    """
    from qdrant_client import models

    if kind == "ivf":
        raise ValueError("the kind of a vector store must be flat or hnsw, got 'ivf'")
    manifest = read_manifest(export)
    client, name = _connect(store, manifest)
    stage, items = first_stage(manifest, Path(export), threads), ItemTable.read(Path(export) / ITEMS)
    started = time.perf_counter()
    kind = kind or default_kind(len(items.names))
    if client.collection_exists(name):
        if client.count(name).count == len(items.names):
            raise ValueError(f"{store!r} already has the collection {name!r} of this export; delete it there first")
        client.delete_collection(name)
    vectors = encode_catalogue(stage, items, progress)
    columns = manifest.schema.id_columns("items")
    client.create_collection(
        name,
        vectors_config=models.VectorParams(size=vectors.shape[1], distance=models.Distance.DOT),
        hnsw_config=models.HnswConfigDiff(m=0 if kind == "flat" else 32),
    )
    for feature in () if store.startswith((f"{SCHEME}/", f"{SCHEME}:memory:")) else columns:
        client.create_payload_index(name, feature, models.PayloadSchemaType.INTEGER)
    attributes = (
        {feature: items.ids[row, own].tolist() for feature, own in columns.items()} for row in range(len(items.names))
    )
    client.upload_collection(name, vectors, attributes, range(len(items.names)), batch_size=_BATCH, wait=True)
    seconds = time.perf_counter() - started
    queries, number = sample_queries(vectors, seed), min(manifest.stages[0].quota, len(vectors))
    recall = recall_of(
        StoreIndex(store, manifest).search(queries, number)[0], search_exactly(queries, vectors, number)[0]
    )
    return IndexFacts(
        kind, manifest.identity, len(vectors), vectors.shape[1], 0, recall, len(queries), seconds, float("nan"), ""
    )


class StoreIndex:
    """The collection of an export in a vector store, used in place of a `CatalogueIndex`.

    Args:
        store: The address that `build_store` was given.
        manifest: Manifest of the export. The name of its collection contains the identity of the export.
        threads: Not used; the store has its own.
    """

    def __init__(self, store: str | Path, manifest: Manifest, threads: int = 1) -> None:
        self._client, self._name = _connect(str(store), manifest)
        items = int(manifest.facts["items"])
        found = self._client.count(self._name).count if self._client.collection_exists(self._name) else 0
        if found != items:
            raise ManifestError(
                f"{str(store)!r} has {found:,} of the {items:,} items of this export; write them with `recsys-topk "
                f"index --store {store}`"
            )

    def search(self, vectors: Array, number: int, where: Filter | None = None) -> tuple[Array, Array]:
        """Return rows and scores of the best items, (B, number), best first; row -1 where fewer items were found."""
        from qdrant_client import models

        rows = np.full((len(vectors), number), -1, dtype=np.int64)
        scores = np.full((len(vectors), number), -np.inf, dtype=np.float32)
        if where is not None and not len(where.rows):
            return rows, scores
        needed = () if where is None else where.ids.items()
        condition = models.Filter(
            must=[models.FieldCondition(key=name, match=models.MatchAny(any=ids)) for name, ids in needed]
        )
        asked = [models.QueryRequest(query=vector, filter=condition, limit=number) for vector in vectors.tolist()]
        for place, found in enumerate(self._client.query_batch_points(self._name, asked)):
            rows[place, : len(found.points)] = [point.id for point in found.points]
            scores[place, : len(found.points)] = [point.score for point in found.points]
        return rows, scores


def _connect(store: str, manifest: Manifest) -> tuple[Any, str]:
    """Return a client, and the name of the collection of an export."""
    place, _, collection = store.removeprefix(SCHEME).rpartition("/")
    if not is_store(store) or not place or not collection:
        raise ValueError(f"the address of a vector store must be {SCHEME}HOST[:PORT]/COLLECTION, got {store!r}")
    return _client(place), f"{collection}-{manifest.identity}"


@cache
def _client(place: str) -> Any:
    """Return a client, one per place: a folder can be opened once per process."""
    try:
        from qdrant_client import QdrantClient
    except ImportError:
        raise ValueError("a vector store needs qdrant-client: pip install 'recsys-topk[qdrant]'") from None
    if place == ":memory:":
        return QdrantClient(":memory:")
    if place.startswith("/"):
        return QdrantClient(path=place, force_disable_check_same_thread=True)
    host, _, port = place.partition(":")
    return QdrantClient(host=host, port=int(port or 6333), api_key=os.environ.get("QDRANT_API_KEY"))
