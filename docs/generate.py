"""Generate pages from the registries: one page per loss and operator with its properties and a plot, and the API."""

from __future__ import annotations

import html
import importlib
import inspect
import io
import operator
import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch
import yaml

from recsys_topk.losses.base import registry as losses
from recsys_topk.operators.base import registry as operators

SCORES = torch.tensor([2.0, 1.2, 0.4, 0.0, -0.6, -1.3])
LABELS = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, 0.0])
K = 2
MOVES = torch.linspace(-4.0, 4.0, 161)

FORMULAS = yaml.safe_load(Path(__file__).with_name("formulas.yaml").read_text(encoding="utf-8"))

PACKAGES = {
    "losses": "Losses", "operators": "Operators", "metrics": "Metrics as classes",
    "metrics.functional": "Metrics as functions", "datamodules": "Data modules and schema",
    "cascades": "Cascades", "evaluation": "Evaluation", "serving": "Serving", "runs": "Runs", "testing": "Testing",
}  # fmt: skip


# Of packages that export nothing themselves.
NAMED = {"serving": ("recommend.CascadeRecommender", "index.build_index", "service.make_app")}

NOTATION = (
    "*x*: scores, *l*: labels, *y*: 1 for the true items and 0 for the others, *n*: number of valid items, "
    "*r*<sub>*i*</sub>: rank of item *i* by score, *x*<sub>[*r*]</sub>: the *r*-th largest score, *&sigma;*: the "
    "logistic function."
)
RULES = ("equivariant", "tie_fair", "deterministic", "exact_gradient")
MEANING = {
    "sums_to_k": "the memberships of a list sum to k",
    "equivariant": "permuting a list permutes the result",
    "tie_fair": "equal scores are treated alike, in value and gradient",
    "deterministic": "the same input gives the same result",
    "exact_gradient": "the gradient is that of the value",
}
KEPT = {
    "losses": (
        "Like every loss, it keeps the rules of `recsys_topk.testing.check_loss`, which the tests run: masked items "
        "change neither value nor gradient, lists do not influence each other, half precision is computed in float32, "
        "and so on ([API reference](../api/index.md))."
    ),
    "operators": (
        "Like every operator, it keeps the rules of `recsys_topk.testing.check_operator`, which the tests run "
        "([API reference](../api/index.md))."
    ),
}


def write_pages(folder: Path) -> None:
    """Write all generated pages. Unchanged files are not rewritten, so that Sphinx does not read them again."""
    for kind, registry, plot, facts in (
        ("losses", losses, loss_plot, ("family", "label_kind", "cost", "requires_k", "paper")),
        ("operators", operators, operator_plot, ("cost", "paper")),
    ):
        names = [name for name, cls in registry.classes().items() if cls.__module__.startswith("recsys_topk.")]
        for name in names:
            write(folder / kind / f"{name}.md", class_page(kind, name, registry.resolve(name), facts))
            figures = [folder / kind / f"{name}-{part}.svg" for part in ("value", "gradient")]
            if not all(figure.exists() for figure in figures):
                plot(name, figures)
        summaries = {name: summary(registry.resolve(name)) for name in names}
        write(folder / kind / "index.md", index_page(kind, summaries))
    for name, page in api_pages().items():
        write(folder / "api" / f"{name}.md", page)


def class_page(kind: str, name: str, cls: type, facts: tuple[str, ...]) -> str:
    """Return the page of a loss or an operator."""
    shown = {fact.replace("_", " "): text(fact, getattr(cls, fact, None)) for fact in facts}
    figures = [
        [f"```{{image}} {name}-{part}.svg", ":class: half", f":alt: {plot_text(cls, part)}", "```"]
        for part in ("value", "gradient")
    ]
    lines = [
        f"# {name}",
        "",
        summary(cls),
        "",
        *formula(kind, name),
        *figures[0],
        *figures[1],
        "",
        *table(shown),
        "",
        "## Definition",
        "",
        "```{eval-rst}",
        f".. autoclass:: {cls.__module__}.{cls.__qualname__}",
        "   :no-members:",
        "   :noindex:",
        "```",
        "",
        "## Guarantees",
        "",
        *table({MEANING[rule]: text(rule, kept) for rule, kept in guarantees(kind, name, cls).items()}),
        "",
        KEPT[kind],
        "",
    ]
    return "\n".join(lines)


