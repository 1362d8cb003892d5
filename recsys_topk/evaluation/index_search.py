"""Candidates of the first stage from an approximate index, for evaluation over the whole catalogue."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recsys_topk.cascades.stage import Stage
from recsys_topk.datamodules.base import CascadeDataModule
from recsys_topk.datamodules.catalogue import Catalogue
from recsys_topk.evaluation.search import Candidates, Requests, best_of, request_vectors, score_candidates
from recsys_topk.serving.index import CatalogueIndex
from recsys_topk.serving.manifest import read_manifest
from recsys_topk.tabular.export_tables import ITEMS, ItemTable


class IndexedCatalogue:
    """An index of an export, as the search of `CorpusEvaluation`.

    The index names candidates; the stage of the checkpoint scores them. Items that the index does not find are lost.

    Args:
        index: The index, written by `recsys-topk index`.
        export: The export that it was built for; None = the folder with the name of the index without ``-index``.
        data: The data module that is evaluated.
    """

    def __init__(self, index: str | Path, export: str | Path | None, data: CascadeDataModule) -> None:
        export = export_of(index) if export is None else Path(export)
        self.index = CatalogueIndex(index, read_manifest(export))
        self.names = ItemTable.read(Path(export) / ITEMS).index
        self.data = data

    def __call__(self, stage: Stage, items: Catalogue) -> IndexSearch:
        """Return the search in a catalogue."""
        return IndexSearch(self, stage, items)


class IndexSearch:
    """The best items of one catalogue that an index finds.

    Args:
        source: The index.
        stage: The first stage, with towers.
        items: The catalogue that is evaluated; items of the export that it does not have are dropped.
    """

    def __init__(self, source: IndexedCatalogue, stage: Stage, items: Catalogue) -> None:
        towers = stage.towers
        if towers is None:
            raise ValueError("the first stage has no item vectors, so no index can be searched; leave out --index")
        self.source, self.towers, self.items = source, towers, items

    @cached_property
    def _rows(self) -> Tensor:
        """The row in the evaluated catalogue of each item of the export; -1 = not in the catalogue."""
        names = self.source.data.item_names(self.items.item_id.cpu().numpy())
        export_rows = self.source.names.rows(names)
        rows = np.full(len(self.source.names), -1, dtype=np.int64)
        rows[export_rows[export_rows >= 0]] = np.flatnonzero(export_rows >= 0)
        return torch.from_numpy(rows).to(self.items.item_id.device)

    def __call__(self, requests: Requests, quota: int) -> Candidates:
        """Return up to `quota` items per request. Excluded items are searched for too, and then dropped."""
        vectors = request_vectors(self.towers, requests.batch, self.items)
        absent = int((self._rows < 0).sum())
        number = min(quota + requests.excluded.shape[1] + absent, len(self._rows))
        export_rows = torch.from_numpy(self.source.index.search(vectors.cpu().numpy(), number)[0]).to(self._rows.device)
        rows = torch.where(export_rows >= 0, self._rows[export_rows.clamp_min(0)], -1)
        mask = (rows >= 0) & ~(rows[:, :, None] == requests.excluded[:, None]).any(-1)
        # The first `quota` of the remaining items: later ones were searched for only to replace dropped items.
        mask &= mask.cumsum(1) <= quota
        matches = (rows[:, :, None] == requests.own[:, None]) & requests.mask[:, None]
        labels = torch.where(matches, requests.labels[:, None], 0.0).amax(-1)
        rows = torch.where(mask, rows, 0)
        chosen = Candidates(rows, torch.zeros_like(labels), labels, mask)
        scores = score_candidates(self.towers, requests, self.items, chosen, 512)
        return best_of(rows, scores, labels, mask, min(quota, len(self.items.item_id)))


def export_of(index: str | Path) -> Path:
    """Return the export beside an index whose folder is named after it."""
    path = Path(index)
    export = path.with_name(path.name.removesuffix("-index"))
    if export == path or not export.is_dir():
        raise ValueError(f"no export found beside the index {str(index)!r}; set --export DIR")
    return export
