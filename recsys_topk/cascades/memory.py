"""How much memory embedding tables take, from the schema alone: weights, optimizer state and gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from recsys_topk.cascades.features import dimensions
from recsys_topk.cascades.layout import Layout
from recsys_topk.datamodules.schema import Schema

_FLOAT: Final = 4
_COPIES: Final = {"adam": 2, "adamw": 2, "adagrad": 1, "sgd": 0}
"""Table-sized tensors that an ordinary optimizer keeps."""

_OPTIONS: Final = {"amsgrad": ("adam", "adamw"), "momentum": ("sgd",)}
"""Options of optimizers that keep one tensor more."""

_SHARE: Final = 0.9
"""Share of the machine's memory that tables may take; the rest is for batches and activations."""


@dataclass(frozen=True)
class TableMemory:
    """What one table takes in one stage, in bytes.

    Attributes:
        table: Its name.
        rows: Its rows.
        dim: Its columns.
        weights: Of the table.
        optimizer: Of the optimizer's state.
        gradient: Of the gradient; 0 if the table is updated inside backward, row by row.
    """

    table: str
    rows: int
    dim: int
    weights: int
    optimizer: int
    gradient: int

    @property
    def total(self) -> int:
        """All three."""
        return self.weights + self.optimizer + self.gradient


@dataclass(frozen=True)
class MemoryPlan:
    """What the tables of a cascade take.

    Attributes:
        tables: Those of one stage, the largest first; the tables of all stages are of one size.
        copies: How many sets of tables there are: one per stage, or one if the stages share them.
    """

    tables: tuple[TableMemory, ...]
    copies: int

    @property
    def total(self) -> int:
        """Bytes of all stages."""
        return self.copies * sum(table.total for table in self.tables)

    def part(self, name: str) -> int:
        """Return the bytes of all stages that are ``"weights"``, ``"optimizer"`` or ``"gradient"``."""
        return self.copies * sum(int(getattr(table, name)) for table in self.tables)

    def lines(self, largest: int = 5) -> list[dict[str, object]]:
        """Return the largest tables, the others and the total, as rows of a table to print; sizes in MB."""
        shown, rest = self.tables[:largest], self.tables[largest:]
        made: list[dict[str, object]] = [
            {"table": table.table, "rows": f"{table.rows:,}", "dim": table.dim, **self._cells([table])}
            for table in shown
        ]
        if rest:
            made.append({"table": f"{len(rest)} others", "rows": f"{sum(t.rows for t in rest):,}", **self._cells(rest)})
        return [*made, {"table": "total", "rows": f"{sum(t.rows for t in self.tables):,}", **self._cells(self.tables)}]

    def _cells(self, tables: Sequence[TableMemory]) -> dict[str, object]:
        parts = ("weights", "optimizer", "gradient")
        sums = {name: sum(int(getattr(table, name)) for table in tables) for name in parts}
        megabytes = {f"{name} MB": f"{value / 2**20:,.1f}" for name, value in sums.items()}
        return {**megabytes, f"x {self.copies} stages MB": f"{self.copies * sum(sums.values()) / 2**20:,.1f}"}


def plan_memory(
    schema: Schema,
    stages: int,
    dim: int | Mapping[str, int] = 8,
    share_embeddings: bool = False,
    optimizer: str = "adam",
    embedding_optimizer: str = "same",
    optimizer_options: Mapping[str, Any] | None = None,
) -> MemoryPlan:
    """Return what the tables take while they are trained; nothing is allocated.

    A table of R rows and D columns has 4 R D bytes of weights. With an ordinary optimizer its gradient has as many, and
    the state twice as many for Adam, as many for Adagrad, none for SGD. Tables that are updated inside backward have no
    gradient; row-wise Adagrad keeps one float per row.

    Args:
        schema: The features.
        stages: Number of stages.
        dim: As in `CascadeModule`, as are the arguments after it.
        share_embeddings: Whether all stages use one set of tables.
        optimizer: Name of the optimizer.
        embedding_optimizer: That of the tables, or ``"same"``.
        optimizer_options: Further arguments of the optimizer.

    Example:
        >>> from recsys_topk.datamodules.schema import Feature, Table
        >>> video = (Feature("video_id", "video"),)
        >>> schema = Schema((Table("video", 1_000_000),), request=(), history=video, items=video)
        >>> plan_memory(schema, stages=2, dim=8).total  # 2 stages of weights, gradient and two states of Adam
        256000000
        >>> plan_memory(schema, stages=2, dim=8, embedding_optimizer="rowwise_adagrad").total
        72000000
    """
    layout = Layout(schema, dimensions(schema, dim))
    fused = embedding_optimizer != "same"
    copies = _COPIES.get(embedding_optimizer if fused else optimizer, 2)
    if not fused:
        options = optimizer_options or {}
        copies += sum(bool(options.get(name)) for name, of in _OPTIONS.items() if optimizer in of)
    made = []
    for table in (table for tables in layout.groups.values() for table in tables):
        width = layout.table_dims[table.name]
        weights = table.rows * width * _FLOAT
        state = table.rows * _FLOAT if embedding_optimizer == "rowwise_adagrad" else copies * weights
        made.append(TableMemory(table.name, table.rows, width, weights, state, 0 if fused else weights))
    made.sort(key=lambda table: -table.total)
    return MemoryPlan(tuple(made), 1 if share_embeddings else stages)


def machine_memory() -> int | None:
    """Return the bytes of memory that this process may take: the machine's, or what its control group allows."""
    limits = []
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = Path(path).read_text().strip() if Path(path).is_file() else ""
        if text.isdigit():
            limits.append(int(text))
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        line = next((line for line in meminfo.read_text().splitlines() if line.startswith("MemTotal:")), None)
        if line is not None:
            limits.append(int(line.split()[1]) * 1024)
    return min(limits, default=None)


def check_memory(schema: Schema, available: int, arguments: Mapping[str, Any]) -> MemoryPlan:
    """Return the plan, or raise if the tables do not fit, naming the options with which they would.

    Args:
        schema: The features.
        available: Bytes of the machine or of the device; tables may take nine tenths of them.
        arguments: Those of `plan_memory`, but for the schema.
    """
    plan = plan_memory(schema, **arguments)
    room = int(_SHARE * available)
    if plan.total <= room:
        return plan
    largest = plan.tables[0]
    advice = _advice(schema, room, arguments, plan)
    cure = (
        "; ".join(advice) if advice else "none of the options alone makes them fit; combine them, or shard the tables"
    )
    raise ValueError(
        f"the embedding tables need {_gb(plan.total)} ({_gb(plan.part('weights'))} of weights, "
        f"{_gb(plan.part('optimizer'))} of optimizer state, {_gb(plan.part('gradient'))} of gradients), and there are "
        f"{_gb(available)}; the largest is {largest.table} with {largest.rows:,} rows. What fits: {cure}"
    )


def _advice(schema: Schema, room: int, arguments: Mapping[str, Any], plan: MemoryPlan) -> list[str]:
    """Return the options that make the tables fit, the one that changes least first."""
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
        rows = int(str(rows)[0]) * 10 ** (len(str(rows)) - 1)  # one digit is enough to type
        if schema.table(largest.table).vocabulary is None:
            fitting.append(
                f"--data.vocabulary compact{added} if the training days hold at most {rows:,} ids of {largest.table}"
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


def _gb(size: int) -> str:
    return f"{size / 2**30:,.1f} GB"
