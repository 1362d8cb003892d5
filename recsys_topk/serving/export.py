"""Export of a trained cascade: each stage as ONNX and as a torch program, checked against the checkpoint."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export import Dim

from recsys_topk import __version__
from recsys_topk.cascades.inference import apply_quotas
from recsys_topk.cascades.module import CascadeModule
from recsys_topk.cascades.stage import Stage
from recsys_topk.datamodules.base import CascadeDataModule
from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.files import whole_folder
from recsys_topk.metrics import JointRecall
from recsys_topk.serving.funnel import ModelFaultError
from recsys_topk.serving.manifest import Manifest, Model, StageEntry, write_manifest
from recsys_topk.serving.recommend import ENCODER, CascadeRecommender
from recsys_topk.serving.twin import ExportedModel, ItemVectors, ListScores, PlainEmbedding, RequestVectors
from recsys_topk.tabular.export_tables import ITEMS, USERS
from recsys_topk.tabular.schema import Schema

TOLERANCE = 1e-5
"""Largest difference between an exported stage and the checkpoint, as a share of the largest absolute score."""

_ONE_FILE_BYTES = 1 << 30  # protobuf files are limited to 2 GiB
_CHECKED_REQUESTS = 256
_NO_EXPORT = "; no export was written: export an earlier checkpoint, or train again with a smaller --lr"


@dataclass(frozen=True)
class ExportReport:
    """The result of an export."""

    manifest: Manifest
    agreement: Agreement  # comparison of the ONNX files with the checkpoint
    # With `half_tables`, the joint recall of the checkpoint and of the export on the compared requests.
    recalls: Mapping[str, float] | None = None


def export_cascade(
    model: CascadeModule,
    data: CascadeDataModule,
    out: str | Path,
    *,
    half_tables: bool = False,
    programs: bool = True,
    facts: Mapping[str, Any] | None = None,
    log_line: Callable[[str], object] = lambda text: None,
) -> ExportReport:
    """Write a trained cascade for serving: one folder per stage, the catalogue, users, encoder and a manifest.

    The export is written only if the ONNX files and the model agree on real requests (`check`).

    Args:
        model: The trained cascade.
        data: The prepared data of the cascade.
        out: Folder to create; it must not exist.
        half_tables: Store embedding tables in float16. This halves their size; the loss of recall is reported.
        programs: Also write torch programs (``.pt2``).
        facts: Further entries of the manifest, e.g. the source of the weights.
        log_line: Called with one line of text per step.
    """
    out = Path(out)
    if out.exists():
        raise ValueError(f"{str(out)!r} already exists; use another --out, or remove it")
    model = model.to("cpu").eval()
    stages = {name: stage for name, stage in model.cascade.stages.items() if isinstance(stage, Stage)}
    batches = list(_requests(data))
    scales = {name: scale.item() for name, scale in model.cascade.scales.items()}
    with whole_folder(out) as folder, _finite():
        entries = []
        for config, stage in zip(model.cascade.configs, stages.values(), strict=True):
            log_line(f"exporting stage {config.name} ({config.kind})")
            models = models_of(stage, model.schema)
            if half_tables:
                halve_tables(models)
            entry = write_stage(folder, config.name, config.kind, config.quota, models, programs)
            entries.append(replace(entry, previous_scale=scales.get(config.name, 0.0)))
        scores = {entry.name: onnx_scores(folder, entry) for entry in entries}
        agreement = compare(stages, model.cascade.quotas, lambda name, batch: scores[name](batch), batches, scales)
        recalls = None
        if half_tables:
            recalls = _recalls(
                model, lambda batch: add_previous({name: own(batch) for name, own in scores.items()}, scales), batches
            )
        else:
            check(agreement)
        log_line("writing the catalogue")
        items = data.serving_items()
        items.write(folder / ITEMS)
        users = data.serving_users(items)
        if users is not None:
            users.write(folder / USERS)
        if data.encoder is not None:
            data.encoder.save(folder / ENCODER)
        known = {
            "items": len(items.names),
            "users": None if users is None else len(users.names),
            "views": int(batches[0].history.shape[1]),
            "half_tables": half_tables,
            "requests_compared": agreement.requests,
            "largest_difference": dict(agreement.differences),
            "recalls": recalls,
            "versions": {"recsys_topk": __version__, "torch": torch.__version__},
            **(facts or {}),
        }
        manifest = write_manifest(folder, model.schema, tuple(entries), model.k, known)
        log_line("trying one request")
        CascadeRecommender.from_export(folder).try_out()
    return ExportReport(manifest, agreement, recalls)


@contextmanager
def _finite() -> Iterator[None]:
    """Convert a fault of an exported model to an error of the checkpoint."""
    try:
        yield
    except ModelFaultError as error:
        raise ValueError(f"{error}{_NO_EXPORT}") from error


def halve_tables(models: Mapping[str, ExportedModel]) -> None:
    """Store the embedding tables of models in float16. Look-ups return float32."""
    for model in models.values():
        for part in model.modules():
            if isinstance(part, PlainEmbedding):
                for name, weight in part.tables.items():
                    part.tables[name] = torch.nn.Parameter(weight.detach().half(), requires_grad=False)


def _requests(data: CascadeDataModule) -> Iterator[CascadeBatch]:
    """Yield batches of the test split until there are enough requests to compare."""
    loader = data.test_dataloader()
    number = 0
    for batch in loader:
        yield data.add_negatives(batch)
        number += batch.size
        if number >= _CHECKED_REQUESTS:
            return


def _recalls(
    model: CascadeModule, score: Callable[[CascadeBatch], list[np.ndarray[Any, Any]]], batches: Sequence[CascadeBatch]
) -> dict[str, float]:
    """Return the joint recall of the model and of an export on batches."""
    options: dict[str, Any] = {"quotas": model.cascade.quotas, "positive_above": model.schema.positive_above}
    recalls = {name: JointRecall(model.k, **options) for name in ("checkpoint", "export")}
    for batch in batches:
        with torch.no_grad():
            recalls["checkpoint"].update(model(batch), batch.labels, batch.mask)
        recalls["export"].update([torch.from_numpy(x) for x in score(batch)], batch.labels, batch.mask)
    return {name: float(recall.compute()) for name, recall in recalls.items()}


def models_of(stage: Stage, schema: Schema) -> dict[str, ExportedModel]:
    """Return the exported models of a stage: two towers if it has them, otherwise one model that scores lists."""
    if stage.towers is not None:
        return {"requests": RequestVectors(stage, schema), "items": ItemVectors(stage, schema)}
    return {"scores": ListScores(stage, schema)}


def write_stage(
    folder: Path, name: str, kind: str, quota: int, models: Mapping[str, ExportedModel], programs: bool = True
) -> StageEntry:
    """Write the models of a stage (`models_of`) to its folder in the export; `programs` also writes ``.pt2`` files."""
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
    """Write a model as ONNX, with dynamic lengths of batch, list and history. Return its torch program."""
    lengths = {axis: Dim(axis, min=1) for one in model.inputs for axis in one.axes if isinstance(axis, str)}
    free = tuple({i: lengths[axis] for i, axis in enumerate(one.axes) if axis in lengths} for one in model.inputs)
    # torch.export treats lengths 0 and 1 as constants, so the example uses larger, distinct lengths.
    sizes = {axis: number for number, axis in enumerate(lengths, start=2)}
    shapes = [[sizes[axis] if isinstance(axis, str) else axis for axis in one.axes] for one in model.inputs]
    example = tuple(
        torch.zeros(shape, dtype=getattr(torch, one.dtype)) for shape, one in zip(shapes, model.inputs, strict=True)
    )
    with _quiet(), torch.no_grad():
        for name, tensor in model.named_parameters():
            if not bool(tensor.isfinite().all()):
                raise ValueError(f"the weights {name!r} for {path.parent.name}/{path.name} are not finite{_NO_EXPORT}")
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
        _name_axes(made.model.graph, model)
        made.save(path, external_data=weights > _ONE_FILE_BYTES)
    return program


def _name_axes(graph: Any, model: ExportedModel) -> None:
    """Name the dynamic axes of an ONNX graph batch, items and views instead of the exporter's s14 and s73."""
    names: dict[str, str] = {}
    for value, one in zip(graph.inputs, model.inputs, strict=True):
        names |= {str(value.shape[i]): axis for i, axis in enumerate(one.axes) if isinstance(axis, str)}
    inside = [output for node in graph for output in node.outputs]
    for value in (*graph.inputs, *graph.outputs, *inside):
        for i, length in enumerate(value.shape or ()):
            if str(length) in names and not isinstance(length, int):
                value.shape[i] = names[str(length)]


