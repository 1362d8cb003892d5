"""Options that version 0.1.0 wrote into checkpoints and configs, in today's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What a whole description of version 0.1.0 holds (hyper-parameters of a checkpoint, config.yaml of a run).
_OLD = {
    "stages", "loss", "objective", "k", "dim", "share_embeddings", "optimizer", "lr", "embedding_optimizer",
    "embedding_lr", "optimizer_options", "warmup_steps", "validate",
}  # fmt: skip
# What `reference_quirks: true` asked for.
_PUBLISHED = {
    "recsys_topk.cascades.objectives.joint.JointObjective": "recsys_topk.reference.PublishedJoint",
    "recsys_topk.cascades.objectives.icc.ICCObjective": "recsys_topk.reference.PublishedICC",
    "recsys_topk.losses.arf.ARFLoss": "recsys_topk.reference.PublishedARF",
    "recsys_topk.losses.arf.ARFV2Loss": "recsys_topk.reference.PublishedARFV2",
}


def upgrade(model: Mapping[str, Any], whole: bool | None = None) -> dict[str, Any]:
    """Return the options of a model in today's form; those that need no change as they are.

    - `reference_quirks` of a loss or an objective is left out if false; if true, the class becomes the published one.
    - A whole description of 0.1.0 holds ``positive_above: 0.0`` for a loss that was told nothing: left out, so that
      the data decides, as then.

    Args:
        model: Options by name, with `loss` and `objective` as plain descriptions if they are there.
        whole: Whether they are (of) a whole description of 0.1.0; None = if all that such a one holds is there.

    Example:
        >>> loss = {"class_path": "recsys_topk.losses.arf.ARFLoss", "init_args": {"tau": 2.0, "reference_quirks": True}}
        >>> upgrade({"loss": loss, "k": 5})["loss"]
        {'class_path': 'recsys_topk.reference.PublishedARF', 'init_args': {'tau': 2.0}}
    """
    whole = model.keys() >= _OLD and "metrics" not in model if whole is None else whole
    changed = dict(model)
    for name in ("loss", "objective"):
        given = model.get(name)
        if isinstance(given, Mapping) and "class_path" in given and isinstance(given.get("init_args"), Mapping):
            changed[name] = _upgrade_class(given, drop_threshold=whole and name == "loss")
    return changed


def _upgrade_class(given: Mapping[str, Any], drop_threshold: bool) -> dict[str, Any]:
    arguments = dict(given["init_args"])
    path = str(given["class_path"])
    if path in _PUBLISHED and arguments.pop("reference_quirks", False):
        path = _PUBLISHED[path]
    if drop_threshold and arguments.get("positive_above") == 0.0:
        del arguments["positive_above"]
    return {**given, "class_path": path, "init_args": arguments}
