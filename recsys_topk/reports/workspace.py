"""A W&B workspace over the runs of a project, with the panels of workspace.yaml."""

from __future__ import annotations

import warnings
from importlib import resources
from typing import Any

import yaml

METRIC = "joint_recall@10@20"  # the joint recall of the default cascade
STEP = "trainer/global_step"
MOST_RUNS = 100  # per panel; the default of W&B is 10
DIAGNOSTICS = "--trainer.callbacks+=recsys_topk.callbacks.diagnostics.Diagnostics"


def workspace(entity: str, project: str, metric: str = METRIC) -> Any:
    """Return the workspace.

    Args:
        entity: User or team that owns the project.
        project: The project.
        metric: The metric by which runs are compared, without ``val/``.
    """
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
    best = f"val/{metric}.max"
    text = resources.files("recsys_topk.reports").joinpath("workspace.yaml").read_text(encoding="utf-8")
    content = yaml.safe_load(text.replace("METRIC", metric).replace("DIAGNOSTICS", DIAGNOSTICS))
    sections = [
        ws.Section(name=name, panels=[_made(wr, panel) for panel in panels], is_open=number < 2)
        for number, (name, panels) in enumerate(content["sections"].items())
    ]
    return ws.Workspace(
        entity=entity, project=project, name="recsys-topk", sections=sections,
        settings=ws.WorkspaceSettings(x_axis=STEP, max_runs=MOST_RUNS),
        runset_settings=ws.RunsetSettings(order=[expr.Ordering(expr.Summary(best), ascending=False)]),
    )  # fmt: skip


def _made(wr: Any, given: Any) -> Any:
    """Return the object for a part of workspace.yaml: a panel, or a value of a panel."""
    if isinstance(given, list):
        return [_made(wr, part) for part in given]
    if isinstance(given, dict):
        options = {name: _made(wr, value) for name, value in given.items() if name != "panel"}
        return getattr(wr, given["panel"])(**options)
    section, _, path = str(given).partition(":")
    known = {"config": wr.Config, "summary": wr.SummaryMetric}
    return known[section](path) if section in known else given


def spec(made: Any) -> str:
    """Return a workspace as the JSON that W&B stores."""
    content: str = made._to_model().spec.model_dump_json(by_alias=True, exclude_none=True, indent=1)
    return content


def save(entity: str | None, project: str, metric: str = METRIC) -> str:
    """Save the workspace and return its address."""
    import wandb

    try:
        owner = entity or wandb.Api(timeout=20).default_entity
        saved = workspace(str(owner), project, metric).save()
        return str(saved.url)
    except (wandb.Error, OSError, RuntimeError) as error:
        raise ValueError(f"W&B rejected the workspace for {entity or 'you'}/{project}: {error}") from error