@dataclass(frozen=True)
class Agreement:
    """Comparison of an export with the checkpoint on real batches."""

    requests: int  # number of compared requests
    differences: Mapping[str, float]  # largest score difference of each stage, as a share of its largest absolute score
    same_sets: bool  # whether the same items survive in every request


def compare(
    stages: Mapping[str, Stage],
    quotas: Sequence[int],
    score: Callable[[str, CascadeBatch], np.ndarray[Any, Any]],
    batches: Sequence[CascadeBatch],
    scales: Mapping[str, float] | None = None,
) -> Agreement:
    """Compare the scores of an export with those of the stages, on lists of any length.

    `score` returns the scores of the export, (B, N), for a stage name and a batch. `scales` has
    `StageEntry.previous_scale` of each stage; without it, no stage adds the scores of the stage before it.
    """
    worst = dict.fromkeys(stages, 0.0)
    largest = dict.fromkeys(stages, 0.0)
    same = True
    for batch in batches:
        with torch.no_grad():
            wanted = add_previous({name: stage(batch) for name, stage in stages.items()}, scales or {})
        found = add_previous({name: torch.from_numpy(score(name, batch)) for name in stages}, scales or {})
        for name, one, other in zip(stages, wanted, found, strict=True):
            difference = (one - other)[batch.mask].abs().nan_to_num(torch.inf, torch.inf)
            worst[name] = max(worst[name], float(difference.max()))
            largest[name] = max(largest[name], float(one[batch.mask].abs().max()))
        same = same and _same_sets(wanted, found, batch.mask, quotas)
    differences = {name: worst[name] / max(largest[name], 1e-30) for name in stages}
    return Agreement(sum(batch.size for batch in batches), differences, same)


