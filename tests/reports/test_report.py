"""Report verdicts against values by hand, and report tables against recorded results."""

from __future__ import annotations

import json
import re
import shutil
import statistics
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from recsys_topk.cli.main import main
from recsys_topk.reports.paper import paper_figures
from recsys_topk.reports.verdicts import curve_verdict, kendall, verdict

RECORDED = Path(__file__).parent / "recorded"


class Page(HTMLParser):
    """Collects the table cells, addresses, ids and tags of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data")]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self.cell = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self.cell = False

    def handle_data(self, data: str) -> None:
        if self.cell:
            self.tables[-1][-1][-1] += data


@pytest.fixture(scope="module")
def page_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    target = tmp_path_factory.mktemp("page") / "report.html"
    assert main(["report", str(RECORDED), "--out", str(target)]) == 0
    return target.read_text()


def recorded(name: str, file: str) -> Any:
    return json.loads((RECORDED / name / file).read_text())


def test_table_holds_the_means_of_the_runs_and_the_paper_figures(page_text: str) -> None:
    head, *rows = Page(page_text).tables[0]
    runs = recorded("main-table", "comparison.json")["runs"]
    shown = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    assert set(runs) <= set(shown)
    for label, found in runs.items():
        joint = [run["metrics"]["test/joint_recall@10@20/200"] for run in found]
        assert shown[label]["joint @10@20"] == f"{statistics.fmean(joint):.4f}"
        assert shown[label]["±"] == f"{statistics.stdev(joint):.4f}"
    for kind in ("joint", "retrieval", "ranking"):
        assert shown["lapsum"][f"paper, {kind}"] == f"{paper_figures()['recall'][kind]['lapsum'][0]:.4f}"
        assert shown["listnet"][f"paper, {kind}"] == ""
    joint_column = [float(row[1]) for row in rows if row[0] in runs]
    assert joint_column == sorted(joint_column, reverse=True)
    assert (
        shown["oracle"]["joint @10@20"]
        == f"{recorded('main-table', 'experiment.json')['reference']['oracle']['joint']:.4f}"
    )


def test_verdict_follows_from_the_runs(page_text: str) -> None:
    runs = recorded("main-table", "comparison.json")["runs"]
    means = {
        n: statistics.fmean(r["metrics"]["test/joint_recall@10@20/200"] for r in found) for n, found in runs.items()
    }
    here = sorted(means, key=lambda name: -means[name]).index("dftopk") + 1
    place = re.search(r"dftopk ranks (\d+)\w+ of (\d+) by joint recall here", page_text)
    assert place is not None
    assert (int(place[1]), int(place[2])) == (here, len(runs))
    assert re.search(r"methods that the paper also reports, dftopk ranks \d\w+ here and 1st in the paper", page_text)


def test_page_is_self_contained_and_its_ids_are_unique(page_text: str) -> None:
    page = Page(page_text)
    fetched = [a for a in page.addresses if not a.startswith(("#", "data:"))]
    assert fetched == [paper_figures()["source"]["url"]]  # a link that is not loaded
    assert not re.search(r"url\((?!#)|@import|<link[^>]+stylesheet|<script[^>]+src|<img|<iframe", page_text)
    assert len(page.ids) == len(set(page.ids))
    anchors = {address[1:] for address in page.addresses if address.startswith("#")}
    assert anchors <= set(page.ids)
    assert page.tags.count("svg") >= 4
    assert len(page_text) < 2_000_000


def test_page_shows_commands_and_differences_from_the_paper(page_text: str) -> None:
    text = page_text.replace("&#39;", "'").replace("&#34;", '"')
    for name in ("main-table", "tau"):
        (step,) = recorded(name, "experiment.json")["steps"]
        assert f"recsys-topk compare --config paper-small --seeds {step['command'][4]}" in text
    assert "Differences from the paper." in text
    assert "uses the membership, a probability, as if it were a logit" in text


def test_text_from_result_files_is_escaped(tmp_path: Path) -> None:
    runs = {"<script>x</script>": [{"seed": 0, "metrics": {"test/joint_recall@10@20/200": 0.5}, "seconds": 1.0}]}
    (tmp_path / "comparison.json").write_text(json.dumps({"rows": [], "runs": runs}))
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "r.html")]) == 0
    assert "<script>x" not in (tmp_path / "r.html").read_text()


def test_missing_part_is_reported_and_the_rest_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(RECORDED / "runtime", tmp_path / "runtime")
    (tmp_path / "runtime" / "paper.json").unlink()
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "r.html")]) == 0
    assert "missing: `recsys-topk bench` has no result yet (paper.json)" in capsys.readouterr().out
    text = (tmp_path / "r.html").read_text()
    assert "by milliseconds for N = 1000 (operator alone) here" in text
    assert "(with a model" not in text


def test_single_runs_and_benchmarks_are_reported(tmp_path: Path) -> None:
    run = tmp_path / "mine"
    run.mkdir()
    (run / "config.yaml").write_text(
        "seed_everything: 7\nmodel: {loss: {class_path: a.DFTopKLoss}}\ndata: {root: /d}\n"
    )
    (run / "metrics.csv").write_text(
        "epoch,step,train/loss,val/joint_recall@10@20\n0,9,1.5,\n0,19,1.25,\n0,19,,0.3\n1,39,,0.4\n"
    )
    assert main(["report", str(run), str(RECORDED / "runtime" / "paper.json"), "--out", str(tmp_path / "r.html")]) == 0
    text = (tmp_path / "r.html").read_text()
    tables = Page(text).tables
    assert ["val/joint_recall@10@20", "0.4000", "0.4000", "2"] in tables[1]
    assert ["train/loss", "1.2500", "1.5000", "2"] in tables[1]
    assert "RecFlow layout in /d" in text
    assert "bench paper: paper.json" in text
    assert len(tables[2]) == 1 + len(recorded("runtime", "paper.json")["rows"])


def test_first_table_has_one_row_per_run_and_marks_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = (
        "{class_path: recsys_topk.datamodules.interactions.datamodule.InteractionsDataModule, init_args: {root: c.csv}}"
    )
    for name, values in {"good": (0.3, 0.5, 0.4), "bad": (0.2, 0.1, 0.3)}.items():
        run = tmp_path / name
        run.mkdir()
        loss = "{class_path: recsys_topk.losses.LapSumLoss, init_args: {tau: 5.0}}"
        objective = "{class_path: recsys_topk.cascades.objectives.JointObjective}"
        (run / "config.yaml").write_text(f"model: {{loss: {loss}, objective: {objective}}}\ndata: {data}\n")
        rows = [f"{n},{9 + 10 * n},{value},{value / 2}" for n, value in enumerate(values)]
        head = "epoch,step,val/joint_recall@10@20,val/joint_recall@10@20/corpus"
        (run / "metrics.csv").write_text("\n".join([head, *rows, ""]))
        (run / "run.json").write_text('{"monitor": "joint_recall@10@20"}')
        result = {"command": f"recsys-topk fit --name {name}", "seconds": 61.0}
        baselines = {"popularity": {"joint_recall@10@20": 0.25}}
        (run / "result.json").write_text(json.dumps({**result, "baselines": baselines}))
    (tmp_path / "bad" / "result.json").write_text("{broken")
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "r.html")]) == 0
    head, *rows = Page((tmp_path / "r.html").read_text()).tables[0]
    first, second = (dict(zip(head, row, strict=True)) for row in rows)
    assert (first["run"], second["run"]) == ("★ good", "bad")
    assert (first["data"], first["loss"], first["objective"]) == ("interactions in c.csv", "LapSum (tau 5)", "Joint")
    assert (first["joint recall"], first["all items"]) == ("0.5000", "0.2500")  # of the best epoch, not the last
    assert (first["popularity"], first["seconds"]) == ("0.2500", "61")
    assert first["command"] == "recsys-topk fit --name good"
    assert second["command"].startswith("recsys-topk fit --config ")
    assert "Best of 2 on interactions in c.csv, val joint@10@20: good, 0.5000." in capsys.readouterr().out


def test_comparison_and_test_of_the_same_lists_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One best run, not one of the comparison and one of the tests; an objective has one name in all rows."""
    content = recorded("main-table", "comparison.json")
    config = next(iter(content["runs"].values()))[0]["config"]
    for runs in content["runs"].values():
        runs[0]["config"] = config
    table, run = tmp_path / "table", tmp_path / "test-mine"
    table.mkdir()
    (table / "comparison.json").write_text(json.dumps(content))
    run.mkdir()
    (run / "config.yaml").write_text(json.dumps({**config, "ckpt_path": "runs/mine/checkpoints/best.ckpt"}))
    (run / "metrics.csv").write_text("epoch,step,test/joint_recall@10@20/200\n0,9,0.9999\n")
    (run / "result.json").write_text('{"objective": "joint"}')
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "r.html")]) == 0
    head, *rows = Page((tmp_path / "r.html").read_text()).tables[0]
    shown = [dict(zip(head, row, strict=True)) for row in rows]
    assert [row["run"] for row in shown if row["run"].startswith("★")] == ["★ test-mine"]
    assert {row["measure"] for row in shown} == {"test joint@10@20 of 200"}
    assert shown[0]["objective"] == "joint"
    assert f"Best of {len(content['runs']) + 1} on " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "words"),
    [({}, "nothing to report in"), ({"notes.txt": "x"}, "looked for experiment.json"),
     ({"comparison.json": "{"}, "is not valid JSON")],
)  # fmt: skip
def test_invalid_input_exits_with_status_2_and_one_line(
    content: dict[str, str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    page = tmp_path / "r.html"
    assert main(["report", str(tmp_path), "--out", str(page)]) == 2
    output = capsys.readouterr().err
    assert words in output
    assert output.count("\n") == 1
    assert not page.exists()


def test_missing_input_or_folder_as_output_exits_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "no file or folder" in capsys.readouterr().err
    assert main(["report", str(RECORDED), "--out", str(tmp_path)]) == 2
    assert "is a folder; give a file" in capsys.readouterr().err


def test_verdict_texts() -> None:
    here = {"dftopk": 0.3, "lapsum": 0.5, "softsort": 0.2, "mine": 0.6}
    assert verdict(here, {"dftopk": 0.9, "lapsum": 0.8, "softsort": 0.6}, "dftopk", "joint recall") == [
        "dftopk ranks 3rd of 4 by joint recall here (0.3); the best is mine with 0.6.",
        "Among the 3 methods that the paper also reports, dftopk ranks 2nd here and 1st in the paper (Kendall's tau of "
        "the two orders +0.33).",
    ]
    assert verdict({"dftopk": 2.0, "lapsum": 5.0}, {}, "dftopk", "ms", smallest_first=True) == [
        "dftopk ranks 1st of 2 by ms here (2)."
    ]
    assert "was not run here" in verdict({"lapsum": 0.2}, {}, "dftopk", "joint recall")[0]


def test_curve_verdict_texts() -> None:
    line, paper = {1.0: 0.5, 10.0: 0.4, 100.0: 0.1}, {1.0: 0.1, 10.0: 0.2, 100.0: 0.3}
    assert curve_verdict({"dftopk": line}, {"dftopk": paper}, "dftopk", "tau") == [
        "dftopk is best at tau 1 here (0.5) and at 100 in the paper (Kendall's tau of the two orders -1.00)."
    ]
    assert curve_verdict({"dftopk": line}, {}, "dftopk", "tau") == ["dftopk is best at tau 1 here (0.5)."]
    curves = {"dftopk": {0.0: 0.3, 25.0: 0.2}, "lapsum": {0.0: 0.2, 25.0: 0.5}}
    assert curve_verdict(curves, {"dftopk": {0.0: 0.4, 25.0: 0.56}}, "dftopk", "negatives") == [
        "dftopk ranks 2nd of 2 by joint recall at 25 negatives here (0.2); the best is lapsum with 0.5.",
        "From 0 to 25 negatives, dftopk changes by -0.100 here and by +0.160 in the paper.",
    ]


def test_two_way_results_are_pivoted_and_the_long_table_is_folded(page_text: str) -> None:
    record, runs = (recorded("negatives", f"{name}.json") for name in ("experiment", "comparison"))
    (table,) = [one for one in Page(page_text).tables if one[0] == ["run", "0", "5", "10", "15", "20", "25"]]
    cells = {row[0]: row[1:] for row in table[1:]}
    for label, (name, x) in record["points"].items():
        joint = [run["metrics"]["test/joint_recall@10@20/200"] for run in runs["runs"][label]]
        assert cells[name][table[0].index(f"{x:g}") - 1] == f"{statistics.fmean(joint):.4f}"
    assert page_text.count("<summary>All values</summary>") == 1


def test_tables_have_no_empty_columns_and_notes_name_their_rows(page_text: str) -> None:
    for head, *body in Page(page_text).tables:
        for place, column in enumerate(head):
            assert any(row[place] for row in body), column
    for name in re.findall(r"<p class=\"note\">The paper's (\w+):", page_text.replace("&#39;", "'")):
        assert f">{name}</td>" in page_text


def test_every_point_of_a_plot_shows_its_value_on_hover(page_text: str) -> None:
    runs = recorded("main-table", "comparison.json")["runs"]
    joint = statistics.fmean(run["metrics"]["test/joint_recall@10@20/200"] for run in runs["listnet"])
    assert f"<title>listnet: {joint:.4f}" in page_text
    points = recorded("tau", "experiment.json")["points"]
    assert len(re.findall(r"<title>dftopk: [\d.]+ at ", page_text)) >= len(points)


def test_test_run_is_titled_and_reproduced_as_a_test(tmp_path: Path) -> None:
    run = tmp_path / "test-mine"
    run.mkdir()
    (run / "config.yaml").write_text(
        "ckpt_path: runs/a/checkpoints/best.ckpt\nmodel: {loss: {class_path: a.DFTopKLoss}}\n"
    )
    (run / "metrics.csv").write_text("epoch,step,test/joint_recall@10@20/200\n0,0,0.3\n")
    assert main(["report", str(run), "--out", str(tmp_path / "r.html")]) == 0
    text = (tmp_path / "r.html").read_text()
    assert "recsys-topk test --ckpt_path runs/a/checkpoints/best.ckpt" in text
    assert "test: test-mine" in text
    assert "recsys-topk fit" not in text


def test_kendall_counts_ties_as_neither_agreement_nor_disagreement() -> None:
    assert kendall({"a": 1, "b": 1, "c": 2}, {"a": 1, "b": 2, "c": 3}) == pytest.approx(2 / 3)
    assert kendall({"a": 1}, {"a": 1}) is None
