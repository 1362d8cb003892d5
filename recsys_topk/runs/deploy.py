"""The cascade of a checkpoint with the data of its training: for export, and for questions about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recsys_topk.runs.checkpoint import check_schema, hiding_content, read_checkpoint, weights_fit
from recsys_topk.trust.own_runs import recall

if TYPE_CHECKING:
    from recsys_topk.cascades.module import CascadeModule
    from recsys_topk.datamodules.base import CascadeDataModule
    from recsys_topk.serving.export import ExportReport


def open_checkpoint(
    checkpoint: str | Path,
    *,
    root: str | None = None,
    trust: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
) -> tuple[CascadeModule, CascadeDataModule, dict[str, Any]]:
    """Return the model of a checkpoint on the CPU, its data, prepared, and its epoch and step.

    `root` is the current folder of the data (None = that of the training). The checkpoint may name classes of the
    packages `trust`. `changes` replaces further arguments of the data.
    """
    content = read_checkpoint(checkpoint)
    saved = content.get("datamodule_hyper_parameters")
    if not saved:
        raise ValueError(f"{str(checkpoint)!r} does not name its data; use recsys_topk.serving.export.export_cascade")

    from recsys_topk.cascades.module import CascadeModule
    from recsys_topk.datamodules.base import restore

    trusted = (*trust, *recall(checkpoint))
    with hiding_content({} if root else saved):
        data = restore(saved, trust=trusted, **({} if root is None else {"root": root}), **(changes or {}))
        data.prepare_data()
        check_schema(checkpoint, content, data.schema)
    with weights_fit():
        model = CascadeModule.load_from_checkpoint(checkpoint, map_location="cpu", trust=trusted)
    return model, data, {"epoch": content.get("epoch"), "step": content.get("global_step")}


def export_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    *,
    root: str | None = None,
    half_tables: bool = False,
    programs: bool = True,
    trust: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
    log_line: Callable[[str], object] = lambda text: None,
) -> ExportReport:
    """Export the cascade of a checkpoint (`open_checkpoint`) with the data of its training; see `export_cascade`."""
    if Path(out).exists():
        raise ValueError(f"{str(out)!r} exists; give another --out, or remove it")
    log_line(f"reading {checkpoint}")
    model, data, facts = open_checkpoint(checkpoint, root=root, trust=trust, changes=changes)

    from recsys_topk.serving.export import export_cascade
    from recsys_topk.serving.manifest import sha256

    facts = {"checkpoint": {"sha256": sha256(Path(checkpoint)), **facts}}
    return export_cascade(model, data, out, half_tables=half_tables, programs=programs, facts=facts, log_line=log_line)
