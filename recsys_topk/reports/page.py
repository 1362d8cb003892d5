"""One self-contained HTML page: nothing in it is fetched from anywhere."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from recsys_topk.experiments.definition import paper_figures
from recsys_topk.reports import plots
from recsys_topk.reports.sections import Section

TEMPLATE = "page.html.jinja"


def render(title: str, facts: Mapping[str, str], sections: Sequence[Section]) -> str:
    """Return the page.

    Args:
        title: Its heading.
        facts: What ran, on what, when and where: text by heading.
        sections: Its sections, in order.
    """
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
        title=title, facts=facts, sections=list(zip(names, sections, drawn, strict=True)),
        source=paper_figures()["source"],
    )  # fmt: skip
    return page


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


def describe(found: Sequence[Any], when: str, versions: Mapping[str, str], machine: str) -> dict[str, str]:
    """Return the facts on top of a page, from what was found.

    Args:
        found: What `find_all` returned.
        when: When the page is made.
        versions: Versions of the packages, if the results do not say.
        machine: This machine, if the results do not say.
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
    known = next((content["versions"] for content in contents if content.get("versions")), versions)
    seeds = sorted(
        {len(runs) for one in flat if one.kind in ("comparison", "stream") for runs in one.content["runs"].values()}
    )
    seeds = [number for number in seeds if number]
    facts = {"What": ", ".join(dict.fromkeys(_what(one) for one in found)), "Data": _data(flat) or "none"}
    if started:
        facts["When"] = " to ".join(dict.fromkeys([started[0], started[-1]])) + " UTC"
    facts["Machine"] = "; ".join(cpus) or machine
    if devices:
        facts["Trained on"] = ", ".join(devices)
    if seeds:
        low, high = seeds[0], seeds[-1]
        facts["Seeds"] = f"{low} of each" if low == high else f"{low} to {high} of each"
    facts["Versions"] = ", ".join(f"{name} {number}" for name, number in known.items())
    facts["Page made"] = when
    return facts


def _what(one: Any) -> str:
    if one.kind == "experiment":
        return f"experiment {one.content['name']} ({one.content['size']})"
    if one.kind == "bench":
        return f"bench {one.content['suite']}"
    return f"{one.kind} {one.path.parent.name if one.path.is_file() else one.path.name}"


def _data(flat: Sequence[Any]) -> str:
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
    for data in options:
        if data.get("root"):
            texts[f"RecFlow layout in {data['root']}"] = None
        else:
            world = data.get("world") or {}
            size = f"{world.get('users')} users, {world.get('items')} items, {world.get('days')} days"
            texts[f"a simulated world: {size} of {world.get('requests')} requests (seed {world.get('seed')})"] = None
    return "; ".join(texts)
