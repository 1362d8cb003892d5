"""Memory of a cascade: weights, optimizer state, gradients and counts, before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch

from recsys_topk.cascades.cascade import Cascade
from recsys_topk.cascades.layout import EmbeddingLayout, dimensions, untie_history
from recsys_topk.cascades.stage import StageConfig
from recsys_topk.cascades.tables import place_of_tables, tables_on_meta
from recsys_topk.machine import MEMORY_SHARE, check_budget
from recsys_topk.tabular.schema import Schema

_FLOAT: Final = 4
_COPIES: Final = {"adam": 2, "adamw": 2, "adagrad": 1, "sgd": 0}
"""Number of table-sized state tensors of each dense optimizer."""

_OPTIONS: Final = {"amsgrad": ("adam", "adamw"), "momentum": ("sgd",)}
"""Optimizer options that add one more state tensor."""


@dataclass(frozen=True)
class TableMemory:
    """Memory of one table in one stage.

    Attributes:
        table: Name of the table.
        rows: Number of rows.
        dim: Number of columns.
        weights: Bytes of the weights.
        optimizer: Bytes of the optimizer state.
        gradient: Bytes of the gradient; 0 if the table is updated inside backward.
    """

    table: str
    rows: int
    dim: int
    weights: int
    optimizer: int
    gradient: int

    @property
    def total(self) -> int:
        """Bytes of weights, optimizer state and gradient."""
        return self.weights + self.optimizer + self.gradient


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of the tables of a cascade.

    Attributes:
        tables: The tables of one stage, largest first. The tables of all stages have the same size.
        copies: Number of sets of tables: one per stage, or one if the stages share them.
        layers: Bytes of the weights of the other layers, of all stages.
        counts: Bytes of the statistics of all stages, such as which item follows which.
        training: Bytes of the gradients and the optimizer state of the other layers.
    """

    tables: tuple[TableMemory, ...]
    copies: int
    layers: int = 0
    counts: int = 0
    training: int = 0

    @property
    def total(self) -> int:
        """Bytes of all stages."""
        return self.copies * sum(table.total for table in self.tables) + self.layers + self.counts + self.training

    def part(self, name: str) -> int:
        """Return the bytes of ``"weights"``, ``"optimizer"`` or ``"gradient"`` over all stages."""
        return self.copies * sum(int(getattr(table, name)) for table in self.tables)

    def lines(self, largest: int = 5) -> list[dict[str, object]]:
        """Return printable rows for the largest tables, all other tables and the total; sizes in MB."""
        shown, rest = self.tables[:largest], self.tables[largest:]
        rows: list[dict[str, object]] = [
            {"table": table.table, "rows": f"{table.rows:,}", "dim": table.dim, **self._cells([table])}
            for table in shown
        ]
        if rest:
            rows.append({"table": f"{len(rest)} others", "rows": f"{sum(t.rows for t in rest):,}", **self._cells(rest)})
        return [*rows, {"table": "total", "rows": f"{sum(t.rows for t in self.tables):,}", **self._cells(self.tables)}]

    def _cells(self, tables: Sequence[TableMemory]) -> dict[str, object]:
        parts = ("weights", "optimizer", "gradient")
        sums = {name: sum(int(getattr(table, name)) for table in tables) for name in parts}
        megabytes = {f"{name} MB": f"{value / 2**20:,.1f}" for name, value in sums.items()}
        return {**megabytes, f"x {self.copies} stages MB": f"{self.copies * sum(sums.values()) / 2**20:,.1f}"}


def plan_memory(
    schema: Schema,
    stages: int | Sequence[StageConfig],
    dim: int | Mapping[str, int] | Literal["auto"] = 8,
    share_embeddings: bool = False,
    optimizer: str = "adam",
    embedding_optimizer: str = "same",
    optimizer_options: Mapping[str, Any] | None = None,
    tie_history: bool = True,
) -> MemoryPlan:
    """Return the memory of a cascade during training. Nothing is allocated.

    A table with R rows and D columns has 4 R D bytes of weights. With a dense optimizer the gradient has the same size,
    and the state is twice that size for Adam, the same size for Adagrad, and empty for SGD. Tables that are updated
    inside backward have no gradient. Row-wise Adagrad keeps one float per row.

    Args:
        schema: The features.
        stages: Configurations of the stages; or their number, without the memory of their layers and counts.
        dim: Embedding dimension, as in `CascadeModule`.
        share_embeddings: Whether all stages use one set of tables.
        optimizer: Name of the optimizer.
        embedding_optimizer: Optimizer of the tables, or ``"same"``.
        optimizer_options: Further arguments of the optimizer.
        tie_history: Whether the history reads the tables of the items.

    Example:
        >>> from recsys_topk.tabular.schema import Feature, Table
        >>> video = (Feature("video_id", "video"),)
        >>> schema = Schema((Table("video", 1_000_000),), request=(), history=video, items=video)
        >>> plan_memory(schema, stages=2, dim=8).total  # 2 stages of weights, gradient and two states of Adam
        256000000
        >>> plan_memory(schema, stages=2, dim=8, embedding_optimizer="rowwise_adagrad").total
        72000000
    """
    dims = dimensions(schema, dim)
    layout = EmbeddingLayout(schema, dims) if tie_history else EmbeddingLayout(*untie_history(schema, dims))
    fused = embedding_optimizer != "same"
    options = optimizer_options or {}
    extra = sum(optimizer in names and bool(options.get(option)) for option, names in _OPTIONS.items())
    dense = _COPIES.get(optimizer, 2) + extra
    copies = _COPIES.get(embedding_optimizer, 2) if fused else dense
    tables = []
    for table in (table for group in layout.groups.values() for table in group):
        width = layout.table_dims[table.name]
        weights = table.rows * width * _FLOAT
        state = table.rows * _FLOAT if embedding_optimizer == "rowwise_adagrad" else copies * weights
        tables.append(TableMemory(table.name, table.rows, width, weights, state, 0 if fused else weights))
    tables.sort(key=lambda table: -table.total)
    plan = MemoryPlan(tuple(tables), 1 if share_embeddings else stages if isinstance(stages, int) else len(stages))
    if isinstance(stages, int):
        return plan
    weights, counts = _layer_memory(schema, stages, dim, share_embeddings, tie_history)
    layers = max(weights - plan.part("weights"), 0)
    return replace(plan, layers=layers, counts=counts, training=(1 + dense) * layers)


