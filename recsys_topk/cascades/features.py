"""From a schema to TorchRec embedding tables, and from a batch of ids to embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor, PoolingType
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.datamodules.schema import Schema, Table
from recsys_topk.ops.look_up import Slot, look_up
from recsys_topk.ops.parallel import checked

HistoryForm = Literal["rows", "mean"]
KINDS = ("request", "items", "history")


@dataclass(frozen=True)
class Embedded:
    """The embeddings of a batch; padding ids have the embedding 0.

    Attributes:
        request: (B, D_r), the request's features side by side.
        items: (M, D_i), the pool's features side by side; those that the history shares come first.
        history: (B, L, D_h), or (B, D_h) for the mean over the real views (0 for an empty history).
    """

    request: Tensor
    items: Tensor
    history: Tensor


@dataclass(frozen=True)
class FusedOptimizer:
    """An optimizer that updates the tables inside backward, row by row, so that no table-sized gradient exists.

    Attributes:
        optimizer: Class that names it to fbgemm: SGD, Adagrad or RowWiseAdagrad (a CPU has no fused Adam).
        options: Its arguments, e.g. ``lr`` and ``eps``.
    """

    optimizer: type[torch.optim.Optimizer]
    options: Mapping[str, float]


class FeatureEmbedding(nn.Module):
    """TorchRec tables for the features of a schema.

    Tables are looked up by `EmbeddingBagCollection`s with bags of length 1, or 0 for padding: the pooled kernel with
    length-1 bags is several times faster on CPU than the sequence kernel. Requests (B rows), pool items (M rows) and
    histories (B L rows) differ in their number of rows, so the tables are grouped by which of the three use them, and
    each group is one collection whose rows are those of its kinds, one after another. Plain tables on a CPU are read by
    `look_up` instead, where numba is installed: the same numbers, several times faster still.

    Args:
        schema: The features.
        dim: Embedding dimension, one for all tables or by table name (then with the key ``"default"`` for the rest).
        init_std: Tables are initialised from N(0, init_std^2).
        fused: Update the tables inside backward with this optimizer; None = an ordinary one does it.
    """

    def __init__(
        self,
        schema: Schema,
        dim: int | Mapping[str, int] = 8,
        init_std: float = 1.0,
        fused: FusedOptimizer | None = None,
    ) -> None:
        super().__init__()
        dims = _dimensions(schema, dim)
        self.groups = _group_tables(schema)
        self.collections = nn.ModuleDict(
            {
                "_".join(kinds): _collection([_config(table, dims[table.name], init_std) for table in tables], fused)
                for kinds, tables in self.groups.items()
            }
        )
        self.columns = {
            (kinds, kind): [_column(schema, kind, table.name) for table in tables]
            for kinds, tables in self.groups.items()
            for kind in kinds
        }
        self.dims = {
            kind: sum(dims[table.name] for kinds, tables in self.groups.items() if kind in kinds for table in tables)
            for kind in KINDS
        }
        for kinds, tables in self.groups.items():
            padding = torch.tensor([table.padding for table in tables])
            self.register_buffer(f"padding_{'_'.join(kinds)}", padding[:, None], persistent=False)
        self.slots = self._slots(dims)

    @property
    def history_dim(self) -> int:
        """Width of an embedded view; the first `history_dim` columns of `Embedded.items` are the same features."""
        return self.dims["history"]

    def forward(self, batch: CascadeBatch, history: HistoryForm = "rows") -> Embedded:
        """Embed a batch.

        Args:
            batch: The ids.
            history: ``"rows"`` for every view, ``"mean"`` for their mean (one bag a request, which is cheaper).
        """
        tables = self._plain_tables()
        if tables is not None:
            ids = [batch.request, batch.items, batch.history if history == "mean" else batch.history.flatten(0, 1)]
            ids = [rows.long().contiguous() for rows in ids]
            longest = batch.history.shape[1] + 1
            lengths = checked(batch.history_length, longest, "history lengths") if history == "mean" else None
            request, items, views = look_up(self.slots, ids, tables, lengths)
            return Embedded(request, items, views if history == "mean" else views.view(*batch.history.shape[:2], -1))
        parts: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
        for kinds in self.groups:
            for kind, embedded in self._look_up(kinds, batch, history).items():
                parts[kind].append(embedded)
        joined = {kind: torch.cat(part, dim=1) if len(part) > 1 else part[0] for kind, part in parts.items()}
        if history == "mean":
            count = batch.history_length.clamp_min(1)[:, None]
            joined["history"] = joined["history"] / count
        else:
            joined["history"] = joined["history"].view(*batch.history.shape[:2], -1)
        return Embedded(**joined)

    def _slots(self, dims: Mapping[str, int]) -> list[Slot]:
        tables = [table for group in self.groups.values() for table in group]
        slots, filled = [], dict.fromkeys(KINDS, 0)
        for kinds, group in self.groups.items():
            for kind in kinds:
                for table, column in zip(group, self.columns[kinds, kind], strict=True):
                    where = (KINDS.index(kind), column, tables.index(table))
                    slots.append(Slot(*where, table.name, table.padding, filled[kind], dims[table.name]))
                    filled[kind] += dims[table.name]
        return slots

    def _plain_tables(self) -> list[Tensor] | None:
        """Return the weights in the order of the groups, or None if TorchRec has to read them: fused or sharded."""
        if any(type(collection) is not EmbeddingBagCollection for collection in self.collections.children()):
            return None
        weights: list[Tensor] = list(self.collections.parameters())
        return weights if look_up.backend_for(self.slots, (), weights, None) != "torch" else None

    def _look_up(self, kinds: tuple[str, ...], batch: CascadeBatch, history: HistoryForm) -> dict[str, Tensor]:
        name = "_".join(kinds)
        collection = self.collections[name]
        keys = [table.name for table in self.groups[kinds]]
        ids = [getattr(batch, kind)[..., self.columns[kinds, kind]].flatten(0, -2) for kind in kinds]
        rows = torch.cat(ids).t() if len(ids) > 1 else ids[0].t()
        present = rows != getattr(self, f"padding_{name}")
        sizes = [part.shape[0] for part in ids]
        lengths = list(torch.split(present, sizes, dim=1))
        if history == "mean" and "history" in kinds:
            at = kinds.index("history")
            size, length = batch.history.shape[:2]
            lengths[at] = lengths[at].reshape(len(keys), size, length).sum(-1)
            sizes[at] = size
        bags = torch.cat([part.to(torch.int32) for part in lengths], dim=1).flatten()
        keyed = collection(KeyedJaggedTensor(keys=keys, values=rows[present], lengths=bags))
        return dict(zip(kinds, torch.split(_values(keyed, keys), sizes), strict=True))


def _config(table: Table, dim: int, init_std: float) -> Any:
    return EmbeddingBagConfig(
        name=table.name,
        embedding_dim=dim,
        num_embeddings=table.rows,
        feature_names=[table.name],
        pooling=PoolingType.SUM,
        init_fn=partial(torch.nn.init.normal_, std=init_std),
    )


def _collection(configs: Sequence[Any], fused: FusedOptimizer | None) -> nn.Module:
    if fused is None:
        plain: nn.Module = EmbeddingBagCollection(tables=list(configs))
        return plain
    made: nn.Module = FusedEmbeddingBagCollection(
        tables=list(configs), optimizer_type=fused.optimizer, optimizer_kwargs=dict(fused.options)
    )
    weights = made.state_dict()
    for config in configs:  # the fused collection has an initialisation of its own
        config.init_fn(weights[f"embedding_bags.{config.name}.weight"])
    return made


def _values(keyed: Any, keys: Sequence[str]) -> Tensor:
    """Read a KeyedTensor in the order of `keys`: as it lies if it has that order (free), by name if not (sharded)."""
    values: Tensor = keyed.values() if list(keyed.keys()) == keys else KeyedTensor.regroup([keyed], [list(keys)])[0]
    return values


def _dimensions(schema: Schema, dim: int | Mapping[str, int]) -> dict[str, int]:
    names = [table.name for table in schema.tables]
    if isinstance(dim, int):
        dim = {"default": dim}
    unknown = set(dim) - {*names, "default"}
    if unknown:
        raise ValueError(f"embedding dimensions name unknown tables {sorted(unknown)}; the schema has {names}")
    missing = [name for name in names if name not in dim and "default" not in dim]
    if missing:
        raise ValueError(f"no embedding dimension for tables {missing}; add them or a 'default'")
    return {name: dim.get(name, dim.get("default", 0)) for name in names}


def _group_tables(schema: Schema) -> dict[tuple[str, ...], list[Table]]:
    """Group the tables by the kinds of rows that use them, the history's first, each in column order of first use."""
    users: dict[str, list[str]] = {}
    for kind in ("history", "items", "request"):
        features = getattr(schema, kind)
        seen = [feature.table for feature in features]
        doubled = {table for table in seen if seen.count(table) > 1}
        if doubled:
            raise ValueError(
                f"two {kind} features share the tables {sorted(doubled)}; give each feature of one kind its own table"
            )
        for table in seen:
            users.setdefault(table, []).append(kind)
    groups: dict[tuple[str, ...], list[Table]] = {}
    for table, kinds in users.items():
        groups.setdefault(tuple(kind for kind in KINDS if kind in kinds), []).append(schema.table(table))
    return groups


def _column(schema: Schema, kind: str, table: str) -> int:
    return next(i for i, feature in enumerate(getattr(schema, kind)) if feature.table == table)


def table_sizes(embedding: FeatureEmbedding) -> list[dict[str, object]]:
    """Return name, rows, dimension and megabytes of each table, largest first."""
    configs = [
        config
        for collection in embedding.collections.children()
        for config in collection.embedding_bag_configs()  # type: ignore[operator]
    ]
    configs.sort(key=lambda config: -config.num_embeddings * config.embedding_dim)
    return [
        {
            "table": config.name,
            "rows": config.num_embeddings,
            "dim": config.embedding_dim,
            "MB": config.num_embeddings * config.embedding_dim * 4 / 2**20,
        }
        for config in configs
    ]