def add_previous(scores: Mapping[str, Any], scales: Mapping[str, float]) -> list[Any]:
    """Return the scores of each stage, with those of the stage before it added times its scale."""
    summed: list[Any] = []
    for name, own in scores.items():
        scale = scales.get(name, 0.0)
        summed.append(own + scale * summed[-1] if scale and summed else own)
    return summed


def check(agreement: Agreement, tolerance: float = TOLERANCE) -> None:
    """Raise if an export differs from the checkpoint by more than rounding errors."""
    name, difference = max(agreement.differences.items(), key=lambda pair: pair[1])
    if difference > tolerance or not agreement.same_sets:
        what = (
            "keeps different items" if difference <= tolerance else f"differs by {difference:.1e} of the largest score"
        )
        raise RuntimeError(
            f"the export of stage {name!r} {what} on {agreement.requests} requests (allowed: {tolerance:.0e} and the "
            f"same items); no export was written"
        )


def onnx_scores(folder: Path, entry: StageEntry) -> Callable[[CascadeBatch], np.ndarray[Any, Any]]:
    """Return a function from a batch to the scores of a stage's ONNX files, (B, N)."""
    from recsys_topk.serving.funnel import Session

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
    """Return whether two cascades keep the same items. Scores at the cut that differ only by rounding are ignored."""
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
    """Suppress the exporter's messages about optional packages and internals."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
