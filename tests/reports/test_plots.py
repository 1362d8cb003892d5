"""Texts and positions in the SVG of plots."""

from __future__ import annotations

import re
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from recsys_topk import losses
from recsys_topk.files import write_whole
from recsys_topk.reports import plots

ROWS = [
    {"run": "dftopk", "joint": 0.5, "spread": 0.02},
    {"run": "listnet", "joint": 0.25, "spread": None},
    {"run": "broken & <odd>", "joint": None, "spread": None},
]
CURVES = {
    "lapsum": [("2024-01-15", 0.3), ("2024-01-16", 0.4)],
    "dftopk": [("2024-01-14", 0.1), ("2024-01-15", 0.2), ("2024-01-16", 0.4)],
}


def bars_svg(*arguments: Any, **options: Any) -> str:
    return plots.svg(plots.bars(*arguments, **options))


def lines_svg(*arguments: Any, **options: Any) -> str:
    return plots.svg(plots.lines(*arguments, **options))


def texts(svg: str) -> list[str]:
    return ["".join(node.itertext()).strip() for node in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def areas_of_colour(svg: str, colour: str) -> list[list[float]]:
    """Return the x coordinates of every area with a colour."""
    paths = ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}path")
    return [
        [float(x) for x in re.findall(r"[ML] ([\d.]+) ", node.get("d", ""))]
        for node in paths
        if f"fill: {colour}" in node.get("style", "")
    ]


def test_bars_have_the_length_and_label_of_their_values() -> None:
    svg = bars_svg(ROWS, "joint", "spread", title="Joint recall", reference={"popularity": 0.26})
    shown = texts(svg)
    assert [text for text in shown if text in {str(row["run"]) for row in ROWS}] == [row["run"] for row in ROWS]
    assert {"Joint recall", "0.5000", "0.2500", "popularity 0.2600"} <= set(shown)
    (first,), (second,) = (areas_of_colour(svg, plots.colour(name)) for name in ("dftopk", "listnet"))
    assert max(first) - min(first) == pytest.approx(2 * (max(second) - min(second)), rel=1e-4)


def test_days_are_in_calendar_order() -> None:
    shown = texts(lines_svg(CURVES, xlabel="day", ylabel="joint recall", title="By day"))
    assert [text for text in shown if text.startswith("2024")] == ["2024-01-14", "2024-01-15", "2024-01-16"]
    assert {"day", "joint recall", "By day", "lapsum", "dftopk"} <= set(shown)
    assert [t for t in texts(lines_svg({"a": [("z", 1), ("b", 2)]})) if t in "zb"] == ["z", "b"]


def test_dashed_lines_and_bands_are_drawn_only_if_given() -> None:
    plain = lines_svg(CURVES)
    special = lines_svg(CURVES, dashed=["dftopk"], bands={"lapsum": ([0.2, 0.3], [0.4, 0.5])})
    assert "stroke-dasharray" not in plain
    assert "stroke-dasharray" in special
    assert "fill-opacity: 0.18" not in plain
    assert "fill-opacity: 0.18" in special


def test_same_numbers_give_the_same_bytes_in_another_process(warm_python: list[str]) -> None:
    code = (
        "from tests.reports.test_plots import CURVES, ROWS, bars_svg, lines_svg;"
        "import sys; sys.stdout.write(bars_svg(ROWS, 'joint', 'spread') + lines_svg(CURVES, logy=True))"
    )
    done = subprocess.run([*warm_python, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == bars_svg(ROWS, "joint", "spread") + lines_svg(CURVES, logy=True)
    assert "<dc:date>" not in done.stdout


def test_loss_has_one_colour_and_named_losses_have_different_colours() -> None:
    assert plots.colour("dftopk tau 500, eps 1e-15") == plots.colour("dftopk")
    assert plots.colour("dftopk, k at quotas") == plots.colour("dftopk (paper)") == plots.colour("dftopk")
    assert len({plots.colour(name) for name in plots.NAMED}) == len(plots.NAMED) == len(plots.PALETTE)
    assert plots.colour("my_own_loss") not in plots.PALETTE
    names = losses.available()
    assert len({plots.colour(name) for name in names}) == min(len(names), len(plots.PALETTE) + len(plots.OTHERS))


def test_png_is_wider_than_600_pixels() -> None:
    content = plots.png(plots.lines(CURVES))
    assert content.startswith(b"\x89PNG")
    assert int.from_bytes(content[16:20], "big") > 600  # width in the header


def test_invalid_input_of_plots_raises() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        bars_svg([], "joint")
    with pytest.raises(ValueError, match="nothing to draw"):
        lines_svg({"a": []})
    with pytest.raises(ValueError, match="logx needs positive numbers; 'a' has x = 0"):
        lines_svg({"a": [(0, 1.0)]}, logx=True)


def test_plots_neither_change_nor_use_global_matplotlib_settings() -> None:
    import matplotlib

    expected = lines_svg(CURVES)
    with matplotlib.rc_context({"font.size": 30, "axes.grid": False}):
        assert lines_svg(CURVES) == expected
        assert matplotlib.rcParams["font.size"] == 30


def test_error_without_matplotlib_names_the_extra(warm_python: list[str]) -> None:
    code = "import sys; sys.modules['matplotlib'] = None; from recsys_topk.reports.plots import bars; bars([{}], 'x')"
    done = subprocess.run([*warm_python, "-c", code], capture_output=True, text=True, check=False)
    assert "plots need matplotlib: pip install 'recsys-topk[plot]'" in done.stderr.splitlines()[-1]


def test_failed_write_keeps_the_old_plot(tmp_path: Path) -> None:
    path = tmp_path / "new" / "plot.svg"
    write_whole(path, "<svg/>")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "half \ud800 a text")
    assert path.read_text() == "<svg/>"
    assert [entry.name for entry in path.parent.iterdir()] == ["plot.svg"]
