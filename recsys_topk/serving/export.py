"""Export of a trained cascade: each stage as ONNX and as a torch program, checked against the checkpoint."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export import Dim

from recsys_topk.cascades.inference import apply_quotas
from recsys_topk.cascades.stage import Stage
from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.datamodules.schema import Schema
from recsys_topk.serving.manifest import Model, StageEntry
from recsys_topk.serving.twin import ExportedModel, ItemVectors, ListScores, RequestVectors

TOLERANCE = 1e-5
"""Largest difference between an exported stage and the checkpoint, as a share of the largest absolute score."""

_ONE_FILE_BYTES = 1 << 30  # a protobuf holds 2 GiB at most


def models_of(stage: Stage, schema: Schema) -> dict[str, ExportedModel]:
    """Return what is exported of a stage: two towers if it has them, else the scores of lists."""
    if hasattr(stage, "encode_requests") and hasattr(stage, "encode_items"):
        return {"requests": RequestVectors(stage, schema), "items": ItemVectors(stage, schema)}
    return {"scores": ListScores(stage, schema)}


def write_stage(
    folder: Path, name: str, kind: str, quota: int, models: Mapping[str, ExportedModel], programs: bool = True
) -> StageEntry:
    """Write the models of a stage into a folder of its own.

    Args:
        folder: The export.
        name: The stage.
        kind: Its registry name or class path.
        quota: How many items it passes on.
        models: What `models_of` returned.
        programs: Write ``.pt2`` files (`torch.export.load`) beside the ONNX files.
    """
    (folder / name).mkdir()
    written = {}
    for role, model in models.items():
        file = f"{name}/{role}.onnx"
        program = write_model(model, folder / file)
        if programs:
            torch.export.save(program, folder / f"{name}/{role}.pt2")
        written[role] = Model(file, tuple(model.inputs), model.output[0])
    return StageEntry(name, kind, quota, written)


def write_model(model: ExportedModel, path: Path) -> torch.export.ExportedProgram:
    """Write a model as ONNX, with free lengths of batch, list and history; return its program."""
    lengths = {axis: Dim(axis, min=1) for one in model.inputs for axis in one.axes if isinstance(axis, str)}
    free = tuple({i: lengths[axis] for i, axis in enumerate(one.axes) if axis in lengths} for one in model.inputs)
    # Lengths of 0 and 1 are taken for constants, so the example has others, all different.
    sizes = {axis: number for number, axis in enumerate(lengths, start=2)}
    shapes = [[sizes[axis] if isinstance(axis, str) else axis for axis in one.axes] for one in model.inputs]
    example = tuple(
        torch.zeros(shape, dtype=getattr(torch, one.dtype)) for shape, one in zip(shapes, model.inputs, strict=True)
    )
    with _quiet(), torch.no_grad():
        program = torch.export.export(model.eval(), example, dynamic_shapes=(free,), strict=False)
        weights = sum(tensor.numel() * tensor.element_size() for tensor in program.state_dict.values())
        made = torch.onnx.export(
            program,
            (),
            input_names=[one.name for one in model.inputs],
            output_names=[model.output[0]],
            dynamo=True,
            verbose=False,
        )
        assert made is not None
        made.save(path, external_data=weights > _ONE_FILE_BYTES)
    return program


@dataclass(frozen=True)
class Agreement:
    """How an export compares with the checkpoint on real batches.

    Attributes:
        requests: Requests that were compared.
        differences: Largest difference of each stage's scores, as a share of its largest absolute score.
        same_sets: Whether every request keeps the same items.
    """

    requests: int
    differences: Mapping[str, float]
    same_sets: bool


def compare(
    stages: Mapping[str, Stage],
    quotas: Sequence[int],
    score: Callable[[str, CascadeBatch], np.ndarray[Any, Any]],
    batches: Sequence[CascadeBatch],
) -> Agreement:
    """Compare the scores of an export with those of the stages, on lists of any length.

    Args:
        stages: The trained stages by name, in evaluation mode.
        quotas: How many items each stage passes on.
        score: Returns the scores (B, N) of a stage of the export for a batch.
        batches: Batches to compare on.
    """
    worst = dict.fromkeys(stages, 0.0)
    largest = dict.fromkeys(stages, 0.0)
    same = True
    for batch in batches:
        with torch.no_grad():
            wanted = [stage(batch) for stage in stages.values()]
        found = [torch.from_numpy(score(name, batch)) for name in stages]
        for name, one, other in zip(stages, wanted, found, strict=True):
            worst[name] = max(worst[name], float((one - other)[batch.mask].abs().max()))
            largest[name] = max(largest[name], float(one[batch.mask].abs().max()))
        same = same and _same_sets(wanted, found, batch.mask, quotas)
    differences = {name: worst[name] / max(largest[name], 1e-30) for name in stages}
    return Agreement(sum(batch.size for batch in batches), differences, same)


def check(agreement: Agreement, tolerance: float = TOLERANCE) -> None:
    """Raise if an export differs from the checkpoint by more than rounding."""
    name, difference = max(agreement.differences.items(), key=lambda pair: pair[1])
    if difference > tolerance or not agreement.same_sets:
        what = "keeps other items" if difference <= tolerance else f"differs by {difference:.1e} of the largest score"
        raise RuntimeError(
            f"the export of stage {name!r} {what} on {agreement.requests} requests (allowed: {tolerance:.0e} and the "
            f"same items); nothing was written"
        )


def onnx_scores(folder: Path, entry: StageEntry) -> Callable[[CascadeBatch], np.ndarray[Any, Any]]:
    """Return a function of batches that scores by the ONNX files of a stage, (B, N)."""
    from recsys_topk.serving.session import Session

    sessions = {role: Session(folder / model.file, model) for role, model in entry.models.items()}

    def run(role: str, batch: CascadeBatch) -> np.ndarray[Any, Any]:
        fields = {one.name: getattr(batch, one.name) for one in entry.models[role].inputs}
        if role == "scores":
            fields |= {name: value[batch.candidates] for name, value in fields.items() if name.startswith("item")}
        return sessions[role].run({name: value.numpy() for name, value in fields.items()})

    def score(batch: CascadeBatch) -> np.ndarray[Any, Any]:
        if not entry.has_towers:
            return run("scores", batch)
        requests, items = run("requests", batch), run("items", batch)
        found: np.ndarray[Any, Any] = np.einsum("bd,bnd->bn", requests, items[batch.candidates.numpy()])
        return found

    return score


def _same_sets(wanted: Sequence[Tensor], found: Sequence[Tensor], mask: Tensor, quotas: Sequence[int]) -> bool:
    """Return whether two cascades keep the same items, but where two scores at a cut are equal up to rounding."""
    one, other = (apply_quotas(scores, mask, quotas).kept for scores in (wanted, found))
    differ = (one != other).any(1)
    for stage, quota in zip(wanted, quotas, strict=True):
        if not differ.any():
            break
        ordered = stage.masked_fill(~mask, -torch.inf).sort(1, descending=True).values
        gaps = (ordered[:, :-1] - ordered[:, 1:]).nan_to_num(torch.inf)
        close = gaps <= 2 * TOLERANCE * stage[mask].abs().max()
        differ &= ~close[:, quota - 1] if quota <= close.shape[1] else True
    return not bool(differ.any())


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's notices about optional packages and its own internals from the user."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
