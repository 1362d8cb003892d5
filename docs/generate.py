"""Generate pages from the registries: one page per loss and operator with its properties and a plot, and the API."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch

from recsys_topk.losses.base import registry as losses
from recsys_topk.operators.base import registry as operators

SCORES = torch.tensor([2.0, 1.2, 0.4, 0.0, -0.6, -1.3])
LABELS = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, 0.0])
K = 2
MOVES = torch.linspace(-4.0, 4.0, 161)

MODULES = {
    "Losses and operators": ["recsys_topk.losses.base", "recsys_topk.losses.functional", "recsys_topk.operators.base"],
    "Metrics": ["recsys_topk.metrics.functional", "recsys_topk.metrics.configured"],
    "Data": [
        "recsys_topk.datamodules.schema",
        "recsys_topk.datamodules.batch",
        "recsys_topk.datamodules.base",
        "recsys_topk.datamodules.shard",
        "recsys_topk.datamodules.negatives",
        "recsys_topk.datamodules.recflow.datamodule",
    ],
    "Cascades": [
        "recsys_topk.cascades.module",
        "recsys_topk.cascades.stage",
        "recsys_topk.cascades.features",
        "recsys_topk.cascades.inference",
        "recsys_topk.cascades.objectives.base",
    ],
    "Runs": ["recsys_topk.runs.run", "recsys_topk.trust"],
    "Testing": ["recsys_topk.testing.contract"],
}


def write_pages(folder: Path) -> None:
    """Write all generated pages. Unchanged files are not rewritten, so that Sphinx does not read them again."""
    for kind, registry, plot, facts in (
        ("losses", losses, loss_plot, ("family", "label_kind", "cost", "requires_k", "paper")),
        (
            "operators",
            operators,
            operator_plot,
            ("cost", "sums_to_k", "equivariant", "tie_fair", "deterministic", "exact_gradient", "paper"),
        ),
    ):
        names = [name for name, cls in registry.classes().items() if cls.__module__.startswith("recsys_topk.")]
        for name in names:
            write(folder / kind / f"{name}.md", class_page(name, registry.resolve(name), facts))
            figure = folder / kind / f"{name}.svg"
            if not figure.exists():
                plot(name, figure)
        summaries = {name: summary(registry.resolve(name)) for name in names}
        write(folder / kind / "index.md", index_page(kind, summaries))
    write(folder / "api.md", api_page())


def class_page(name: str, cls: type, facts: tuple[str, ...]) -> str:
    """Return the page of a loss or an operator."""
    rows = [f"| {fact.replace('_', ' ')} | {text(fact, getattr(cls, fact, None))} |" for fact in facts]
    lines = [
        f"# {name}",
        "",
        summary(cls),
        "",
        f"```{{image}} {name}.svg",
        f":alt: {plot_text(cls)}",
        "```",
        "",
        "| | |",
        "|---|---|",
        *rows,
        "",
        "```{eval-rst}",
        f".. autoclass:: {cls.__module__}.{cls.__qualname__}",
        "   :no-members:",
        "   :noindex:",
        "```",
        "",
    ]
    return "\n".join(lines)


def index_page(kind: str, summaries: dict[str, str]) -> str:
    """Return the list of losses or of operators."""
    rows = [f"| [{name}]({name}.md) | {words} |" for name, words in summaries.items()]
    table = ["| name | description |", "|---|---|", *rows]
    tree = ["```{toctree}", ":hidden:", "", *summaries, "```"]
    title = {"losses": "All losses", "operators": "All operators"}[kind]
    return "\n".join([f"# {title}", "", *table, "", *tree, ""])


def api_page() -> str:
    """Return the API reference."""
    lines = ["# API reference", ""]
    for title, modules in MODULES.items():
        lines += [f"## {title}", "", "```{eval-rst}"]
        for module in modules:
            lines += [f".. automodule:: {module}", ""]
        lines += ["```", ""]
    return "\n".join(lines)


def summary(cls: type) -> str:
    """Return the first line of a class's docstring."""
    return inspect.getdoc(cls).split("\n")[0]  # type: ignore[union-attr]


def text(fact: str, value: Any) -> str:
    """Return a property of a class as table text."""
    if fact == "cost":
        return f"O({value})"
    return {True: "yes", False: "no", None: ""}.get(value, str(value))


def plot_text(cls: type) -> str:
    """Return the alternative text of the plot of a class."""
    return f"{cls.__name__}: value and gradient as the score of one item moves from -4 to 4"


def loss_plot(name: str, path: Path) -> None:
    """Plot a loss and its gradient over the score of one positive item among six."""
    loss = losses.get(name, **({"k": K} if losses.resolve(name).requires_k else {}))
    lists = SCORES.expand(len(MOVES), -1).clone()
    lists[:, 3] = MOVES
    lists.requires_grad_()
    torch.manual_seed(0)
    values = torch.stack([loss(row[None], LABELS[None]) for row in lists])
    (gradient,) = torch.autograd.grad(values.sum(), lists)
    draw(path, "score of one of the two positives", values.detach(), gradient[:, 3], "loss", "gradient")


def operator_plot(name: str, path: Path) -> None:
    """Plot the membership of one item among six, and its derivative."""
    operator = operators.get(name)
    lists = SCORES.expand(len(MOVES), -1).clone()
    lists[:, 3] = MOVES
    lists.requires_grad_()
    torch.manual_seed(0)
    p = operator(lists, K).p[:, 3]
    gradient = torch.autograd.grad(p.sum(), lists)[0][:, 3] if p.requires_grad else torch.zeros_like(MOVES)
    draw(path, "score of one of six items, k = 2", p.detach(), gradient, "membership p", "dp / dscore")


def draw(
    path: Path, x_label: str, values: torch.Tensor, gradient: torch.Tensor, value_label: str, gradient_label: str
) -> None:
    """Draw two curves side by side."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with plt.rc_context({"svg.hashsalt": "recsys_topk", "font.size": 11, "axes.grid": True, "grid.alpha": 0.3}):
        figure, axes = plt.subplots(1, 2, figsize=(8.4, 2.8), layout="constrained")
        for axis, curve, label, colour in zip(
            axes, (values, gradient), (value_label, gradient_label), ("#1f6fb4", "#c1440e"), strict=True
        ):
            axis.plot(MOVES, curve, color=colour, linewidth=2)
            axis.set_xlabel(x_label)
            axis.set_ylabel(label)
            axis.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None}, facecolor="white")
        plt.close(figure)


def write(path: Path, content: str) -> None:
    """Write a page if its content changed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != content:
        path.write_text(content, encoding="utf-8")