def formula(kind: str, name: str) -> list[str]:
    """Return the drawn formula of a loss or an operator; by default, the cross-entropy of an operator of its name."""
    lines = FORMULAS[kind].get(name, [])
    if not lines and name in FORMULAS["operators"]:
        lines = [*FORMULAS["losses"]["cross_entropy"], *FORMULAS["operators"][name]]
    return ["```{raw} html", *map(drawn, lines), "```", "", NOTATION, ""] if lines else []


def drawn(line: str) -> str:
    """Return a line of LaTeX as SVG in the colour of the page's text, in units of the size of that text."""
    size, file = 10, io.BytesIO()
    with plt.rc_context({"svg.hashsalt": "recsys_topk", "mathtext.fontset": "cm"}):
        figure = plt.figure(figsize=(0.01, 0.01))
        figure.text(0, 0, f"${line}$", fontsize=size)
        figure.savefig(file, metadata={"Date": None}, transparent=True, bbox_inches="tight", pad_inches=0.02)
        plt.close(figure)
    svg = file.getvalue().decode().partition("<svg ")[2]
    svg = re.sub(r'(width|height)="([\d.]+)pt"', lambda m: f'{m[1]}="{float(m[2]) / size:.2f}em"', svg, count=2)
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->|\n\s*", "", svg, flags=re.DOTALL)
    label = html.escape(line, quote=True)
    return f'<div class="formula"><svg role="img" aria-label="{label}" fill="currentColor" {svg}</div>'


def guarantees(kind: str, name: str, cls: type) -> dict[str, bool]:
    """Return which rules hold: what an operator declares, and a loss with an operator what its operator declares."""
    if kind == "operators":
        return {rule: getattr(cls, rule) for rule in ("sums_to_k", *RULES)}
    operator = losses.get(name, **({"k": K} if losses.resolve(name).requires_k else {})).operator
    declared = {} if operator is None else {rule: getattr(operator, rule) for rule in RULES}
    exact = getattr(cls, "exact_gradient", True) and declared.get("exact_gradient", True)
    return {**dict.fromkeys(RULES, True), **declared, "exact_gradient": exact}


def table(rows: dict[str, str]) -> list[str]:
    """Return a table of two columns; rows without a value are left out."""
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items() if value)]


def index_page(kind: str, summaries: dict[str, str]) -> str:
    """Return the list of losses or of operators."""
    rows = [f"| [{name}]({name}.md) | {words} |" for name, words in summaries.items()]
    table = ["| name | description |", "|---|---|", *rows]
    tree = ["```{toctree}", ":hidden:", "", *summaries, "```"]
    title = {"losses": "All losses", "operators": "All operators"}[kind]
    return "\n".join([f"# {title}", "", *table, "", *tree, ""])


def api_pages() -> dict[str, str]:
    """Return the pages of the API reference by file name: one per package, with what the package exports."""
    own_page = {cls for registry in (losses, operators) for cls in registry.classes().values()}
    pages, rows = {}, []
    for package, title in PACKAGES.items():
        home = importlib.import_module(f"recsys_topk.{package}")
        for name in NAMED.get(package, ()):
            importlib.import_module(f"recsys_topk.{package}.{name.partition('.')[0]}")
        names = NAMED.get(package) or getattr(home, "__all__", None) or [n for n in dir(home) if not n.startswith("_")]
        public = {name: operator.attrgetter(name)(home) for name in names}
        public = {
            n: x for n, x in public.items() if (inspect.isclass(x) or inspect.isfunction(x)) and x not in own_page
        }
        lines = [f"# {title}", "", summary(home), ""]
        if package in ("losses", "operators"):
            lines += [f"Each of them has a page: [all {package}](../{package}/index.md).", ""]
        lines += ["```{eval-rst}"]
        lines += [
            f".. auto{'class' if inspect.isclass(x) else 'function'}:: recsys_topk.{package}.{name}\n"
            for name, x in public.items()
        ]
        pages[package] = "\n".join([*lines, "```", ""])
        rows.append(f"| [{title}]({package}.md) | `recsys_topk.{package}` | {', '.join(f'`{n}`' for n in public)} |")
    tree = ["```{toctree}", ":hidden:", "", *PACKAGES, "```", ""]
    head = ["# API reference", "", "| page | package | names |", "|---|---|---|"]
    return {"index": "\n".join([*head, *rows, "", *tree]), **pages}


