"""The sections of a report: plots, tables and verdicts, with the figures of the paper."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from recsys_topk.reports import plots, verdicts
from recsys_topk.reports.overview import command_of, described, logged_values
from recsys_topk.reports.paper import paper_curves, paper_figures
from recsys_topk.reports.results import Result, naming
from recsys_topk.reports.tables import ResultTable, heading, short_name
from recsys_topk.runs.statistics import Runs, bands, curves, means, metric_names, spread, summarise

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows: TypeAlias = Sequence[Mapping[str, Any]]
GREY = "#b4b4b4"
NOT_COMPARABLE = (
    "The values of the paper are for RecFlow, the values here for simulated data: compare orders and shapes, not "
    "values."
)
# By suite; older results have a suite of their own (paper) for the times with a model.
TIMED = {"operators": "Operator alone", "losses": "With a model", "paper": "With a model, as in the paper"}
# DiffSort in the paper uses the odd-even network.
OPERATOR_NAMES = {"diffsort-odd-even": "diffsort", "diffsort": "diffsort bitonic"}


@dataclass
class Section:
    """One section of a report."""

    title: str
    question: str = ""  # the question of an experiment; empty for other results
    verdict: list[str] = field(default_factory=list)  # conclusions from the numbers, one sentence each
    figures: list[tuple[Figure, str]] = field(default_factory=list)  # plots with their captions
    tables: list[ResultTable] = field(default_factory=list)
    protocol: dict[str, str] = field(default_factory=dict)  # protocol of the paper and protocol here, by heading
    differences: list[str] = field(default_factory=list)  # differences between the two protocols
    commands: list[str] = field(default_factory=list)  # the commands that produced the results
    missing: list[str] = field(default_factory=list)  # missing parts of the results
    folded: bool = False  # whether the section is collapsed by default
    details: dict[str, str] = field(default_factory=dict)  # long texts by heading, collapsed by default


def section_of(result: Result) -> Section:
    """Return the section of a result."""
    record = result.content if result.kind == "experiment" else {}
    section = Section(result.name, missing=list(result.missing), folded=result.kind == "fit")
    if record:
        about = record["about"]
        section.title, section.question, section.differences = about["title"], about["question"], about["differences"]
        section.protocol = {"Paper": about["protocol"], "Finding of the paper": about["found"], "Here": about["ours"]}
        section.commands = [f"recsys-topk {shlex.join(step['command'])}" for step in record["steps"]]
    elif "command" in result.content:
        section.commands = [shlex.join(result.content["command"])]
    for part in result.parts if record else (result,):
        with naming(part.path / "config.yaml" if part.kind == "fit" else part.path):
            BUILDERS[part.kind](section, part, record)
    return section


def comparison(section: Section, result: Result, record: Mapping[str, Any]) -> None:
    """Add a comparison to a section: bars, or lines if variants have several x values, a table and a verdict.

    The record of an experiment, which may be empty, has the points and the reference rankers.
    """
    by_label = result.content["runs"]
    shown = {label: with_settings(label, seeds) for label, seeds in by_label.items()}
    runs = {shown[label]: seeds for label, seeds in by_label.items()}
    rows, names = summarise(runs), metric_names(runs)
    joint, *alone = map(heading, names)
    about, points, reference = (record.get(key) or {} for key in ("about", "points", "reference"))
    if about:
        about = {**about, "subject": shown.get(about["subject"], about["subject"])}
    points = {shown.get(label, label): point for label, point in points.items()}
    kinds = ["joint", *(kind for name in names[1:] for kind in ("retrieval", "ranking") if kind in name)]
    papers = {kind: paper_curves(about["figures"], kind) for kind in kinds} if about.get("figures") else {}
    papers = {kind: {shown.get(name, name): line for name, line in lines.items()} for kind, lines in papers.items()}
    theirs = papers.get("joint", {})
    at = {row["run"]: points.get(row["run"]) or (row["run"], 0.0) for row in rows}
    by_joint = sorted(rows, key=lambda row: -row["joint"])
    if points:
        figure, caption = _curves(section, rows, at, about, theirs)
    else:
        at_zero = {name: line[0.0] for name, line in theirs.items() if 0.0 in line}
        figure, caption = _bars(section, rows, about, at_zero, reference)
    simulated = theirs and not any("--data.root" in step["command"] for step in record["steps"])
    section.figures.append((figure, f"{caption} {NOT_COMPARABLE if simulated else ''}".strip()))
    body = []
    for row in rows if points else by_joint:
        name, x = at[row["run"]]
        cells = {"run": name, **({about["xlabel"]: x} if points else {}), joint: row["joint"], "±": row["+-"]}
        cells |= {"p": row["p"], **dict(zip(alone, row["alone"].values(), strict=True))}
        cells |= {f"paper, {kind}": lines.get(name, {}).get(x) for kind, lines in papers.items()}
        body.append({**cells, "seconds": row["seconds"], "seeds": row["seeds"]})
    for name, recalls in reference.items():
        body.append({"run": name, **dict(zip((joint, *alone), recalls.values(), strict=False))})
    caption = f"Means over seeds; ± is the standard deviation, p is from a paired t-test against {rows[0]['run']}."
    if reference:
        caption += " Random, popularity and oracle are not trained; the oracle knows the true utility."
    in_table = {name for name, _ in at.values()}
    faulty = {shown.get(name, name): why for name, why in paper_figures()["faulty"].items()}
    notes = [f"The paper's {name}: {why}." for name, why in faulty.items() if name in theirs and name in in_table]
    several = len({name for name, _ in at.values()}) > 1
    if points and several:
        section.tables.append(pivoted(rows, at, theirs, about["xlabel"]))
    section.tables.append(
        ResultTable(caption, body, notes, {"p": 3, about.get("xlabel") or "": None}, folded=bool(points and several))
    )
    if "popularity" in reference:
        level = reference["popularity"]["joint"]
        below = [row["run"] for row in rows if row["joint"] <= level]
        text = f"Ranking by popularity gives {level:.3f}; {len(rows) - len(below)} of {len(rows)} runs are above it"
        section.verdict.append(f"{text} (not above: {'; '.join(below)})." if below else f"{text}.")


def with_settings(label: str, runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the label of a variant with the temperature of its loss, unless the label already contains it.

    Example:
        >>> run = {"given": {"loss": {"class_path": "dftopk", "init_args": {"tau": 500.0}}}}
        >>> with_settings("dftopk", [run]), with_settings("dftopk tau 500", [run])
        ('dftopk (tau 500)', 'dftopk tau 500')
    """
    given = runs[0].get("given") or {} if runs else {}
    loss = given.get("loss") or (given.get("model") or {}).get("loss") or {}
    tau = (loss.get("init_args") or {}).get("tau") if isinstance(loss, Mapping) else None
    return label if tau is None or "tau" in label.split() else f"{label} (tau {float(tau):g})"


