"""Embedding tables of TorchRec made from a schema, and one vector per row made from a batch of ids and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from recsys_topk.cascades.layout import PARTS, EmbeddingLayout, Parts, dimensions, untie_history
from recsys_topk.cascades.tables import (
    FusedOptimizer,
    configs_of,
    fused_collection,
    initialise,
    is_fused,
    is_plain,
    join_bags,
    make_bags,
    pad_bags,
    place_of_tables,
    plain_collection,
    read_torchrec,
    read_weights,
    readable,
    row_updates,
    table_config,
    table_weights,
)
from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.ops.backends.parallel import checked
from recsys_topk.ops.stages.look_up import Slot, look_up, look_up_and_update
from recsys_topk.ops.stages.row_update import RowUpdate
from recsys_topk.tabular.schema import Part, Schema

if TYPE_CHECKING:
    from typing import Self

HistoryForm = Literal["rows", "mean"]
# Maps a batch to the largest number of requests, pool items and views (B L) of any process.
Agree = Callable[[CascadeBatch], tuple[int, int, int]]


@dataclass(frozen=True)
class Embedded:
    """The vectors of a batch: embeddings, then values. Padding ids have embedding 0; a part may have width 0.

    Attributes:
        request: (B, D_r), the concatenated features of the request.
        items: (M, D_i), the concatenated features of the pool items; features shared with the history come first.
        history: (B, L, D_h), or (B, D_h) for one vector per request, e.g. the mean over the real views (0 for an empty
            history).
        ages: (B, L), the ages of the views; None if the schema has none.
    """

    request: Tensor
    items: Tensor
    history: Tensor
    ages: Tensor | None = None


def name_of(parts: Parts) -> str:
    """Return the name, as in state-dict keys, of the collection with the tables that these parts read."""
    return "_".join(parts) if parts != ("items",) else "items_only"  # `items` is a method of ModuleDict


def needs_static_shapes(tensor: Tensor) -> bool:
    """Return whether the number of ids must not depend on the data: except on a CPU, counting them synchronises."""
    return tensor.device.type != "cpu"


class FeatureEmbedding(nn.Module):
    """TorchRec tables for the categorical and bag features of a schema; numeric and vector features are passed on.

    `EmbeddingBagCollection`s look up the tables: on a CPU the pooled kernel with bags of length 1 is several times
    faster than the sequence kernel. A bag feature is the mean over its real ids. On a CPU padding is removed from the
    bags. On other devices it stays with weight 0, so that shapes are known without reading the ids (`EmbeddingLayout`
    describes the groups of features). Tables that are not sharded are read directly. On a CPU `look_up` reads them if
    numba is installed and no feature is a bag; it also updates tables with a fused optimizer. Otherwise
    `embedding_bag` reads them if they have an ordinary optimizer or are not trained.

    A module on the meta device holds plain tables. Moving them to a real device (`to_empty`) initialises them, and
    builds fused tables if `fused` is set. Moving fused tables to another device builds them again there.

    Args:
        schema: The features.
        dim: Embedding dimension, one for all tables or by table name (then with the key ``"default"`` for the rest).
        init_std: Tables are initialised from N(0, init_std^2).
        fused: Optimizer that updates the tables inside backward; None = an ordinary optimizer updates them.
        device: Device of the tables; None = torch's default device.
        tie_history: The history reads the tables of the items. False = it has separate tables (`untie_history`).
        only: Name of a feature of history and items; all others are left out. None = all features.

    Attributes:
        collections: The tables. The optimizer treats all modules in it as tables.
        dims: Width of the output of each part: ``"request"``, ``"items"``, ``"history"``.
        fused: The fused optimizer of the tables; None after `defuse`.
        rate: Learning rate of that optimizer, also after `defuse`; 0 if there is none.
        agree: For sharded tables: returns sizes that make the number of bags equal in all processes; None = use the
            sizes of this process.

    Example:
        >>> from recsys_topk.tabular.schema import Feature, Table
        >>> schema = Schema(
        ...     tables=(Table("video", 100), Table("genre", 20)),
        ...     request=(Feature("age", kind="numeric"),),
        ...     history=(Feature("video_id", "video"),),
        ...     items=(Feature("video_id", "video"), Feature("genres", "genre", "bag", 3)),
        ... )
        >>> FeatureEmbedding(schema, dim=4).dims
        {'request': 1, 'items': 8, 'history': 4}
    """

    def __init__(
        self,
        schema: Schema,
        dim: int | Mapping[str, int] | Literal["auto"] = 8,
        init_std: float = 1.0,
        fused: FusedOptimizer | None = None,
        device: torch.device | str | None = None,
        tie_history: bool = True,
        only: str | None = None,
    ) -> None:
        super().__init__()
        self.schema, self.init_std = schema, init_std
        if not tie_history:
            schema, dim = untie_history(schema, dimensions(schema, dim))
        if not schema.items:
            raise ValueError("the schema has no item features, so a stage cannot tell items apart; add one")
        self.layout = EmbeddingLayout(schema, dimensions(schema, dim), only)
        self.fused = fused
        self.rate = 0.0 if fused is None else fused.options["lr"]
        self._applied: Callable[[Tensor], Tensor] | None = None
        self.agree: Agree | None = None
        place = torch.get_default_device() if device is None else torch.device(device)
        self._weighted = {name_of(parts): self._needs_weights(parts, place) for parts in self.groups}
        self.collections = nn.ModuleDict(
            {name_of(parts): self._collection(parts, place_of_tables(place), init_std) for parts in self.groups}
        )
        self._register_columns(place)
        self._slots = None if any(self.layout.has_bags(parts) for parts in self.groups) else self._make_slots()

    @property
    def groups(self) -> dict[Parts, list[Any]]:
        """The tables of each collection, by the parts that read them."""
        return self.layout.groups

    @property
    def dims(self) -> dict[Part, int]:
        """Width of the output of each part."""
        return self.layout.dims

    @property
    def shared_dim(self) -> int:
        """Width of the first item columns, whose features the history also has."""
        return self.layout.shared_dim

    def forward(self, batch: CascadeBatch, history: HistoryForm = "rows") -> Embedded:
        """Embed a batch.

        Args:
            batch: The ids and values.
            history: ``"rows"`` for every view, ``"mean"`` for their mean (one bag per request, which is cheaper).
        """
        vectors = self._by_loops(batch, history)
        if vectors is None:
            vectors = self._by_bags(batch, history)
            if history == "mean":
                vectors["history"] = vectors["history"] / batch.history_length.clamp_min(1)[:, None]
        joined = {part: self._with_values(part, vectors[part], batch, history) for part in PARTS}
        if history == "rows":
            joined["history"] = joined["history"].view(*batch.history.shape[:2], self.dims["history"])
        return Embedded(**joined, ages=batch.history_values[..., -1] if self.layout.has_ages else None)

    def table(self, name: str) -> nn.Parameter:
        """Return the weights of a table, (rows, D); raise if it is sharded."""
        for collection in self.collections.values():
            if (is_plain(collection) or is_fused(collection)) and name in table_weights(collection):
                return table_weights(collection)[name]
        raise ValueError(f"the table {name!r} is sharded: no process has all of it; use the stage without warm_start")

    def pair_tables(self, feature: str, dim: int) -> FeatureEmbedding:
        """Return new tables for one feature of history and items, one for each, with the options of these tables."""
        return FeatureEmbedding(self.schema, dim, self.init_std, self.fused, tie_history=False, only=feature)

    def defuse(self) -> FusedOptimizer | None:
        """Convert tables with a fused optimizer to plain tables with the same weights, and return that optimizer.

        Used by strategies that place the tables and apply the optimizer afterwards, e.g. with TorchRec's
        ``apply_optimizer_in_backward(fused.optimizer, embedding.collections.parameters(), dict(fused.options))``.
        Weights are not copied. Return None if an ordinary optimizer updates the tables.
        """
        fused, self.fused = self.fused, None
        for name, collection in self.collections.items():
            if is_fused(collection):
                weights = table_weights(collection)
                device = next(iter(weights.values())).device
                plain: Any = plain_collection(configs_of(collection), torch.device("meta"), self._weighted[name])
                for table, weight in weights.items():
                    plain.embedding_bags[table].weight = nn.Parameter(weight.detach())
                plain._device = device
                self.collections[name] = plain
        return fused

    def reset_parameters(self) -> None:
        """Initialise all tables again."""
        for collection in self.collections.values():
            initialise(collection)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Stages that share tables all call this method, and `to_empty` must not run twice on the same tables.
        if fn is self._applied:
            return self
        self._applied = fn
        device_types = [weight.device.type for weight in self.collections.parameters()]
        addresses = {name: _addresses(part) for name, part in self.collections.items() if is_fused(part)}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        materialised = "meta" in device_types and not any(weight.is_meta for weight in self.collections.parameters())
        for name, collection in self.collections.items():
            moved = name in addresses and _addresses(collection) != addresses[name]
            if moved or (materialised and self.fused is not None and is_plain(collection)):
                self.collections[name] = self._rebuilt(name, collection)
        if materialised:
            self._register_columns(next(self.collections.parameters()).device)
            self.reset_parameters()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_applied": None, "agree": None}

    def _rebuilt(self, name: str, collection: nn.Module) -> nn.Module:
        """Return a fused collection with the weights and device of another one; its optimizer state is new."""
        assert self.fused is not None
        weights = table_weights(collection)
        first = next(iter(weights.values()))
        if first.is_meta:
            return plain_collection(configs_of(collection), first.device, weighted=True)
        if first.dtype != torch.float32:
            raise ValueError(
                f"tables with an optimizer inside backward hold float32, got {first.dtype}; "
                f"use embedding_optimizer 'same', or another precision"
            )
        self._weighted[name] = self._weighted[name] or first.device.type != "cpu"
        with torch.random.fork_rng(devices=[]):
            rebuilt = fused_collection(configs_of(collection), first.device, self._weighted[name], self.fused)
        with torch.no_grad():
            for table, weight in table_weights(rebuilt).items():
                weight.copy_(weights[table])
        return rebuilt

    def _needs_weights(self, parts: Parts, device: torch.device) -> bool:
        return self.layout.has_bags(parts) or device.type != "cpu"

    def _collection(self, parts: Parts, device: torch.device, init_std: float) -> nn.Module:
        features: dict[str, list[str]] = {}
        for key, table in self.layout.keys[parts].items():
            features.setdefault(table.name, []).append(key)
        configs = [
            table_config(table, self.layout.table_dims[table.name], features[table.name], init_std)
            for table in self.groups[parts]
        ]
        weighted = self._weighted[name_of(parts)]
        if self.fused is None or device.type == "meta":
            return plain_collection(configs, device, weighted)
        return fused_collection(configs, device, weighted, self.fused)

    def _register_columns(self, device: torch.device) -> None:
        for part, selection in self.layout.selections.items():
            columns = None if selection is None else torch.tensor(selection, device=device)
            self.register_buffer(f"columns_{part}", columns, persistent=False)

    def _make_slots(self) -> list[Slot]:
        tables = [table.name for group in self.groups.values() for table in group]
        slots = []
        for part in PARTS:
            start = 0
            for use in self.layout.uses[part]:
                where = (PARTS.index(part), use.columns.start, tables.index(use.table.name))
                slots.append(Slot(*where, use.table.name, use.table.padding, start, self.layout.dim(use)))
                start += self.layout.dim(use)
        return slots

    def _by_loops(self, batch: CascadeBatch, history: HistoryForm) -> dict[Part, Tensor] | None:
        """Look up by compiled loops. Return None if they do not support these tables."""
        if not self._slots:
            return None
        weights: list[Tensor] = []
        updates: list[RowUpdate | None] = []
        for collection in self.collections.values():
            table_updates = row_updates(collection)
            if table_updates is None:
                return None
            weights += table_weights(collection).values()
            updates += table_updates.values()
        if look_up.backend_for(self._slots, (), weights, None) == "torch":
            return None
        ids = [rows.long().contiguous() for rows in _ids(batch, history).values()]
        longest = batch.history.shape[1] + 1
        lengths = checked(batch.history_length, longest, "history lengths") if history == "mean" else None
        return dict(zip(PARTS, look_up_and_update(self._slots, ids, weights, lengths, updates), strict=True))

    def _by_bags(self, batch: CascadeBatch, history: HistoryForm) -> dict[Part, Tensor]:
        """Look up by `embedding_bag` or TorchRec; for ``"mean"`` the history is a sum over views."""
        ids = _ids(batch, history)
        blocks: dict[Part, list[Tensor]] = {part: [] for part in PARTS}
        for parts in self.groups:
            collection = self.collections[name_of(parts)]
            direct, static = readable(collection), needs_static_shapes(batch.items)
            weighted = static or self.layout.has_bags(parts) if direct else self._weighted[name_of(parts)]
            keys = {
                key: join_bags(
                    [make_bags(ids[part], self.layout.use(part, key), weighted, static and weighted) for part in parts]
                )
                for key in self.layout.keys[parts]
            }
            if not direct and self.agree is not None:
                number = self._agreed(parts, batch, history)
                keys = {key: pad_bags(bags, number) for key, bags in keys.items()}
            values = (read_weights if direct else read_torchrec)(collection, keys)
            values = values[: sum(len(ids[part]) for part in parts)]
            for part, block in zip(parts, torch.split(values, [len(ids[part]) for part in parts]), strict=True):
                blocks[part].append(block)
        vectors: dict[Part, Tensor] = {}
        for part, part_blocks in blocks.items():
            block = torch.cat(part_blocks, dim=1) if part_blocks else batch.labels.new_zeros(len(ids[part]), 0)
            columns: Tensor | None = getattr(self, f"columns_{part}")
            vectors[part] = block if columns is None else block.index_select(1, columns)
        return vectors

    def _agreed(self, parts: Parts, batch: CascadeBatch, history: HistoryForm) -> int:
        """Return the number of bags that every process passes to a collection."""
        assert self.agree is not None
        requests, items, views = self.agree(batch)
        most = {"request": requests, "items": items, "history": requests if history == "mean" else views}
        return sum(most[part] for part in parts)

    def _with_values(self, part: Part, embedded: Tensor, batch: CascadeBatch, history: HistoryForm) -> Tensor:
        columns = self.schema.value_columns(part)
        if not columns:
            return embedded
        values = {"request": batch.request_values, "items": batch.item_values, "history": batch.history_values}[part]
        stored = list(columns.values())[-1].stop
        if values.shape[-1] != stored:
            raise ValueError(
                f"the schema has {stored} values for {part} ({', '.join(columns)}), "
                f"but the batch has {values.shape[-1]}; the data module must fill {part.removesuffix('s')}_values"
            )
        if not self.layout.values[part]:
            return embedded
        values = values[..., : self.layout.values[part]]
        if part == "history":
            values = values.sum(1) / batch.history_length.clamp_min(1)[:, None] if history == "mean" else values
            values = values.flatten(0, -2)
        return torch.cat([embedded, values.to(embedded.dtype)], dim=1)


def _ids(batch: CascadeBatch, history: HistoryForm) -> dict[Part, Tensor]:
    """Return the ids of each part, one row per output vector."""
    views = batch.history if history == "mean" else batch.history.flatten(0, 1)
    return {"request": batch.request, "items": batch.items, "history": views}


def _addresses(collection: nn.Module) -> list[int]:
    return [weight.data_ptr() for weight in table_weights(collection).values()]


def table_sizes(embedding: FeatureEmbedding) -> list[dict[str, object]]:
    """Return name, rows, dimension and megabytes of each table, largest first."""
    configs = [config for collection in embedding.collections.values() for config in configs_of(collection)]
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