def summary(documented: Any) -> str:
    """Return the first line of the docstring of a class or package."""
    return inspect.getdoc(documented).split("\n")[0]  # type: ignore[union-attr]


def text(fact: str, value: Any) -> str:
    """Return a property of a class as table text."""
    if fact == "cost":
        return f"O({value})"
    if fact == "paper":
        return re.sub(r"arXiv (\d{4}\.\d{4,5})", r"[arXiv \1](https://arxiv.org/abs/\1)", str(value or ""))
    return {True: "yes", False: "no", None: ""}.get(value, str(value))


def plot_text(cls: type, part: str) -> str:
    """Return the alternative text of a plot of a class."""
    return f"{cls.__name__}: its {part} as the score of one item moves from -4 to 4"


def loss_plot(name: str, paths: list[Path]) -> None:
    """Plot a loss and its gradient over the score of one positive item among six."""
    loss = losses.get(name, **({"k": K} if losses.resolve(name).requires_k else {}))
    lists = SCORES.expand(len(MOVES), -1).clone()
    lists[:, 3] = MOVES
    lists.requires_grad_()
    torch.manual_seed(0)
    values = torch.stack([loss(row[None], LABELS[None]) for row in lists])
    (gradient,) = torch.autograd.grad(values.sum(), lists)
    draw(paths, "score of one of the two positives", values.detach(), gradient[:, 3], "loss", "gradient")


def operator_plot(name: str, paths: list[Path]) -> None:
    """Plot the membership of one item among six, and its derivative."""
    operator = operators.get(name)
    lists = SCORES.expand(len(MOVES), -1).clone()
    lists[:, 3] = MOVES
    lists.requires_grad_()
    torch.manual_seed(0)
    p = operator(lists, K).p[:, 3]
    gradient = torch.autograd.grad(p.sum(), lists)[0][:, 3] if p.requires_grad else torch.zeros_like(MOVES)
    draw(paths, "score of one of six items, k = 2", p.detach(), gradient, "membership p", "dp / dscore")


def draw(
    paths: list[Path], x_label: str, values: torch.Tensor, gradient: torch.Tensor, value_label: str, gradient_label: str
) -> None:
    """Draw two curves, each into a separate file: side by side on a wide page, one below the other on a phone."""
    style = {"svg.hashsalt": "recsys_topk", "font.size": 11, "axes.grid": True, "grid.alpha": 0.3}
    curves = ((values, value_label, "#1f6fb4"), (gradient, gradient_label, "#c1440e"))
    for path, (curve, label, colour) in zip(paths, curves, strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        with plt.rc_context(style):
            figure, axis = plt.subplots(figsize=(4.2, 2.8), layout="constrained")
            axis.plot(MOVES, curve, color=colour, linewidth=2)
            axis.set_xlabel(x_label)
            axis.set_ylabel(label)
            if float(curve.max() - curve.min()) < 1e-4:  # constant but for rounding
                axis.set_ylim(float(curve.mean()) - 0.5, float(curve.mean()) + 0.5)
            axis.spines[["top", "right"]].set_visible(False)
            figure.savefig(path, metadata={"Date": None}, facecolor="white")
            plt.close(figure)


def write(path: Path, content: str) -> None:
    """Write a page if its content changed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != content:
        path.write_text(content, encoding="utf-8")
