"""From results to the sections of a report: plots, tables and verdicts, beside the paper's figures."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from recsys_topk.reports import plots, verdicts
from recsys_topk.reports.paper import paper_figures
from recsys_topk.reports.results import Found
from recsys_topk.reports.tables import Table, heading, short_name
from recsys_topk.runs.metrics_file import read_rows
from recsys_topk.runs.statistics import Runs, bands, curves, means, metric_names, spread, summarise

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GREY = "#b4b4b4"
PAPER = " (paper)"
NOT_COMPARABLE = (
    "The paper's values are of RecFlow and ours of a simulated world: compare orders and shapes, not values."
)
WITH_MODEL = "With a model, as in the paper"
# What the paper calls DiffSort is its odd-even network.
OPERATOR_NAMES = {"diffsort-odd-even": "diffsort", "diffsort": "diffsort bitonic"}


@dataclass
class Section:
    """One section of a report.

    Attributes:
        title: Heading.
        question: What it asks; empty for results that are no experiment.
        verdict: What the numbers say, a sentence each.
        figures: Plots, each with the sentence below it.
        tables: Tables.
        protocol: How the paper and how we did it, by heading.
        differences: In what our protocol differs from the paper's.
        commands: The commands that made it.
        missing: What should be there and is not.
        details: Long text by heading, folded away.
    """

    title: str
    question: str = ""
    verdict: list[str] = field(default_factory=list)
    figures: list[tuple[Figure, str]] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    protocol: dict[str, str] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    details: dict[str, str] = field(default_factory=dict)


def section_of(found: Found) -> Section:
    """Return the section of one thing that was found."""
    if found.kind == "experiment":
        return _experiment(found)
    section = Section(f"{found.kind}: {found.path.parent.name if found.path.is_file() else found.path.name}")
    section.missing += found.missing
    if found.kind == "bench":
        section.title = f"bench {found.content['suite']}: {found.path.name}"
    _fill(section, found)
    command = found.content.get("command")
    if command:
        section.commands.append(shlex.join(command))
    return section


def _fill(section: Section, found: Found) -> None:
    if found.kind == "comparison":
        comparison(section, found.content["runs"])
    elif found.kind == "stream":
        stream(section, found.content["runs"])
    elif found.kind == "bench":
        bench(section, found.content)
    else:
        fit(section, found)


def _experiment(found: Found) -> Section:
    record, about = found.content, found.content["about"]
    section = Section(about["title"], about["question"])
    section.missing += found.missing
    section.protocol = {"The paper": about["protocol"], "It found": about["found"], "Here": about["ours"]}
    section.differences = about["differences"]
    section.commands = [f"recsys-topk {shlex.join(step['command'])}" for step in record["steps"]]
    simulated = record["size"] == "small" and not any("--data.root" in step["command"] for step in record["steps"])
    reference = record.get("reference") or {}
    if about["show"] == "runtime":
        runtime(section, about["subject"], [part.content for part in found.parts])
    for part in found.parts:
        if about["show"] == "table":
            comparison(section, part.content["runs"], about, reference, simulated)
        elif about["show"] == "curve":
            curve(section, part.content["runs"], about, record["points"], reference, simulated)
        elif about["show"] == "stream":
            stream(section, part.content["runs"], about["subject"])
    return section


def comparison(
    section: Section,
    runs: Runs,
    about: Mapping[str, Any] | None = None,
    reference: Mapping[str, Mapping[str, float]] | None = None,
    simulated: bool = False,
) -> None:
    """Add bars, a table and, for an experiment, a verdict beside the paper's figures."""
    rows = summarise(runs)
    rows_by_joint = sorted(rows, key=lambda row: -row["joint"])
    names = metric_names(runs)
    figures = paper_figures()["recall"] if about and about["figures"] == "recall" else {}
    faulty = paper_figures()["faulty"]
    theirs = {kind: {name: line[0] for name, line in figures[kind].items()} for kind in _kinds(names) if figures}
    drawn: list[dict[str, Any]] = []
    for row in rows_by_joint:
        drawn.append(row)
        if figures and row["run"] in theirs["joint"]:
            drawn.append({"run": f"{row['run']}{PAPER}", "joint": theirs["joint"][row["run"]]})
    lines = {name: recalls["joint"] for name, recalls in (reference or {}).items()}
    figure = plots.bars(
        drawn, "joint", "+-", title="Joint recall", reference=lines or None,
        xlabel=f"{short_name(names[0])} recall, mean over seeds, standard deviation",
    )  # fmt: skip
    for patch, row in zip(figure.axes[0].patches, drawn, strict=True):
        if str(row["run"]).endswith(PAPER):
            patch.set_facecolor(GREY)
    note = "Grey: the paper." if figures else ""
    section.figures.append((figure, f"{note} {NOT_COMPARABLE if figures and simulated else ''}".strip()))
    body = [_recalls(row, names, {"p": row["p"]}, theirs, row["run"]) for row in rows_by_joint]
    body = [
        {**cells, "seconds": row["seconds"], "seeds": row["seeds"]}
        for cells, row in zip(body, rows_by_joint, strict=True)
    ]
    for name, recalls in (reference or {}).items():
        body.append({"run": name, **dict(zip(map(heading, names), recalls.values(), strict=False))})
    caption = f"Means over seeds; ± is the standard deviation, p a paired t-test against {rows[0]['run']}."
    if reference:
        caption += " Random, popularity and oracle rank without learning; the oracle knows the true utility."
    notes = [f"The paper's {name}: {why}." for name, why in faulty.items() if figures and name in theirs["joint"]]
    section.tables.append(Table(caption, body, notes, {"p": 3}))
    if about is not None:
        paper = theirs.get("joint", {})
        section.verdict += verdicts.table_verdict(rows, about["subject"], paper, list(faulty))
        section.verdict += _learned(rows, reference or {})
    elif len(rows) > 1:
        best = rows_by_joint[0]
        section.verdict.append(f"Best of {len(rows)} is {best['run']} with a joint recall of {best['joint']:.3f}.")


