"""`recsys-topk dashboard`: a W&B workspace over the runs of a project, with the panels that people ask for."""

from __future__ import annotations

import argparse
import warnings
from typing import Any

from recsys_topk.cli.console import echo, warn
from recsys_topk.runs.directory import offline_wandb
from recsys_topk.runs.files import write_whole

NAME = "recsys-topk"
RECALL = "val/joint_recall@10@20"
BEST = f"{RECALL}.max"
STEP = "trainer/global_step"
DAY = "stream/day"
# Where `fit --logger wandb` keeps what the runs differ in.
LOSS = "loss"
TAU = "model.loss.init_args.tau"
NEGATIVES = "data.train_negatives"
LR = "model.lr"
EMBEDDING_LR = "model.embedding_lr"
MOST_RUNS = 100  # in one panel; W&B's own default is 10
DIAGNOSTICS = "--trainer.callbacks+=recsys_topk.callbacks.diagnostics.Diagnostics"


def workspace(entity: str, project: str) -> Any:
    """Return the workspace: a section for each question, the first two open.

    Stage recalls, terms of the loss and diagnostics are chosen by pattern: a cascade may have any number of stages.

    Args:
        entity: User or team that owns the project.
        project: The project.
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
    loss = wr.Config(LOSS)
    best = wr.SummaryMetric(BEST)

    def lines(title: str, *metrics: str, x: str = STEP, pattern: str | None = None, by_loss: bool = False) -> Any:
        grouping = {"groupby": loss, "groupby_aggfunc": "mean", "groupby_rangefunc": "stddev"} if by_loss else {}
        return wr.LinePlot(
            title=title, x=x, y=list(metrics), metric_regex=pattern, max_runs_to_show=MOST_RUNS, **grouping
        )

    def scatter(title: str, path: str, log: bool = False) -> Any:
        return wr.ScatterPlot(title=title, x=wr.Config(path), y=best, log_x=log)

    def bars(title: str, metric: str) -> Any:
        return wr.BarPlot(
            title=title, metrics=[metric], groupby=loss, groupby_aggfunc="mean", groupby_rangefunc="stddev",
            max_runs_to_show=MOST_RUNS, max_bars_to_show=30,
        )  # fmt: skip

    axes = [(LOSS, "loss", False), (TAU, "tau", True), (NEGATIVES, "negatives", False), (LR, "lr", True)]
    columns = [wr.ParallelCoordinatesPlotColumn(wr.Config(path), label, log=log) for path, label, log in axes]
    recall = wr.ParallelCoordinatesPlotColumn(best, "joint recall")
    sections = {
        "Which loss": [
            bars("Joint recall by loss, mean and spread of its runs", BEST),
            lines("Joint recall by loss over steps", RECALL, by_loss=True),
            lines("Joint recall and each stage alone", pattern="^val/.+_recall@"),
        ],
        "Which options": [
            scatter("Joint recall by tau", TAU, log=True),
            scatter("Joint recall by training negatives", NEGATIVES),
            scatter("Joint recall by learning rate", LR, log=True),
            scatter("Joint recall by learning rate of the tables", EMBEDDING_LR, log=True),
            wr.ParallelCoordinatesPlot(title="Options to joint recall", columns=[*columns, recall]),
            wr.ParameterImportancePlot(with_respect_to=BEST),
        ],
        "Streaming, day by day": [
            lines("Joint recall on each day, before it is learned", "stream/joint_recall@10@20", x=DAY, by_loss=True),
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
        runset_settings=ws.RunsetSettings(order=[expr.Ordering(expr.Summary(BEST), ascending=False)]),
    )


def spec(made: Any) -> str:
    """Return a workspace as the JSON that W&B stores."""
    content: str = made._to_model().spec.model_dump_json(by_alias=True, exclude_none=True, indent=1)
    return content


def save(entity: str | None, project: str) -> str:
    """Save the workspace and return its address."""
    import wandb

    try:
        owner = entity or wandb.Api(timeout=20).default_entity
        saved = workspace(str(owner), project).save()
        return str(saved.url)
    except (wandb.Error, OSError, RuntimeError) as error:
        raise ValueError(f"W&B did not take the workspace for {entity or 'you'}/{project}: {error}") from error


def main(argv: list[str]) -> int:
    """Save the workspace, or print or write it where there is no key or it is asked for."""
    parser = argparse.ArgumentParser(
        prog="recsys-topk dashboard",
        description="Save a W&B workspace with the runs of a project by loss, tau, negatives, day and throughput, and "
        "print its address. Without a W&B key it is printed as JSON, or written with --out.",
        allow_abbrev=False,
    )
    parser.add_argument("--entity", help="user or team that owns the project (default: yours)")
    parser.add_argument("--project", default="recsys-topk", help="the project (default: %(default)s)")
    parser.add_argument("--print", action="store_true", help="print the workspace as JSON instead of saving it")
    parser.add_argument("--out", metavar="FILE", help="write the workspace as JSON instead of saving it")
    options = parser.parse_args(argv)
    no_key = offline_wandb()
    if not (no_key or options.print or options.out):
        echo(save(options.entity, options.project))
        return 0
    text = spec(workspace(options.entity or "entity", options.project))
    if options.out:
        try:
            write_whole(options.out, text)
        except OSError as error:
            raise ValueError(
                f"--out must be a file that can be written, got {options.out!r}: {error.strerror}"
            ) from error
        echo(f"written: {options.out}")
    if options.print or not options.out:
        echo(text)
    if no_key:
        warn("not saved: no W&B key is known here; set WANDB_API_KEY or run `wandb login`, and run this again")
    return 0
