"""Bar and line plots. The same numbers give the same SVG bytes, and a loss always has the same colour.

matplotlib (the extra `plot`) is imported when a plot is drawn. Text in an SVG stays text, so it can be searched and
needs no font file. The layout is measured with matplotlib's own font, which is wider than the usual replacements.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any, TypeAlias
from zlib import crc32

from recsys_topk import losses
from recsys_topk.text import cell

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Series: TypeAlias = Mapping[str, Sequence[tuple[Any, float]]]
Bands: TypeAlias = Mapping[str, Sequence[Sequence[float]]]

# Colours that differ under common colour blindness and in lightness. The most common losses have a fixed colour.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#332288", "#882255", "#555555", "#999933")
NAMED = ("dftopk", "lapsum", "neuralsort", "softsort", "diffsort", "sparse", "listnet", "lambdaloss", "bce", "sigmoid")
OTHERS = (
    "#117733", "#661100", "#44aa99", "#aa4499", "#6699cc", "#8c6d31", "#000000", "#e7298a", "#7570b3", "#66a61e",
    "#a6761d", "#1b9e77", "#7f3c8d", "#d95f02", "#3969ac", "#80ba5a",
)  # fmt: skip
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p", "h")
WIDTH = 7.2  # inches


def colour(label: str) -> str:
    """Return the colour of a loss; `label` is its name, or starts with it ("dftopk tau 500").

    Example:
        >>> colour("dftopk tau 500") == colour("dftopk (paper)") == colour("dftopk")
        True
    """
    first = label.replace(",", " ").replace(":", " ").split()
    name = first[0].lower() if first else ""
    if name in NAMED:
        return PALETTE[NAMED.index(name)]
    known = [one for one in losses.available() if one not in NAMED]
    return OTHERS[(known.index(name) if name in known else crc32(name.encode())) % len(OTHERS)]


def bars(
    rows: Sequence[Mapping[str, Any]],
    value: str,
    error: str | None = None,
    title: str = "",
    reference: Mapping[str, float] | None = None,
    xlabel: str = "",
) -> Figure:
    """Return a plot of horizontal bars, one per row, in the given order.

    A row is labelled by its ``run`` and has no bar if its `value` is None. `error` is the key of half the length of the
    error bar, and `reference` has vertical lines by name.

    Example:
        >>> svg(bars([{"run": "dftopk", "recall": 0.5}], "recall"))[:4]
        '<svg'
    """
    if not rows:
        raise ValueError("nothing to draw: bars needs at least one row")
    with _style():
        axes = _axes(1.1 + 0.32 * len(rows) + (0.5 if reference else 0.0), title)
        names = [str(row["run"]) for row in rows]
        lengths = [0.0 if row.get(value) is None else float(row[value]) for row in rows]
        errors = [float(row.get(error or "") or 0.0) for row in rows]
        colours = [row.get("colour") or colour(name) for row, name in zip(rows, names, strict=True)]
        drawn = axes.barh(range(len(rows)), lengths, height=0.7, xerr=errors, color=colours, tick_label=names)
        shown = [cell(row.get(value)) for row in rows]
        for number, (bar, name, text, half) in enumerate(zip(drawn, names, shown, errors, strict=True)):
            _hover(bar, number, [f"{name}: {text}" + (f" ± {cell(half)}" if half else "")])
        axes.bar_label(
            drawn, shown, padding=4, fontsize=10, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8}
        )
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(xlabel or value)
        axes.margins(x=0.1)
        if reference:
            axes.set_title(title, loc="left", pad=56)  # room for the names of the lines
        for name, at in (reference or {}).items():
            axes.axvline(at, color="#222222", linewidth=1.0, linestyle=(0, (4, 3)))
            axes.annotate(
                f"{name} {cell(at)}", (at, 1.0), (2, 3), xycoords=axes.get_xaxis_transform(),
                textcoords="offset points", rotation=25, fontsize=10, ha="left", va="bottom",
            )  # fmt: skip
        return axes.figure  # type: ignore[return-value]


def lines(
    series: Series,
    xlabel: str = "",
    ylabel: str = "",
    title: str = "",
    logx: bool = False,
    logy: bool = False,
    bands: Bands | None = None,
    dashed: Sequence[str] | None = None,
) -> Figure:
    """Return a plot of lines with markers, from the points (x, y) of each line by label.

    x is a number or a string. Dates (YYYY-MM-DD) are in calendar order, other strings in the order of their first
    occurrence. `bands` has lower and upper bounds around lines, `dashed` the labels of dashed lines.

    Example:
        >>> svg(lines({"dftopk": [("2024-01-14", 0.3), ("2024-01-15", 0.4)]}, ylabel="joint recall"))[:4]
        '<svg'
    """
    if not any(series.values()):
        raise ValueError("nothing to draw: lines needs at least one point")
    places, logs = _places(series), {"x": logx, "y": logy}
    used: dict[str, int] = {}
    with _style():
        axes = _axes(3.6, title)
        for number, (label, points) in enumerate(series.items()):
            x = [places[at] if places else at for at, _ in points]
            y = [value for _, value in points]
            for axis, numbers in (("x", x), ("y", y)):
                if logs[axis] and min(numbers, default=1.0) <= 0:
                    raise ValueError(f"log{axis} needs positive numbers; {label!r} has {axis} = {min(numbers):g}")
            shade = colour(label)
            marker = MARKERS[used.setdefault(shade, 0) % len(MARKERS)]
            used[shade] += 1
            is_dashed = label in (dashed or ())
            (line,) = axes.plot(
                x, y, color=shade, label=label, linewidth=1.8, marker=marker, markersize=5.5,
                linestyle="--" if is_dashed else "-", markerfacecolor="white" if is_dashed else shade,
            )  # fmt: skip
            _hover(line, number, [f"{label}: {cell(value)} at {at}" for at, value in points])
            if bands and label in bands:
                low, high = bands[label]
                axes.fill_between(x, list(low), list(high), color=shade, alpha=0.18, linewidth=0)
        axes.set(xlabel=xlabel, ylabel=ylabel, **{f"{axis}scale": "log" for axis, log in logs.items() if log})
        if places:
            shown = list(places)[:: -(-len(places) // 14)]  # at most 14 dates fit
            slanted = sum(map(len, shown)) > 60
            style: dict[str, Any] = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if slanted else {}
            axes.set_xticks([places[text] for text in shown], shown, **style)
        # The legend is below the plot. Next to the plot it would make plot and text smaller.
        columns = 2 if max(map(len, series)) > 22 else 3
        axes.legend(
            loc="upper left", bbox_to_anchor=(0.0, -0.2 if not places else -0.26), ncols=columns, borderaxespad=0.0
        )
        return axes.figure  # type: ignore[return-value]


def front(
    points: Sequence[tuple[float, float, str, bool]], now: int | None, xlabel: str, ylabel: str, title: str = ""
) -> Figure:
    """Return a plot of points with their Pareto front as a line, and labels on the front.

    A point is x (positive), y, label and whether it is on the front; x ascends. `now` is the number of the current
    point.

    Example:
        >>> svg(front([(1.0, 0.2, "20 -> 10", True), (2.0, 0.1, "30 -> 10", False)], 1, "us", "recall"))[:4]
        '<svg'
    """
    if not points:
        raise ValueError("nothing to draw: front needs at least one point")
    best = [point for point in points if point[3]]
    others = [point for point in points if not point[3]]
    with _style():
        axes = _axes(4.2, title)
        for number, (label, some, line_style, shade) in enumerate(
            (("other quotas", others, "", "#9a9a9a"), ("Pareto front", best, "-", PALETTE[0]))
        ):
            if some:
                (line,) = axes.plot(
                    [p[0] for p in some], [p[1] for p in some],
                    color=shade, label=label, linewidth=1.8, linestyle=line_style, marker="o", markersize=5.0,
                )  # fmt: skip
                _hover(line, number, [f"{p[2]}: {cell(p[1])} at {p[0]:.0f}" for p in some])
        if now is not None:
            x, y, text, _ = points[now]
            axes.plot([x], [y], "D", color="#222222", markersize=8, markerfacecolor="none", label=f"now: {text}")
        for place in range(0, len(best), -(-len(best) // 6)):  # at most 6 labels fit
            x, y, text, _ = best[place]
            late = 2 * place >= len(best)  # the labels of the right half stand to the left, inside of the plot
            offset, ha, va = ((-4, 5), "right", "bottom") if late else ((4, -5), "left", "top")
            axes.annotate(text, (x, y), offset, textcoords="offset points", fontsize=9, ha=ha, va=va)
        axes.set(xlabel=xlabel, ylabel=ylabel, xscale="log" if points[-1][0] > 20 * points[0][0] else "linear")
        axes.margins(x=0.12, y=0.1)
        axes.legend(loc="upper left", bbox_to_anchor=(0.0, -0.18), ncols=3, borderaxespad=0.0)
        return axes.figure  # type: ignore[return-value]


def svg(figure: Figure) -> str:
    """Return a figure as SVG text, for a file or an HTML page. The same figure gives the same text."""
    text = _saved(figure, "svg", dict.fromkeys(("Creator", "Date", "Format", "Type"))).decode()
    for gid, words in getattr(figure, "hover_texts", {}).items():
        text = _with_titles(text, gid, words)
    title = escape(figure.axes[0].get_title(loc="left"))
    return text[text.index("<svg") :].replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)


def _hover(artist: Artist, number: int, words: Sequence[str]) -> None:
    """Set the hover texts of an artist: one for a bar, or one for each point of a line."""
    gid = f"mark-{number}"
    artist.set_gid(gid)
    figure: Any = artist.figure
    figure.hover_texts = {**getattr(figure, "hover_texts", {}), gid: list(words)}


def _with_titles(text: str, gid: str, words: Sequence[str]) -> str:
    """Return an SVG with a title element in each mark of a group. Browsers show it on hover, without a script."""
    start = text.index(f'<g id="{gid}">')
    end = text.find('<g id="', start + 1)
    group = text[start:end]
    left = iter(words)
    if "<use " in group:  # the points of a line

        def titled(match: re.Match[str]) -> str:
            return f"{match[1]}><title>{escape(next(left, ''))}</title></use>"

        group = re.sub(r"(<use [^>]*?)/>", titled, group)
    else:
        group = group.replace(">", f"><title>{escape(next(left))}</title>", 1)
    return text[:start] + group + text[end:]


def png(figure: Figure, dpi: int = 150) -> bytes:
    """Return a figure as PNG, where SVG is not supported."""
    return _saved(figure, "png", {"Software": None}, dpi=dpi)


def _saved(figure: Figure, format: str, metadata: Mapping[str, None], **options: Any) -> bytes:
    buffer = io.BytesIO()
    with _style():
        figure.savefig(buffer, format=format, bbox_inches="tight", pad_inches=0.08, metadata=metadata, **options)
    return buffer.getvalue()


@contextmanager
def _style() -> Iterator[None]:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'recsys-topk[plot]'", name="matplotlib") from error
    with resources.as_file(resources.files("recsys_topk.reports") / "plots.mplstyle") as path:
        style = matplotlib.rc_params_from_file(path, use_default_template=True)
    with matplotlib.rc_context({**style, "backend": matplotlib.rcParams["backend"]}):
        yield


def _axes(height: float, title: str) -> Axes:
    from matplotlib.figure import Figure

    axes: Axes = Figure(figsize=(WIDTH, height), facecolor="white").add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_title(title, loc="left")
    return axes


def _places(series: Series) -> dict[str, int]:
    """Return the position on the axis of each x that is a string; empty if all x are numbers."""
    texts = list(dict.fromkeys(x for points in series.values() for x, _ in points if isinstance(x, str)))
    if all(re.fullmatch(r"\d{4}-\d\d-\d\d", text) for text in texts):
        texts.sort()
    return {text: place for place, text in enumerate(texts)}
