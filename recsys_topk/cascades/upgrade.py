"""Conversion of the options in checkpoints and configs of version 0.1.0 to the current format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The keys of a complete description of version 0.1.0 (hyper-parameters of a checkpoint, config.yaml of a run).
_OLD = {
    "stages", "loss", "objective", "k", "dim", "share_embeddings", "optimizer", "lr", "embedding_optimizer",
    "embedding_lr", "optimizer_options", "warmup_steps", "validate",
}  # fmt: skip
# The classes that replace `reference_quirks: true`.
_PUBLISHED = {
    "recsys_topk.cascades.objectives.joint.JointObjective": "recsys_topk.reference.PublishedJoint",
    "recsys_topk.cascades.objectives.icc.ICCObjective": "recsys_topk.reference.PublishedICC",
    "recsys_topk.losses.arf.ARFLoss": "recsys_topk.reference.PublishedARF",
    "recsys_topk.losses.arf.ARFV2Loss": "recsys_topk.reference.PublishedARFV2",
}


def upgrade(model: Mapping[str, Any], whole: bool | None = None) -> dict[str, Any]:
    """Return the options of a model in the current format. Options that need no change are not modified.

    - `reference_quirks` of a loss or an objective is removed. If it was true, the class becomes the published one.
    - A complete description of 0.1.0 has ``positive_above: 0.0`` for a loss without this option. It is removed, so that
      the data sets the threshold, as in 0.1.0.

    Args:
        model: Options by name, with `loss` and `objective` as plain descriptions if present.
        whole: Whether the options belong to a complete description of 0.1.0; None = if all of its keys are present.

    Example:
        >>> loss = {"class_path": "recsys_topk.losses.arf.ARFLoss", "init_args": {"tau": 2.0, "reference_quirks": True}}
        >>> upgrade({"loss": loss, "k": 5})["loss"]
        {'class_path': 'recsys_topk.reference.PublishedARF', 'init_args': {'tau': 2.0}}
    """
    whole = model.keys() >= _OLD and "metrics" not in model if whole is None else whole
    changed = dict(model)
    for name in ("loss", "objective"):
        part = model.get(name)
        if isinstance(part, Mapping) and "class_path" in part and isinstance(part.get("init_args"), Mapping):
            changed[name] = _upgrade_class(part, drop_threshold=whole and name == "loss")
    return changed


def _upgrade_class(description: Mapping[str, Any], drop_threshold: bool) -> dict[str, Any]:
    arguments = dict(description["init_args"])
    path = str(description["class_path"])
    if path in _PUBLISHED and arguments.pop("reference_quirks", False):
        path = _PUBLISHED[path]
    if drop_threshold and arguments.get("positive_above") == 0.0:
        del arguments["positive_above"]
    return {**description, "class_path": path, "init_args": arguments}