def _learned(rows: Sequence[Mapping[str, Any]], reference: Mapping[str, Mapping[str, float]]) -> list[str]:
    if "popularity" not in reference:
        return []
    level = reference["popularity"]["joint"]
    below = [str(row["run"]) for row in rows if row["joint"] <= level]
    text = f"Ranking by popularity gives {level:.3f}; {len(rows) - len(below)} of {len(rows)} runs are above it"
    return [f"{text} (not: {', '.join(below)})." if below else f"{text}."]


def curve(
    section: Section,
    runs: Runs,
    about: Mapping[str, Any],
    points: Mapping[str, Sequence[Any]],
    reference: Mapping[str, Mapping[str, float]],
    simulated: bool,
) -> None:
    """Add joint recall over x, one line a competitor, with the paper's lines dashed."""
    names = metric_names(runs)
    what = str(about["xlabel"])
    rows = {(points[row["run"]][0], float(points[row["run"]][1])): row for row in summarise(runs)}
    competitors = list(dict.fromkeys(name for name, _ in rows))
    ours = {c: {x: row["joint"] for (name, x), row in sorted(rows.items()) if name == c} for c in competitors}
    theirs = _paper_curves(about, "joint")
    theirs = {name: line for name, line in theirs.items() if name in ours}
    series: dict[str, list[tuple[Any, float]]] = {name: list(line.items()) for name, line in ours.items()}
    around = bands(ours, {name: {x: rows[name, x]["+-"] for x in line} for name, line in ours.items()})
    dashed = {f"{name}{PAPER}": list(line.items()) for name, line in theirs.items()}
    log = bool(about["logx"])
    joint = short_name(names[0])
    figure = plots.lines(
        {**series, **dashed}, xlabel=what, ylabel=f"{joint} recall", title=f"Joint recall by {what}", logx=log,
        bands=around, dashed=list(dashed),
    )  # fmt: skip
    caption = "Solid: here, mean and standard deviation over seeds. Dashed: the paper. "
    section.figures.append((figure, caption + (NOT_COMPARABLE if simulated else "")))
    papers = {kind: _paper_curves(about, kind) for kind in _kinds(names)}
    body = []
    for (name, x), row in rows.items():
        beside = {kind: known.get(name, {}) for kind, known in papers.items()}
        cells = _recalls({**row, "run": name}, names, {}, beside, x)
        body.append({"run": name, what: x, **cells, "seeds": row["seeds"]})
    caption = "Means over seeds; ± is the standard deviation of the joint recall."
    section.tables.append(Table(caption, body, digits={what: None}))
    if len(ours) == 1:
        ((name, line),) = ours.items()
        section.verdict += verdicts.peak_verdict(line, theirs.get(name, {}), name, what)
    else:
        section.verdict += verdicts.growth_verdict(ours, theirs, about["subject"], what)
    if "popularity" in reference:
        level = reference["popularity"]["joint"]
        below = sum(row["joint"] <= level for row in rows.values())
        section.verdict.append(
            f"Ranking by popularity gives {level:.3f}; {below} of {len(rows)} settings do not get above it."
        )


