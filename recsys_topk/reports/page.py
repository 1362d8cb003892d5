"""One self-contained HTML page: nothing in it is fetched from anywhere."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from recsys_topk.reports import plots
from recsys_topk.reports.paper import paper_figures
from recsys_topk.reports.results import Found
from recsys_topk.reports.sections import Section, section_of
from recsys_topk.runs.wandb_logging import log_once

TEMPLATE = "page.html.jinja"


def render(title: str, found: Sequence[Found], facts: Mapping[str, Any]) -> tuple[str, list[Section]]:
    """Return the page and its sections: experiments in their own order, then everything else as it was found.

    Args:
        title: Its heading.
        found: What `find_all` returned.
        facts: Where the page comes from (`recsys_topk.runs.provenance`).
    """
    found = sorted(found, key=_order)
    sections = [section_of(one) for one in found]
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["code"] = code
    text = resources.files("recsys_topk.reports").joinpath(TEMPLATE).read_text(encoding="utf-8")
    drawn = [
        [
            {"svg": Markup(own_names(plots.svg(figure), f"s{i}-{j}-")), "caption": caption}
            for j, (figure, caption) in enumerate(section.figures)
        ]
        for i, section in enumerate(sections)
    ]
    names = anchors([section.title for section in sections])
    page: str = environment.from_string(text).render(
        title=title, facts=describe(found, facts), sections=list(zip(names, sections, drawn, strict=True)),
        source=paper_figures()["source"],
    )  # fmt: skip
    return page, sections


def code(text: str) -> Any:
    """Return text as HTML with what stands between backquotes as code.

    Example:
        >>> str(code("run `a < b`"))
        'run <code>a &lt; b</code>'
    """
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def own_names(svg: str, prefix: str) -> str:
    """Return an SVG whose ids begin with `prefix`, so that several can stand in one page.

    Example:
        >>> own_names('<g id="a"/><use href="#a" clip-path="url(#b)"/>', "x-")
        '<g id="x-a"/><use href="#x-a" clip-path="url(#x-b)"/>'
    """
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}\1"', svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}\1"', svg)
    return re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}\1)", svg)


def anchors(titles: Sequence[str]) -> list[str]:
    """Return a distinct anchor for each title.

    Example:
        >>> anchors(["The main table", "fit: a", "fit: a"])
        ['the-main-table', 'fit-a', 'fit-a-2']
    """
    made: list[str] = []
    for title in titles:
        base = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "section"
        number = 1
        while (name := base if number == 1 else f"{base}-{number}") in made:
            number += 1
        made.append(name)
    return made


def log_page(target: Path, sections: Sequence[Section], facts: Mapping[str, Any]) -> None:
    """Log the page, and every table and plot of it, as one W&B run; offline without a key."""
    tables: dict[str, list[dict[str, Any]]] = {}
    pictures: dict[str, bytes] = {}
    for name, section in zip(anchors([one.title for one in sections]), sections, strict=True):
        for number, table in enumerate(section.tables, start=1):
            rows = [{column: row.get(column) for column in table.columns} for row in table.rows]
            tables[f"report/{name}/table-{number}"] = rows
        for number, (figure, _) in enumerate(section.figures, start=1):
            pictures[f"report/{name}/plot-{number}"] = plots.png(figure)
    log_once(target.parent, "report", target.stem, facts, tables, pictures, {"report/page": target})


def describe(found: Sequence[Found], made: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts on top of a page, from what was found.

    Args:
        found: What `find_all` returned.
        made: Where the page comes from.
    """
    flat = [part for one in found for part in (one, *one.parts)]
    contents = [one.content for one in flat]
    started = sorted(str(content["started"])[:16].replace("T", " ") for content in contents if "started" in content)
    cpus = dict.fromkeys(
        f"{content['machine']['cpu']}, {content['machine']['cores']} cores"
        for content in contents if (content.get("machine") or {}).get("cpu")
    )  # fmt: skip
    devices = dict.fromkeys(
        str(run["device"]) for one in flat if one.kind == "comparison"
        for runs in one.content["runs"].values() for run in runs if "device" in run
    )  # fmt: skip
    known = next((content["versions"] for content in contents if content.get("versions")), made["versions"])
    seeds = sorted(
        {len(runs) for one in flat if one.kind in ("comparison", "stream") for runs in one.content["runs"].values()}
    )
    seeds = [number for number in seeds if number]
    facts = {"What": ", ".join(dict.fromkeys(_what(one) for one in found)), "Data": _data(flat) or "none"}
    if started:
        facts["When"] = " to ".join(dict.fromkeys([started[0], started[-1]])) + " UTC"
    facts["Machine"] = "; ".join(cpus) or f"{made['machine']['cpu']}, {made['machine']['cores']} cores"
    if devices:
        facts["Trained on"] = ", ".join(devices)
    if seeds:
        low, high = seeds[0], seeds[-1]
        facts["Seeds"] = f"{low} of each" if low == high else f"{low} to {high} of each"
    facts["Versions"] = ", ".join(f"{name} {number}" for name, number in known.items())
    facts["Page made"] = f"{made['started'][:16].replace('T', ' ')} UTC"
    return facts


def _order(one: Found) -> int:
    known = ("main-table", "runtime", "tau", "negatives", "streaming")
    return known.index(one.content["name"]) if one.kind == "experiment" else len(known)


def _what(one: Found) -> str:
    if one.kind == "experiment":
        return f"experiment {one.content['name']} ({one.content['size']})"
    if one.kind == "bench":
        return f"bench {one.content['suite']}"
    return f"{one.kind} {one.path.parent.name if one.path.is_file() else one.path.name}"


def _data(flat: Sequence[Found]) -> str:
    """Return what the runs were trained on, from their resolved options."""
    options: list[Mapping[str, Any]] = []
    for one in flat:
        if one.kind == "fit":
            options.append((one.content["config"] or {}).get("data") or {})
        elif one.kind == "comparison":
            options += [
                run["config"]["data"] for runs in one.content["runs"].values() for run in runs if "config" in run
            ]
    texts: dict[str, None] = {}
    for given in options:
        data = given.get("init_args", given)
        if data.get("root"):
            texts[f"RecFlow layout in {data['root']}"] = None
        else:
            world = data.get("world") or {}
            size = f"{world.get('users')} users, {world.get('items')} items, {world.get('days')} days"
            texts[f"a simulated world: {size} of {world.get('requests')} requests (seed {world.get('seed')})"] = None
    return "; ".join(texts)
