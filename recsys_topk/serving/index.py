"""A faiss index of the catalogue over the item vectors of the first stage. Needs no torch."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

import numpy as np

from recsys_topk.files import whole_folder, write_whole
from recsys_topk.serving.filters import Filter
from recsys_topk.serving.funnel import CHUNK, StageRunner, first_line, search_exactly
from recsys_topk.serving.manifest import Manifest, ManifestError, read_manifest, sha256
from recsys_topk.tabular.export_tables import ITEMS, ItemTable, Names
from recsys_topk.types import Array

IndexKind = Literal["flat", "ivf", "hnsw"]

FILE: Final = "index.faiss"
FACTS: Final = "index.json"
_FORMAT: Final = 1
_QUERIES: Final = 256
_FLAT_ITEMS: Final = 200_000
_FEW_ITEMS: Final = 20_000
"""Filters that fewer items pass are searched exactly by every index."""


@dataclass(frozen=True)
class IndexFacts:
    """Properties of an index."""

    kind: IndexKind  # "flat" (exact), "ivf" or "hnsw"
    export: str  # identity of the export whose item vectors are indexed
    items: int
    width: int  # dimension of the vectors
    effort: int  # search effort: number of visited lists (ivf) or of kept candidates (hnsw)
    # Share of the true nearest items that a search finds, on `queries` vectors, at the first stage's quota.
    recall: float
    queries: int  # number of query vectors for the recall
    seconds: float  # build time
    bytes_per_item: float  # size of the file divided by the number of items
    sha256: str


def build_index(
    export: str | Path,
    out: str | Path,
    kind: IndexKind | None = None,
    *,
    effort: int | None = None,
    seed: int = 42,
    threads: int = 1,
    progress: Callable[[int], object] = lambda items: None,
) -> IndexFacts:
    """Build an index of the catalogue of an export. Return its properties.

    Args:
        export: Folder of the export.
        out: Folder to create; it must not exist.
        kind: ``"flat"`` is exact; ``"ivf"`` searches the nearest of sqrt(items) lists; ``"hnsw"`` searches a graph.
            None = flat up to 200,000 items, otherwise hnsw.
        effort: Number of lists to visit, or of candidates to keep. A larger value is slower and has a higher recall.
            None = 64 lists or 128 candidates.
        seed: Seed of the clustering and of the queries for the recall.
        threads: Threads of faiss and of the item tower.
        progress: Called with the number of items of each encoded batch.
    """
    import faiss

    out = Path(out)
    if out.exists():
        raise ValueError(f"{str(out)!r} already exists; use another --out, or remove it")
    if kind is not None and kind not in get_args(IndexKind):
        raise ValueError(f"the kind of an index must be one of {', '.join(get_args(IndexKind))}, got {kind!r}")
    manifest = read_manifest(export)
    stage = first_stage(manifest, Path(export), threads)
    items = ItemTable.read(Path(export) / ITEMS)
    started = time.perf_counter()
    vectors = encode_catalogue(stage, items, progress)
    kind = kind or default_kind(len(vectors))
    faiss.omp_set_num_threads(threads)
    index = _filled(kind, vectors, seed)
    effort = _set_effort(index, kind, effort)
    seconds = time.perf_counter() - started
    queries, number = sample_queries(vectors, seed), min(manifest.stages[0].quota, len(vectors))
    recall = recall_of(_search(index, queries, number)[0], _search(_filled("flat", vectors, seed), queries, number)[0])
    with whole_folder(out) as folder:
        faiss.write_index(index, str(folder / FILE))
        facts = IndexFacts(
            kind=kind,
            export=manifest.identity,
            items=len(vectors),
            width=vectors.shape[1],
            effort=effort,
            recall=recall,
            queries=len(queries),
            seconds=seconds,
            bytes_per_item=(folder / FILE).stat().st_size / max(len(vectors), 1),
            sha256=sha256(folder / FILE),
        )
        write_whole(folder / FACTS, json.dumps({"format": _FORMAT, **asdict(facts)}, indent=1) + "\n")
    return facts


class CatalogueIndex:
    """An index of the catalogue of an export.

    Args:
        folder: Folder that `build_index` wrote.
        manifest: Manifest of the export. The index must have been built for it.
        threads: Threads per search.
    """

    def __init__(self, folder: str | Path, manifest: Manifest, threads: int = 1) -> None:
        import faiss

        self.facts = read_facts(folder)
        if self.facts.export != manifest.identity:
            raise ManifestError(
                f"the index {str(folder)!r} was built for a different export; build it again with `recsys-topk index`"
            )
        if sha256(Path(folder) / FILE) != self.facts.sha256:
            raise ManifestError(f"{str(Path(folder) / FILE)!r} does not match its SHA-256; build the index again")
        faiss.omp_set_num_threads(threads)
        library: Any = faiss  # its types lack some functions
        try:
            self._index = library.read_index(str(Path(folder) / FILE))
        except Exception as error:
            raise ManifestError(f"{str(Path(folder) / FILE)!r} cannot be loaded ({first_line(error)})") from error
        _set_effort(self._index, self.facts.kind, self.facts.effort)
        if self.facts.kind == "ivf":
            self._index.make_direct_map()  # to reconstruct vectors

    def search(self, vectors: Array, number: int, where: Filter | None = None) -> tuple[Array, Array]:
        """Return rows and scores of the best items, (B, number), best first; row -1 where fewer items were found.

        With a filter, only its items are found: exactly if the index is flat or if few items pass, otherwise with the
        effort of the index.
        """
        if where is None:
            return _search(self._index, vectors, number)
        if self.facts.kind != "flat" and len(where.rows) <= _FEW_ITEMS:
            return search_exactly(vectors, self._index.reconstruct_batch(where.rows), number, names=where.rows)
        passing = np.zeros(self.facts.items, dtype=np.bool_)
        passing[where.rows] = True
        import faiss

        library: Any = faiss
        options: dict[str, Any] = {"sel": library.IDSelectorBitmap(np.packbits(passing, bitorder="little"))}
        kinds: dict[IndexKind, Any] = {"hnsw": library.SearchParametersHNSW, "ivf": library.SearchParametersIVF}
        if self.facts.kind != "flat":
            options["nprobe" if self.facts.kind == "ivf" else "efSearch"] = self.facts.effort
        return _search(self._index, vectors, number, kinds.get(self.facts.kind, library.SearchParameters)(**options))


def read_facts(folder: str | Path) -> IndexFacts:
    """Return the properties of an index."""
    path = Path(folder) / FACTS
    if not path.is_file():
        raise ManifestError(f"{str(folder)!r} has no index; build one with `recsys-topk index`")
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        if plain.pop("format") != _FORMAT:
            raise ValueError("unknown format")
        return IndexFacts(**plain)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ManifestError(f"{path} cannot be read ({error}); build the index again") from error


def first_stage(manifest: Manifest, export: Path, threads: int = 1) -> StageRunner:
    """Return the first stage of an export, which must have towers."""
    entry = manifest.stages[0]
    if not entry.has_towers:
        raise ValueError(
            f"the first stage {entry.name!r} ({entry.kind}) has no item vectors, so it cannot be indexed; "
            f"use `recommend` or `serve` without an index, which score all items"
        )
    return StageRunner(export, entry, threads)


def encode_catalogue(stage: StageRunner, items: ItemTable, progress: Callable[[int], object] = lambda n: None) -> Array:
    """Return the vectors of all items, (C, D) float32, computed in batches."""
    blocks = []
    for start in range(0, len(items.names), CHUNK):
        blocks.append(stage.item_vectors(items, slice(start, start + CHUNK)))
        progress(len(blocks[-1]))
    return np.ascontiguousarray(np.concatenate(blocks), dtype=np.float32)


def nearest_items(vectors: Array, names: Array, item: Any, number: int) -> list[tuple[Any, float]]:
    """Return the items with the largest cosine to an item, as (name, cosine), largest first, without the item itself.

    Args:
        vectors: (C, D).
        names: (C,) names of the items.
        item: Name of the item.
        number: Number of items.

    Example:
        >>> nearest_items(np.array([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0]]), np.array(["a", "b", "c"]), "a", 1)
        [('c', 0.7071)]
    """
    row = int(Names(names).rows([item])[0])
    if row < 0:
        raise ValueError(f"the catalogue has no item {item!r}; its items have names such as {names[0]!s}")
    lengths = np.linalg.norm(vectors, axis=1)
    cosine = vectors @ vectors[row] / np.maximum(lengths * lengths[row], np.finfo(np.float32).tiny)
    order = [at for at in np.argsort(-cosine, kind="stable")[: number + 1].tolist() if at != row]
    return [(names[at].item(), round(float(cosine[at]), 4)) for at in order[:number]]


def _filled(kind: IndexKind, vectors: Array, seed: int) -> Any:
    import faiss

    width = vectors.shape[1]
    if kind == "flat":
        index: Any = faiss.IndexFlatIP(width)
    elif kind == "hnsw":
        index = faiss.IndexHNSWFlat(width, 32, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = 200
    else:
        lists = max(1, int(np.sqrt(len(vectors))))
        index = faiss.IndexIVFFlat(faiss.IndexFlatIP(width), width, lists, faiss.METRIC_INNER_PRODUCT)
        index.cp.seed = seed
        index.cp.min_points_per_centroid = 1
        chosen = np.random.default_rng(seed).permutation(len(vectors))[: 64 * lists]
        index.train(vectors[chosen])
    index.add(vectors)
    return index


def _set_effort(index: Any, kind: IndexKind, effort: int | None) -> int:
    if kind == "ivf":
        index.nprobe = min(effort or 64, index.nlist)
        return int(index.nprobe)
    if kind == "hnsw":
        index.hnsw.efSearch = effort or 128
        return int(index.hnsw.efSearch)
    return 0


def default_kind(items: int) -> IndexKind:
    """Return the kind of an index of so many items: exact if they are few."""
    return "flat" if items <= _FLAT_ITEMS else "hnsw"


def sample_queries(vectors: Array, seed: int) -> Array:
    """Return item vectors with noise as queries. Requests are not available here, and item vectors find themselves."""
    generator = np.random.default_rng(seed)
    chosen = vectors[generator.integers(0, len(vectors), min(_QUERIES, len(vectors)))]
    noise = generator.normal(size=chosen.shape) * vectors.std(axis=0)
    return np.asarray(chosen + noise, dtype=np.float32)


def recall_of(found: Array, wanted: Array) -> float:
    """Return the share of the wanted rows, (B, n), that were found."""
    return sum(len(np.intersect1d(one, other)) for one, other in zip(wanted, found, strict=True)) / wanted.size


def _search(index: Any, vectors: Array, number: int, options: Any = None) -> tuple[Array, Array]:
    scores, rows = index.search(np.ascontiguousarray(vectors, dtype=np.float32), number, params=options)
    return rows, scores