def _recalls(
    row: Mapping[str, Any],
    names: Sequence[str],
    more: Mapping[str, Any],
    paper: Mapping[str, Mapping[Any, Any]],
    at: Any,
) -> dict[str, Any]:
    """Return the cells of a competitor: its recalls, and those of the paper beside them."""
    joint, *alone = map(heading, names)
    ours = {"run": row["run"], joint: row["joint"], "±": row["+-"], **more}
    ours |= dict(zip(alone, row["alone"].values(), strict=True))
    return {**ours, **{f"paper, {kind}": known.get(at) for kind, known in paper.items()}}


def _paper_curves(about: Mapping[str, Any], kind: str) -> dict[str, dict[float, float]]:
    """Return the paper's curves of one kind of recall, by competitor and x."""
    figures = paper_figures()
    if about["figures"] == "tau":
        x = map(float, figures["tau"]["tau"])
        return {about["subject"]: dict(zip(x, figures["tau"][kind], strict=True))}
    if about["figures"] != "recall":
        return {}
    negatives = [float(x) for x in figures["recall"]["negatives"]]
    return {name: dict(zip(negatives, line, strict=False)) for name, line in figures["recall"][kind].items()}


def _kinds(names: Sequence[str]) -> list[str]:
    """Return which kinds of recall of the paper stand beside metrics: joint, then stages that it has too."""
    return ["joint", *(kind for name in names[1:] for kind in ("retrieval", "ranking") if kind in name)]


def stream(section: Section, runs: Runs, subject: str | None = None) -> None:
    """Add joint recall by day, one line a competitor."""
    found = curves(runs)
    if not found:
        section.missing.append("no day has been tested yet")
        return
    by_day = means(found)
    metric = next(iter(next(day for found in runs.values() for run in found for day in run["days"])["metrics"]))
    around = bands(by_day, {label: {day: spread(v) for day, v in line.items()} for label, line in found.items()})
    figure = plots.lines(
        {label: list(line.items()) for label, line in by_day.items()},
        ylabel=f"{short_name(metric)} recall", title="Joint recall by day", bands=around,
    )  # fmt: skip
    section.figures.append((figure, "Each day is tested with what was learned before it; mean and standard deviation."))
    days = sorted({day for line in by_day.values() for day in line})
    body = []
    for label, line in sorted(by_day.items(), key=lambda pair: -statistics.fmean(pair[1].values())):
        each = [statistics.fmean(day["metrics"][metric] for day in run["days"]) for run in runs[label] if run["days"]]
        by_name = {day: line.get(day) for day in days}
        body.append({"run": label, "mean": statistics.fmean(each), "±": spread(each), **by_name, "seeds": len(each)})
    caption = f"{short_name(metric)} recall by day; mean over days, ± its standard deviation over seeds."
    section.tables.append(Table(caption, body))
    if subject is not None:
        section.verdict += verdicts.stream_verdict(by_day, subject)
    else:
        mean = {label: statistics.fmean(line.values()) for label, line in by_day.items()}
        best = max(mean, key=lambda label: mean[label])
        section.verdict.append(f"Best of {len(mean)} over {len(days)} days is {best}, {mean[best]:.3f}.")


