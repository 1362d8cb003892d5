"""A W&B workspace over the runs of a project, with the panels of workspace.yaml."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Sequence
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from recsys_topk.runs.directory import RunDirectory

METRIC = "joint_recall@10@20"  # the joint recall of the default cascade
STEP = "trainer/global_step"
MOST_RUNS = 100  # per panel; the default of W&B is 10
NEWEST = 200  # number of newest runs whose metrics are read
DIAGNOSTICS = "--trainer.callbacks+=recsys_topk.callbacks.diagnostics.Diagnostics"


def workspace(entity: str, project: str, metrics: Sequence[str] = (METRIC,)) -> Any:
    """Return the workspace. Runs are sorted by the first of the metrics (names without ``val/``) that compare them."""
    with warnings.catch_warnings():
        # The package declares its models in the old style of pydantic, which warns seven times.
        warnings.filterwarnings("ignore", category=DeprecationWarning, message="Pydantic V1 style")
        try:
            import wandb_workspaces.reports.v2 as wr
            import wandb_workspaces.workspaces as ws
            from wandb_workspaces import expr
        except ImportError as error:
            raise ValueError(
                f"the dashboard needs wandb-workspaces ({error}): pip install 'wandb-workspaces>=0.4'"
            ) from error
    text = resources.files("recsys_topk.reports").joinpath("workspace.yaml").read_text(encoding="utf-8")
    content = yaml.safe_load(text.replace("DIAGNOSTICS", DIAGNOSTICS))
    sections = [
        ws.Section(
            name=name,
            panels=[_build(wr, panel, metric) for panel in panels for metric in _repeats(panel, metrics)],
            is_open=number < 2,
        )
        for number, (name, panels) in enumerate(content["sections"].items())
    ]
    return ws.Workspace(
        entity=entity, project=project, name="recsys-topk", sections=sections,
        settings=ws.WorkspaceSettings(x_axis=STEP, max_runs=MOST_RUNS),
        runset_settings=ws.RunsetSettings(order=[expr.Ordering(expr.Summary(f"val/{metrics[0]}"), ascending=False)]),
    )  # fmt: skip


def _repeats(panel: Any, metrics: Sequence[str]) -> Sequence[str]:
    """Return the metrics for which a panel is repeated: all, or one if the panel does not show METRIC."""
    return metrics if "METRIC" in json.dumps(panel) else metrics[:1]


def _build(wr: Any, value: Any, metric: str) -> Any:
    """Return the object for a part of workspace.yaml: a panel, or a value of a panel."""
    if isinstance(value, list):
        return [_build(wr, part, metric) for part in value]
    if isinstance(value, dict):
        options = {name: _build(wr, inner, metric) for name, inner in value.items() if name != "panel"}
        return getattr(wr, value["panel"])(**options)
    if not isinstance(value, str):
        return value
    text = value.replace("METRIC", metric)
    section, _, path = text.partition(":")
    known = {"config": wr.Config, "summary": wr.SummaryMetric}
    return known[section](path) if section in known else text


def metrics_of_folder(folder: Path) -> list[str]:
    """Return the monitored metrics of the runs in a folder, newest run first.

    The names contain k and the quota of the last stage, so runs of two different cascades have two names.
    """
    files = sorted(folder.glob("**/run.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    return _names(RunDirectory.open(path.parent).facts.get("monitor") for path in files[:NEWEST])


def metrics_of_project(entity: str, project: str) -> list[str]:
    """Return the monitored metrics of the runs of a W&B project; empty if it has no runs or W&B does not answer."""
    import wandb

    try:
        runs = wandb.Api(timeout=20).runs(f"{entity}/{project}", order="-created_at")
        return _names(run.config.get("monitor") for run in islice(runs, NEWEST))
    except (wandb.Error, OSError, RuntimeError, ValueError, TypeError, KeyError, AttributeError):
        return []


def _names(values: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(name for name in values if isinstance(name, str) and name))


def spec(built: Any) -> str:
    """Return a workspace as the JSON that W&B stores."""
    return str(built._to_model().spec.model_dump_json(by_alias=True, exclude_none=True, indent=1))


def default_entity() -> str:
    """Return the user or team whose key is known here."""
    import wandb

    try:
        return str(wandb.Api(timeout=20).default_entity)
    except (wandb.Error, OSError, RuntimeError) as error:
        raise ValueError(f"W&B does not answer: {error}") from error


def save(entity: str, project: str, metrics: Sequence[str] = (METRIC,)) -> str:
    """Save the workspace and return its address."""
    import wandb

    try:
        return str(workspace(entity, project, metrics).save().url)
    except (wandb.Error, OSError, RuntimeError) as error:
        raise ValueError(f"W&B rejected the workspace for {entity}/{project}: {error}") from error