def pivoted(
    rows: Rows, at: Mapping[str, tuple[str, float]], paper: Mapping[str, Mapping[float, float]], what: str
) -> ResultTable:
    """Return a table of the joint recall with one row per variant and one column per x (`what`).

    `at` has the variant and x of each run. The values of the paper, by variant and x, are below ours.
    """
    by_name: dict[str, dict[float, float]] = {}
    for row in rows:
        name, x = at[row["run"]]
        by_name.setdefault(name, {})[x] = row["joint"]
    columns = sorted({x for line in by_name.values() for x in line})
    body = []
    for name, line in sorted(by_name.items(), key=lambda pair: -max(pair[1].values())):
        for label, values in ((name, line), (f"{name} (paper)", paper.get(name, {}))):
            if values:
                body.append({"run": label, **{f"{x:g}": values.get(x) for x in columns}})
    return ResultTable(f"Joint recall by {what}, mean over seeds.", body)


def _bars(
    section: Section, rows: Rows, about: Mapping[str, Any], paper: Mapping[str, float], reference: Mapping[str, Any]
) -> tuple[Figure, str]:
    """Return a bar plot of the joint recall, with the paper's bars below ours, and its caption. Add the verdict."""
    drawn: list[Mapping[str, Any]] = []
    for row in sorted(rows, key=lambda row: -row["joint"]):
        drawn.append(row)
        if row["run"] in paper:
            drawn.append({"run": f"{row['run']} (paper)", "joint": paper[row["run"]], "colour": GREY})
    joint = {row["run"]: row["joint"] for row in rows}
    if about:
        sound = {name: value for name, value in paper.items() if name not in paper_figures()["faulty"]}
        section.verdict += verdicts.verdict(joint, sound, about["subject"], "joint recall")
    else:
        section.verdict += _best(joint)
    marks = {name: recalls["joint"] for name, recalls in reference.items()}
    xlabel = "joint recall, mean over seeds, standard deviation"
    figure = plots.bars(drawn, "joint", "+-", title="Joint recall", reference=marks, xlabel=xlabel)
    return figure, "Grey: the paper." if paper else ""


