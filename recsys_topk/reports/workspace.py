"""A W&B workspace over the runs of a project, with the panels that people ask for."""

from __future__ import annotations

import warnings
from typing import Any

NAME = "recsys-topk"
METRIC = "joint_recall@10@20"  # of the default cascade
STEP = "trainer/global_step"
DAY = "stream/day"
# Where `fit --logger wandb` keeps what the runs differ in.
LOSS = "loss"
TAU = "model.loss.init_args.tau"
NEGATIVES = "data.init_args.train_negatives"
LR = "model.lr"
EMBEDDING_LR = "model.embedding_lr"
MOST_RUNS = 100  # in one panel; W&B's own default is 10
DIAGNOSTICS = "--trainer.callbacks+=recsys_topk.callbacks.diagnostics.Diagnostics"


def workspace(entity: str, project: str, metric: str = METRIC) -> Any:
    """Return the workspace: a section for each question, the first two open.

    Stage recalls, terms of the loss and diagnostics are chosen by pattern: a cascade may have any number of stages.

    Args:
        entity: User or team that owns the project.
        project: The project.
        metric: The metric that runs are compared by, without ``val/``.
    """
    recall, best_recall = f"val/{metric}", f"val/{metric}.max"
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
    loss = wr.Config(LOSS)
    best = wr.SummaryMetric(best_recall)

    def lines(title: str, *metrics: str, x: str = STEP, pattern: str | None = None, by_loss: bool = False) -> Any:
        grouping = {"groupby": loss, "groupby_aggfunc": "mean", "groupby_rangefunc": "stddev"} if by_loss else {}
        return wr.LinePlot(
            title=title, x=x, y=list(metrics), metric_regex=pattern, max_runs_to_show=MOST_RUNS, **grouping
        )

    def scatter(title: str, path: str, log: bool = False) -> Any:
        return wr.ScatterPlot(title=title, x=wr.Config(path), y=best, log_x=log)

    def bars(title: str, shown: str) -> Any:
        return wr.BarPlot(
            title=title, metrics=[shown], groupby=loss, groupby_aggfunc="mean", groupby_rangefunc="stddev",
            max_runs_to_show=MOST_RUNS, max_bars_to_show=30,
        )  # fmt: skip

    axes = [(LOSS, "loss", False), (TAU, "tau", True), (NEGATIVES, "negatives", False), (LR, "lr", True)]
    columns = [wr.ParallelCoordinatesPlotColumn(wr.Config(path), label, log=log) for path, label, log in axes]
    columns.append(wr.ParallelCoordinatesPlotColumn(best, "joint recall"))
    sections = {
        "Which loss": [
            bars("Joint recall by loss, mean and spread of its runs", best_recall),
            lines("Joint recall by loss over steps", recall, by_loss=True),
            lines("Joint recall and each stage alone", pattern="^val/.+_recall@"),
        ],
        "Which options": [
            scatter("Joint recall by tau", TAU, log=True),
            scatter("Joint recall by training negatives", NEGATIVES),
            scatter("Joint recall by learning rate", LR, log=True),
            scatter("Joint recall by learning rate of the tables", EMBEDDING_LR, log=True),
            wr.ParallelCoordinatesPlot(title="Options to joint recall", columns=columns),
            wr.ParameterImportancePlot(with_respect_to=best_recall),
        ],
        "Streaming, day by day": [
            lines("Joint recall on each day, before it is learned", f"stream/{metric}", x=DAY, by_loss=True),
            lines("Each stage alone on each day", x=DAY, pattern="^stream/.+_recall@"),
        ],
        "Training": [
            lines("Loss", "train/loss"),
            lines("Terms of the loss", pattern="^train/loss_"),
            lines("Requests per second", "train/requests_per_second"),
            bars("Requests per second by loss", "train/requests_per_second"),
        ],
        "Diagnostics": [
            wr.MarkdownPanel(markdown=f"Logged by runs with `recsys-topk fit {DIAGNOSTICS}`"),
            lines("Selection mass: items held for each one wanted", pattern="^diagnostics/selection_mass/"),
            lines("Gradient conflict: cosine between terms of the loss", pattern="^diagnostics/cosine/"),
            lines("Share of right items that the gradient pushes down", pattern="^diagnostics/wrong_sign/"),
            lines("Share of gradients below the optimizer's eps", pattern="^diagnostics/below_eps/"),
        ],
    }
    return ws.Workspace(
        entity=entity,
        project=project,
        name=NAME,
        sections=[
            ws.Section(name=name, panels=panels, is_open=number < 2)
            for number, (name, panels) in enumerate(sections.items())
        ],
        settings=ws.WorkspaceSettings(x_axis=STEP, max_runs=MOST_RUNS),
        runset_settings=ws.RunsetSettings(order=[expr.Ordering(expr.Summary(best_recall), ascending=False)]),
    )


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
