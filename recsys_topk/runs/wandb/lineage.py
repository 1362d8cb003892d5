"""Lineage in W&B: the data and the weights of a run, and the training run of a checkpoint."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from recsys_topk.cascades.shards import load_stored, with_full_tensors
from recsys_topk.datamodules import CascadeDataModule
from recsys_topk.runs.directory import RunDirectory

# The entries of a checkpoint that `recsys-topk test` needs: weights and plain descriptions, no optimizer state.
KEPT = ("state_dict", "hyper_parameters", "datamodule_hyper_parameters", "epoch", "global_step")
LIGHTNING = "pytorch-lightning_version"
TRAINING_RUN = "wandb_run"
FACTS = ("id", "project", "entity", "group", "artifact")

log = logging.getLogger(__name__)


def run_facts(logger: Any) -> dict[str, Any]:
    """Return the identity of a W&B run for `run.json`: ``wandb_id``, ``wandb_project``, ..."""
    started = getattr(logger, "_experiment", None)
    facts = {**logger._wandb_init, "entity": getattr(started, "entity", None) or logger._wandb_init.get("entity")}
    return {f"wandb_{name}": str(facts[name]) for name in FACTS if facts.get(name)}


def linked_run(checkpoint: str | Path | None) -> dict[str, str]:
    """Return the W&B run that trained a checkpoint: ``id``, ``project``, ...; empty if unknown.

    It is read from `run.json` of the run directory, or from a file of weights that `log_weights` uploaded.
    """
    if checkpoint is None:
        return {}
    path = Path(checkpoint).resolve()
    directory = RunDirectory.open(path.parent.parent)
    facts = {name: directory.facts.get(f"wandb_{name}") for name in FACTS}
    if facts["id"] is not None:
        facts["name"] = directory.path.name
    else:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True).get(TRAINING_RUN)
        facts = dict(saved) if isinstance(saved, Mapping) else {}
    linked = {str(name): value for name, value in facts.items() if isinstance(value, str) and value}
    if "id" not in linked:
        return {}
    parts = (linked.get("entity"), linked.get("project"), linked["id"])
    return {**linked, "path": "/".join(part for part in parts if part), "checkpoint": path.name}


def use_weights(experiment: Any, linked: Mapping[str, str]) -> None:
    """Declare the uploaded weights of a checkpoint (`linked_run`) as an input of a run; W&B cannot do this offline."""
    if experiment.offline or "artifact" not in linked:
        return

    import wandb

    where = [linked[part] for part in ("entity", "project") if part in linked]
    name = "/".join([*where, f"{linked['artifact']}:{Path(linked['checkpoint']).stem}"])
    try:
        experiment.use_artifact(name, type="model")
    except (wandb.Error, ValueError, OSError, RuntimeError) as error:  # a missing link must not end a measurement
        log.warning("W&B does not have the weights %s, so this run is not linked to them: %s", name, error)


def log_weights(
    logger: Any, checkpoints: Mapping[str, Path], metadata: Mapping[str, Any], run_name: str
) -> dict[str, Any]:
    """Upload each checkpoint as a version of one artifact: weights and plain descriptions, no code, no optimizer state.

    `recsys-topk test --ckpt_path` takes such a file. Offline it is kept and goes up with `wandb sync`. Checkpoints are
    given by alias, e.g. ``best``. The name of the artifact is returned for `run.json`.
    """
    import wandb

    name = f"model-{logger.version}"
    training_run = {key.removeprefix("wandb_"): value for key, value in run_facts(logger).items()}
    training_run |= {"artifact": name, "name": run_name}
    with tempfile.TemporaryDirectory() as folder:
        for label, path in checkpoints.items():
            artifact = wandb.Artifact(name, type="model", metadata={**metadata, "run": run_name, "checkpoint": label})
            content = with_full_tensors(load_stored(path))
            bare = Path(folder) / f"{label}.ckpt"
            kept = {key: content[key] for key in (*KEPT, LIGHTNING) if key in content}
            torch.save({**kept, TRAINING_RUN: training_run}, bare)
            artifact.add_file(str(bare), name=bare.name)
            logger.experiment.log_artifact(artifact, aliases=[label, "latest"])
    return {"wandb_artifact": name}


def use_data(experiment: Any, data: Any) -> None:
    """Declare the data as an input of a run: references to the prepared files, which are not uploaded."""
    if not isinstance(data, CascadeDataModule):
        return

    import wandb

    try:
        # As `use_artifact` with a new artifact, which raises offline and waits online.
        experiment._log_artifact(data_artifact(data), is_user_created=True, use_after_commit=True)
    except (wandb.Error, ValueError, OSError) as error:  # a missing link must not end a run
        log.warning("the data are not an input of the W&B run: %s", error)


def data_artifact(data: CascadeDataModule) -> Any:
    """Return the artifact of a data module: a short description, and references to the prepared files.

    The digest of a file is that of its path, which contains a fingerprint of the source, so that the content is not
    read. Another source or other options of the data give another version; batch size, seed and negatives do not.
    """
    import wandb

    saved = dict(data.hparams)
    of_the_run = {*inspect.signature(CascadeDataModule.__init__).parameters, "cache_dir", "class_path"}
    schema = json.dumps(data.schema.to_dict(), sort_keys=True, default=str)
    description = {
        "class_path": saved.get("class_path"),
        "options": {name: value for name, value in saved.items() if name not in of_the_run},
        "splits": {split: list(names) for split, names in data.splits.items()},
        "schema": hashlib.blake2b(schema.encode(), digest_size=8).hexdigest(),
    }
    root = saved.get("root")
    parts = [getattr(data, "name", type(data).__name__), *([Path(root).name] if isinstance(root, str) else [])]
    artifact = wandb.Artifact(re.sub(r"[^\w.-]", "-", "-".join(parts))[:100], type="dataset", metadata=description)
    with artifact.new_file("data.json") as file:
        json.dump(description, file, indent=1, sort_keys=True)
    for name, folder in data.prepared_folders.items():
        artifact.add_reference(folder.resolve().as_uri(), name=name, checksum=False)
    return artifact