def _curves(
    section: Section, rows: Rows, at: Mapping[str, tuple[str, float]], about: Mapping[str, Any], paper: verdicts.Curves
) -> tuple[Figure, str]:
    """Return a plot of the joint recall over x, one line per variant, and its caption. Add the verdict."""
    what, subject = about["xlabel"], about["subject"]
    ours: dict[str, dict[float, float]] = {}
    spreads: dict[str, dict[float, float | None]] = {}
    for row in sorted(rows, key=lambda row: at[row["run"]][1]):
        name, x = at[row["run"]]
        ours.setdefault(name, {})[x] = row["joint"]
        spreads.setdefault(name, {})[x] = row["+-"]
    section.verdict += verdicts.curve_verdict(ours, paper, subject, what)
    figure = _lines(
        ours, paper, xlabel=what, ylabel="joint recall", title=f"Joint recall by {what}", logx=bool(about["logx"]),
        bands=bands(ours, spreads),
    )  # fmt: skip
    return figure, "Solid: here, mean and standard deviation over seeds. Dashed: the paper."


def _lines(ours: Mapping[str, Mapping[Any, float]], paper: verdicts.Curves, **options: Any) -> Figure:
    """Return a line plot. Lines of the paper with the same names are dashed."""
    dashed = {f"{name} (paper)": line for name, line in paper.items() if name in ours}
    series = {name: list(line.items()) for name, line in {**ours, **dashed}.items()}
    return plots.lines(series, **{"dashed": list(dashed), **options})


def _best(joint: Mapping[str, float]) -> list[str]:
    best = max(joint, key=lambda name: joint[name])
    return (
        [f"The best of {len(joint)} runs is {best} with a joint recall of {joint[best]:.3f}."] if len(joint) > 1 else []
    )


def stream(section: Section, result: Result, record: Mapping[str, Any]) -> None:
    """Add the joint recall by day to a section, one line per variant."""
    runs = result.content["runs"]
    by_day = means(curves(runs))
    if not by_day:
        section.missing.append("no day has been tested yet")
        return
    metric = next(name for seeds in runs.values() for run in seeds for day in run["days"] for name in day["metrics"])
    caption = "Each day is tested with the model trained on the days before it; mean and standard deviation over seeds."
    section.figures += [(figure, caption) for figure in stream_figures(runs).values()]
    days = sorted({day for line in by_day.values() for day in line})
    mean = {label: statistics.fmean(line.values()) for label, line in by_day.items()}
    body = []
    for label in sorted(mean, key=lambda label: -mean[label]):
        each = [statistics.fmean(day["metrics"][metric] for day in run["days"]) for run in runs[label] if run["days"]]
        by_name = {day: by_day[label].get(day) for day in days}
        body.append({"run": label, "mean": statistics.fmean(each), "±": spread(each), **by_name, "seeds": len(each)})
    caption = f"{short_name(metric)} recall by day; mean over days, ± its standard deviation over seeds."
    section.tables.append(ResultTable(caption, body))
    what = f"mean joint recall over {len(days)} days"
    section.verdict += verdicts.verdict(mean, {}, record["about"]["subject"], what) if record else _best(mean)


def stream_figures(runs: Runs) -> dict[str, Figure]:
    """Return the plot of the joint recall by day, by its file name; empty if no day was tested."""
    by_seed = curves(runs)
    by_day = means(by_seed)
    around = bands(by_day, {label: {day: spread(v) for day, v in line.items()} for label, line in by_seed.items()})
    entry = next((day for seeds in runs.values() for run in seeds for day in run["days"]), None)
    if entry is None:
        return {}
    ylabel = f"{next(iter(entry['metrics'])).replace('_', ' ')}, lists of {entry['candidates']}"
    return {"stream": _lines(by_day, {}, ylabel=ylabel, title="Joint recall by day", bands=around)}