def runtime(section: Section, subject: str, results: Sequence[Mapping[str, Any]]) -> None:
    """Add milliseconds over the length of a list: the operator alone, and in the paper's protocol beside the paper."""
    here: dict[str, dict[str, dict[float, float]]] = {}
    device, busy = "cpu", ""
    for result in results:
        alone = result["suite"] == "operators"
        what = "Operator alone" if alone else WITH_MODEL
        for row in result["rows"]:
            name = OPERATOR_NAMES.get(row["name"], row["name"]) if alone else row["name"]
            here.setdefault(what, {}).setdefault(name, {})[float(row["shape"].split("x")[1])] = row["ms"]
            device = row.get("device", device)
        section.details[f"How {what.lower()} was timed"] = " ".join(result["notes"]) + " " + _machine(result)
        facts = result.get("machine") or {}
        if not alone and (facts.get("load") or 0.0) > 1.5:
            busy = f"The machine was busy (load {facts['load']:g} on {facts['cores']} cores): read ratios, not values."
    figures = paper_figures()["runtime"]
    lengths = [float(n) for n in figures["items"]]
    paper = {name: dict(zip(lengths, line, strict=True)) for name, line in figures[device].items()}
    for what, lines in here.items():
        series: dict[str, list[tuple[Any, float]]] = {name: sorted(line.items()) for name, line in lines.items()}
        dashed: dict[str, list[tuple[Any, float]]] = {}
        if what == WITH_MODEL:
            dashed = {f"{name}{PAPER}": sorted(line.items()) for name, line in paper.items() if name in lines}
        figure = plots.lines(
            {**series, **dashed}, xlabel="items in the list", ylabel="ms", logx=True, logy=True, dashed=list(dashed),
            title=what,
        )  # fmt: skip
        note = f"One list, k = N / 2, forward and backward, {device}."
        section.figures.append((figure, f"{note} Dashed: the paper, on its own machine." if dashed else note))
    shown = sorted({n for lines in here.values() for line in lines.values() for n in line})
    columns = {n: f"N = {n:g}" for n in shown}
    body = [
        {"run": name, "timed": what, **{column: line.get(n) for n, column in columns.items()}}
        for what, lines in {**here, f"Paper, {device}": paper}.items()
        for name, line in lines.items()
    ]
    caption = f"Milliseconds of one pass, {device}. The paper's are from another machine and other implementations."
    section.tables.append(Table(caption, body, digits=dict.fromkeys(columns.values())))
    section.verdict += verdicts.runtime_verdict(here, {WITH_MODEL: paper}, subject)
    section.verdict += [busy] if busy else []


def bench(section: Section, result: Mapping[str, Any]) -> None:
    """Add the rows of a benchmark, and milliseconds over size where it has shapes."""
    rows = result["rows"]
    if not rows:
        section.missing.append("the benchmark has no rows")
        return
    caption = f"ratio 1 = {result['baseline']}. {' '.join(result['notes'])} {_machine(result)}"
    section.tables.append(Table(caption, rows, digits=dict.fromkeys(key for row in rows for key in row)))
    if len({row.get("shape") for row in rows if row.get("ms")}) > 1:
        section.figures.append((bench_figure(result), "Both axes are logarithmic."))


def bench_figure(result: Mapping[str, Any]) -> Figure:
    """Return milliseconds over the number of scores of a benchmark with shapes, one line a name."""
    series: dict[str, dict[Any, float]] = {}
    for row in result["rows"]:
        lists, items, _ = (int(part) for part in str(row["shape"]).split("x"))
        series.setdefault(str(row["name"]), {})[lists * items] = float(row["ms"])
        series.setdefault("plain cross-entropy", {})[lists * items] = float(row["baseline ms"])
    return plots.lines(
        {name: sorted(line.items()) for name, line in series.items()}, xlabel="lists x items", ylabel="ms", logx=True,
        logy=True, title=f"bench {result['suite']}", dashed=["plain cross-entropy"],
    )  # fmt: skip


def fit(section: Section, found: Found) -> None:
    """Add the metrics of a single run: the last value of each, and how they went."""
    logged: dict[str, list[tuple[Any, float]]] = {}
    for row in read_rows(found.path / "metrics.csv"):
        for name, text in row.items():
            if name not in ("epoch", "step") and text and math.isfinite(float(text)):
                logged.setdefault(name, []).append((int(row["step"]), float(text)))
    if not logged:
        section.missing.append("metrics.csv has no values yet")
    rows = [
        {"metric": name, "last": line[-1][1], "largest": max(y for _, y in line), "values": len(line)}
        for name, line in logged.items()
    ]
    section.tables.append(Table("What the run logged.", rows))
    for title, start in (("Loss", "train/loss"), ("Validation", "val/")):
        chosen = {n.partition("/")[2]: c for n, c in logged.items() if n.startswith(start) and len(c) > 1}
        if chosen:
            section.figures.append((plots.lines(chosen, xlabel="step", title=title), f"{title} by step."))
    config = found.content["config"] or {}
    loss = (config.get("model") or {}).get("loss") or {}
    section.question = (
        f"{loss.get('class_path', 'a run')}".rpartition(".")[2] + f", seed {config.get('seed_everything')}"
    )
    section.commands.append(f"recsys-topk fit --config {shlex.quote(str(found.path / 'config.yaml'))}")
    section.details["config.yaml"] = found.content["text"]


def _machine(result: Mapping[str, Any]) -> str:
    facts = result.get("machine") or {}
    return f"Machine: {', '.join(f'{key} {value}' for key, value in facts.items() if value is not None)}."