def check_weights(schema: Schema, stages: Sequence[StageConfig], **options: Any) -> None:
    """Raise if the weights of a cascade, without gradients, do not fit the machine. Nothing is allocated.

    Args:
        schema: The features.
        stages: The configurations of the stages.
        options: Further arguments of `plan_memory`.
    """
    plan = plan_memory(schema, stages, **options)
    tables = 0 if place_of_tables(torch.device("cpu")).type == "meta" else plan.part("weights")
    check_budget(
        tables + plan.layers + plan.counts,
        f"the cascade ({_gb(tables)} of tables, {_gb(plan.layers)} of layers, {_gb(plan.counts)} of counts)",
        "use a smaller --model.dim, fewer rows (--data.vocabulary) or smaller stages; if a checkpoint needs it, "
        "check the source of the checkpoint",
    )


def _layer_memory(
    schema: Schema, stages: Sequence[StageConfig], dim: Any, share: bool, tie_history: bool
) -> tuple[int, int]:
    """Return the bytes of the parameters, tables included, and of the buffers, from a cascade on the meta device."""
    try:
        with torch.random.fork_rng(devices=()), torch.device("meta"), tables_on_meta():
            cascade = Cascade(schema, stages, dim, share, tie_history=tie_history)
    except Exception as error:  # not buildable on the meta device; its errors are raised when it is built
        return (2**63 if "overflow" in str(error) else 0), 0
    return sum(tensor.nbytes for tensor in cascade.parameters()), sum(tensor.nbytes for tensor in cascade.buffers())


def check_memory(schema: Schema, available: int, arguments: Mapping[str, Any]) -> MemoryPlan:
    """Return the memory plan. Raise if the tables do not fit; the message names the options with which they fit.

    Args:
        schema: The features.
        available: Bytes of memory of the machine or device. Tables may use nine tenths of it.
        arguments: Arguments of `plan_memory` other than the schema.
    """
    plan = plan_memory(schema, **arguments)
    room = int(MEMORY_SHARE * available)
    if plan.total <= room:
        return plan
    largest = plan.tables[0]
    advice = _advice(schema, room, arguments, plan)
    options = "; ".join(advice) if advice else "no single option is enough; combine options, or shard the tables"
    raise ValueError(
        f"the embedding tables need {_gb(plan.total)} ({_gb(plan.part('weights'))} of weights, "
        f"{_gb(plan.part('optimizer'))} of optimizer state, {_gb(plan.part('gradient'))} of gradients"
        f"{_others(plan)}), but only {_gb(available)} are available; "
        f"the largest table is {largest.table} with {largest.rows:,} rows. "
        f"Options that fit: {options}"
    )


def _advice(schema: Schema, room: int, arguments: Mapping[str, Any], plan: MemoryPlan) -> list[str]:
    """Return the options with which the tables fit, the smallest change first."""
    small = {**arguments, "embedding_optimizer": "rowwise_adagrad"}
    fitting = []
    added = ""
    if arguments.get("embedding_optimizer", "same") != "rowwise_adagrad":
        reduced = plan_memory(schema, **small)
        if reduced.total <= room:
            fitting.append(f"--model.embedding_optimizer rowwise_adagrad ({_gb(reduced.total)})")
        added = " --model.embedding_optimizer rowwise_adagrad"
        plan = reduced
    largest = plan.tables[0]
    others = plan.total - plan.copies * largest.total
    rows = (room - others) // (plan.copies * largest.total // largest.rows)
    if rows >= 1000:
        rows = int(str(rows)[0]) * 10 ** (len(str(rows)) - 1)  # rounded down to one significant digit
        if schema.table(largest.table).vocabulary is None:
            fitting.append(
                f"--data.vocabulary compact{added} if the training days have at most {rows:,} ids of {largest.table}"
            )
        fitting.append(f"--data.vocabulary.{largest.table} hash:rows={rows}{added}")
    dim = arguments.get("dim", 8)
    for width in (4, 8, 16, 32, 64)[::-1]:
        if isinstance(dim, int) and width < dim:
            narrow = plan_memory(schema, **{**small, "dim": width})
            if narrow.total <= room:
                fitting.append(f"--model.dim {width}{added} ({_gb(narrow.total)})")
                break
    return fitting


def _others(plan: MemoryPlan) -> str:
    others = plan.layers + plan.training + plan.counts
    return f", {_gb(others)} of other layers and counts" if others > 2**25 else ""


def _gb(size: int) -> str:
    return f"{size / 2**30:,.1f} GB"
