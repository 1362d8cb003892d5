"""A W&B workspace over the runs of a project, with the panels of workspace.yaml."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib import resources
from typing import Any

import yaml

METRIC = "joint_recall@10@20"  # of the default cascade
STEP = "trainer/global_step"
MOST_RUNS = 100  # in one panel; W&B's own default is 10
DIAGNOSTICS = "--trainer.callbacks+=recsys_topk.callbacks.diagnostics.Diagnostics"


def workspace(entity: str, project: str, metric: str = METRIC) -> Any:
    """Return the workspace.

    Args:
        entity: User or team that owns the project.
        project: The project.
        metric: The metric that runs are compared by, without ``val/``.
    """
    with warnings.catch_warnings():
        # The package declares its models in pydantic's old way, and says so seven times.
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
        ws.Section(name=name, panels=[_panel(wr, panel, best) for panel in panels], is_open=number < 2)
        for number, (name, panels) in enumerate(content.items())
    ]
    return ws.Workspace(
        entity=entity, project=project, name="recsys-topk", sections=sections,
        settings=ws.WorkspaceSettings(x_axis=STEP, max_runs=MOST_RUNS),
        runset_settings=ws.RunsetSettings(order=[expr.Ordering(expr.Summary(best), ascending=False)]),
    )  # fmt: skip


def _panel(wr: Any, panel: Mapping[str, Any], best: str) -> Any:
    """Return one panel; its kind is the key that says so."""
    title = panel.get("title")
    by_loss = {"groupby": wr.Config("loss"), "groupby_aggfunc": "mean", "groupby_rangefunc": "stddev"}
    if "text" in panel:
        return wr.MarkdownPanel(markdown=panel["text"])
    if "importance" in panel:
        return wr.ParameterImportancePlot(with_respect_to=panel["importance"])
    if "scatter" in panel:
        y = wr.SummaryMetric(best)
        return wr.ScatterPlot(title=title, x=wr.Config(panel["scatter"]), y=y, log_x=panel.get("log", False))
    if "parallel" in panel:
        column = wr.ParallelCoordinatesPlotColumn
        options = panel["parallel"].items()
        columns = [column(wr.Config(path), label, log=label in panel["log"]) for label, path in options]
        return wr.ParallelCoordinatesPlot(
            title=title, columns=[*columns, column(wr.SummaryMetric(best), "joint recall")]
        )
    if "bars" in panel:
        shown = {"max_runs_to_show": MOST_RUNS, "max_bars_to_show": 30}
        return wr.BarPlot(title=title, metrics=[panel["bars"]], **by_loss, **shown)
    metrics = [panel["lines"]] if "lines" in panel else []
    grouped = by_loss if panel.get("by_loss") else {}
    pattern, x = panel.get("pattern"), panel.get("x", STEP)
    return wr.LinePlot(title=title, x=x, y=metrics, metric_regex=pattern, max_runs_to_show=MOST_RUNS, **grouped)


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
        raise ValueError(f"W&B did not take the workspace for {entity or 'you'}/{project}: {error}") from error