def bench(section: Section, benchmark: Result, record: Mapping[str, Any]) -> None:
    """Add a benchmark to a section: a table, a plot for several shapes, and in an experiment the times of the paper."""
    result, rows = benchmark.content, benchmark.content["rows"]
    if not rows:
        section.missing.append("the benchmark has no rows")
        return
    machine = {key: value for key, value in (result.get("machine") or {}).items() if value is not None}
    how = f"{' '.join(result['notes'])} Machine: {', '.join(f'{key} {value}' for key, value in machine.items())}."
    if not record:
        digits = dict.fromkeys(key for row in rows for key in row)
        section.tables.append(ResultTable(f"ratio 1 = {result['baseline']}. {how}", rows, digits=digits))
        if len({row.get("shape") for row in rows if row.get("ms")}) > 1:
            section.figures.append((bench_figure(result), "Both axes are logarithmic."))
        return
    what, device, ours = TIMED[result["suite"]], rows[0].get("device", "cpu"), _milliseconds(result)
    paper = paper_curves("runtime", device) if result["suite"] != "operators" else {}
    figure = _lines(ours, paper, xlabel="items in the list", ylabel="ms", logx=True, logy=True, title=what)
    note = f"One list, k = N / 2, forward and backward, {device}."
    section.figures.append((figure, f"{note} Dashed: the paper, on a different machine." if paper else note))
    body = [
        {"run": name, "timed": timed, **{f"N = {n:g}": ms for n, ms in sorted(line.items())}}
        for timed, lines in {what: ours, f"Paper, {device}": paper}.items()
        for name, line in lines.items()
    ]
    caption = f"Milliseconds per pass, {device}. The paper used a different machine and different implementations."
    section.tables.append(ResultTable(caption, body, digits=dict.fromkeys(key for row in body for key in row)))
    section.details[f"How {what.lower()} was timed"] = how
    longest = max(n for line in ours.values() for n in line)
    here, there = ({name: line[longest] for name, line in lines.items() if longest in line} for lines in (ours, paper))
    milliseconds = f"milliseconds for N = {longest:g} ({what.lower()})"
    section.verdict += verdicts.verdict(here, there, record["about"]["subject"], milliseconds, smallest_first=True)
    if paper and machine.get("load", 0.0) > 1.5:
        busy = f"The machine was busy (load {machine['load']:g} on {machine['cores']} cores)"
        section.verdict.append(f"{busy}: compare ratios, not values.")


def bench_figure(result: Mapping[str, Any]) -> Figure:
    """Return a plot of milliseconds over the number of scores, one line per name, for a benchmark with shapes."""
    plain = {"plain cross-entropy": next(iter(_milliseconds(result, "baseline ms").values()))}
    return _lines(
        {**_milliseconds(result), **plain}, {}, xlabel="lists x items", ylabel="ms", logx=True, logy=True,
        title=f"bench {result['suite']}", dashed=list(plain),
    )  # fmt: skip


def _milliseconds(result: Mapping[str, Any], column: str = "ms") -> dict[str, dict[float, float]]:
    """Return a column of a benchmark by name and number of scores."""
    by_name: dict[str, dict[float, float]] = {}
    names = OPERATOR_NAMES if result["suite"] != "paper" else {}
    for row in sorted(result["rows"], key=lambda row: _scores(row)):
        by_name.setdefault(names.get(row["name"], row["name"]), {})[_scores(row)] = row[column]
    return by_name


def _scores(row: Mapping[str, Any]) -> int:
    lists, items, _ = map(int, row["shape"].split("x"))
    return lists * items


def fit(section: Section, result: Result, record: Mapping[str, Any]) -> None:
    """Add the metrics of a single run to a section: the last value of each, and plots over steps."""
    logged = logged_values(result.path)
    if not logged:
        section.missing.append("metrics.csv has no values yet")
    rows = [
        {"metric": name, "last": [*line.values()][-1], "largest": max(line.values()), "values": len(line)}
        for name, line in logged.items()
    ]
    section.tables.append(ResultTable("Logged metrics of the run.", rows))
    for title, start in (("Loss", "train/loss"), ("Validation", "val/")):
        chosen = {n.partition("/")[2]: line for n, line in logged.items() if n.startswith(start) and len(line) > 1}
        if chosen:
            section.figures.append((_lines(chosen, {}, xlabel="step", title=title), f"{title} by step."))
    config, about = result.content["config"] or {}, described(result.content["config"] or {})
    section.question = f"{about['loss'] or 'a run'}, {about['data']}, seed {config.get('seed_everything')}"
    section.commands = [command_of(result)]
    if config.get("ckpt_path"):  # a run of `test` or `validate`
        section.title = f"{section.commands[0].split()[1]}: {result.path.name}"
    section.details["config.yaml"] = result.content["text"]


BUILDERS: dict[str, Callable[[Section, Result, Mapping[str, Any]], None]] = {
    "comparison": comparison, "stream": stream, "bench": bench, "fit": fit
}  # fmt: skip
