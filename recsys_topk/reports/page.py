"""The report as one self-contained HTML page without external resources."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recsys_topk.reports import plots
from recsys_topk.reports.overview import described, overview
from recsys_topk.reports.paper import EXPERIMENTS, paper_figures
from recsys_topk.reports.results import Result
from recsys_topk.reports.sections import Section, section_of
from recsys_topk.runs.wandb.logger import log_once

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def render(title: str, results: Sequence[Result], facts: Mapping[str, Any]) -> tuple[str, list[Section]]:
    """Return the page and its sections: first the experiments in their order, then all other results."""
    results = sorted(results, key=_order)
    sections = [section_of(one) for one in results]
    names = anchors([section.title for section in sections])
    found = overview(list(zip(names, results, strict=True)))
    if found is not None:
        sections.insert(0, Section("All runs", verdict=found[1], tables=[found[0]]))
        names = anchors([section.title for section in sections])
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("recsys_topk.reports", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters.update(code=code, svg=svg)
    page: str = environment.get_template("page.html.jinja").render(
        title=title, facts=describe(results, facts), source=paper_figures()["source"],
        sections=list(zip(names, sections, strict=True)),
    )  # fmt: skip
    return page, sections


def code(text: str) -> Any:
    """Return text as HTML, with text between backquotes as code.

    Example:
        >>> str(code("run `a < b`"))
        'run <code>a &lt; b</code>'
    """
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def svg(figure: Figure, prefix: str) -> Any:
    """Return a figure as SVG with `prefix` before its ids, so that a page can have several figures."""
    from markupsafe import Markup

    return Markup(re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", plots.svg(figure)))


def anchors(titles: Sequence[str]) -> list[str]:
    """Return a distinct anchor for each title.

    Example:
        >>> anchors(["The main table", "fit: a", "fit: a"])
        ['the-main-table', 'fit-a', 'fit-a-2']
    """
    names: list[str] = []
    for title in titles:
        base = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "section"
        number = 1
        while (name := base if number == 1 else f"{base}-{number}") in names:
            number += 1
        names.append(name)
    return names


def log_page(target: Path, sections: Sequence[Section], facts: Mapping[str, Any]) -> None:
    """Log the page with all its tables and plots as one W&B run. Without an API key the run is offline."""
    tables: dict[str, list[dict[str, Any]]] = {}
    pictures: dict[str, bytes] = {}
    for name, section in zip(anchors([one.title for one in sections]), sections, strict=True):
        for number, table in enumerate(section.tables, start=1):
            rows = [{column: row.get(column) for column in table.columns} for row in table.rows]
            tables[f"report/{name}/table-{number}"] = rows
        for number, (figure, _) in enumerate(section.figures, start=1):
            pictures[f"report/{name}/plot-{number}"] = plots.png(figure)
    log_once(target.parent, "report", target.stem, facts, tables, pictures, {"report/page": target})


def describe(results: Sequence[Result], page: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts at the top of the page: those of the results, and the provenance of the page (`page`)."""
    contents = [part.content for one in results for part in (one, *one.parts)]
    by_label = [runs for content in contents for runs in content.get("runs", {}).values() if runs]
    runs = [run for group in by_label for run in group]
    times = sorted(str(content["started"])[:16].replace("T", " ") for content in contents if "started" in content)
    machines = [machine for content in contents if (machine := content.get("machine") or {}).get("cpu")]
    seeds = sorted({len(group) for group in by_label})
    facts = {
        "Results": [one.name for one in results],
        "Data": [
            described(one["config"])["data"] for one in (*runs, *contents) if (one.get("config") or {}).get("data")
        ],
        "When": [f"{' to '.join(dict.fromkeys([times[0], times[-1]]))} UTC"] if times else [],
        "Machine": [f"{machine['cpu']}, {machine['cores']} cores" for machine in machines or [page["machine"]]],
        "Trained on": [run["device"] for run in runs if "device" in run],
        "Seeds": [f"{' to '.join(dict.fromkeys(map(str, (seeds[0], seeds[-1]))))} per variant"] if seeds else [],
        "Versions": [
            f"{name} {number}"
            for name, number in next((c["versions"] for c in contents if c.get("versions")), page["versions"]).items()
        ],
        "Page created": [f"{page['started'][:16].replace('T', ' ')} UTC"],
    }
    return {name: "; ".join(dict.fromkeys(texts)) for name, texts in facts.items() if texts}


def _order(one: Result) -> int:
    return EXPERIMENTS.index(one.content["name"]) if one.kind == "experiment" else len(EXPERIMENTS)
