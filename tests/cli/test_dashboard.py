"""The dashboard: what its panels show is what runs log, and it is saved, printed or written without a question."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recsys_topk.cli.main import main
from recsys_topk.reports.workspace import DIAGNOSTICS, metrics_of_project
from tests import wandb_files
from tests.conftest import TINY_WORLD, Result

Command = Callable[..., Result]


@dataclass
class Logged:
    """What a run left with W&B."""

    history: set[str]
    summary: dict[str, Any]
    config: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Logged:
        (file,) = folder.rglob("offline-run-*/*.wandb")
        found = wandb_files.records(file)
        names = {name for row in wandb_files.history(found) for name in row}
        return cls(names, wandb_files.summary(found), wandb_files.config(found))


def run_once(folder: Path, environment: dict[str, str], *arguments: str) -> Logged:
    done = subprocess.run(
        [sys.executable, "-m", "recsys_topk", *arguments, "--logger=wandb", "--trainer.enable_progress_bar=false"],
        capture_output=True, text=True, check=False, cwd=folder, env=environment, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return Logged.read(folder)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Logged:
    """A run with the callback that the section on diagnostics names."""
    folder = tmp_path_factory.mktemp("fitted")
    return run_once(folder, environment, "fit", *TINY_WORLD, DIAGNOSTICS, "--model.embedding_lr=0.1")


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> dict[str, Any]:
    """The workspace as somebody with no key gets it."""
    done = subprocess.run(
        [sys.executable, "-m", "recsys_topk", "dashboard"],
        capture_output=True, text=True, check=False, env=environment, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert "WANDB_API_KEY" in line
    content: dict[str, Any] = json.loads(done.stdout)
    return content


def panels(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for section in spec["section"]["panelBankConfig"]["sections"] for panel in section["panels"]]


def config_value(config: dict[str, Any], path: str) -> Any:
    """What W&B finds under a path: `.value` stands after the first part of it."""
    first, value, *rest = path.split(".")
    assert value == "value", path
    found = config[first]
    for key in rest:
        found = found[key]
    return found


def test_the_questions_have_their_panels(spec: dict[str, Any]) -> None:
    titles = " | ".join(panel["config"].get("chartTitle", "") for panel in panels(spec))
    for words in ("joint_recall@10@20 by loss", "by tau", "by training negatives", "on each day", "each stage alone"):
        assert words in titles
    for words in ("Requests per second", "Loss", "Selection mass", "Gradient conflict"):
        assert words in titles


def test_every_metric_of_a_curve_is_logged(spec: dict[str, Any], fitted: Logged) -> None:
    curves = [panel["config"] for panel in panels(spec) if panel["viewType"] == "Run History Line Plot"]
    assert len(curves) > 10
    seen = {name for name in fitted.history if not name.startswith("_")}
    for config in curves:
        if "stream/" in str(config):
            continue  # test_the_streaming_panels_show_what_a_stream_logs
        assert config["xAxis"] in seen
        assert set(config["metrics"]) <= seen, config["chartTitle"]
        pattern = config.get("metricRegex")
        assert config["metrics"] or pattern
        assert pattern is None or any(re.search(pattern, name) for name in seen), pattern


def test_every_option_and_summary_that_a_panel_uses_is_logged(spec: dict[str, Any], fitted: Logged) -> None:
    used: list[str] = []
    for panel in panels(spec):
        config = panel["config"]
        used += [config[axis] for axis in ("xAxis", "yAxis") if ":" in config.get(axis, "")]
        used += [column["accessor"] for column in config.get("columns", [])]
        used += [f"summary:{config['targetKey']}"] if "targetKey" in config else []
        used += [f"summary:{name}" for name in config["metrics"]] if panel["viewType"] == "Bar Chart" else []
        used += [f"config:{config['groupBy']}"] if "groupBy" in config else []
    used += [
        f"{sort['key']['section']}:{sort['key']['name']}" for sort in spec["section"]["runSets"][0]["sort"]["keys"]
    ]
    assert len(used) > 15
    for name in set(used):
        section, _, path = name.partition(":")
        value = config_value(fitted.config, path) if section == "config" else fitted.summary[path]
        assert isinstance(value, (int, float, str)), name


def test_losses_are_grouped_by_their_plain_names(spec: dict[str, Any], fitted: Logged) -> None:
    """A class path would make two groups of one loss: that of the default is not that of `--loss dftopk`."""
    (path,) = {panel["config"]["groupBy"] for panel in panels(spec) if "groupBy" in panel["config"]}
    assert config_value(fitted.config, path) == "dftopk"


def test_the_streaming_panels_show_what_a_stream_logs(
    spec: dict[str, Any], tmp_path: Path, environment: dict[str, str]
) -> None:
    streamed = run_once(tmp_path, environment, "stream", "--losses=dftopk", "--seeds=1", *TINY_WORLD)
    curves = [panel["config"] for panel in panels(spec) if "stream/" in str(panel["config"])]
    assert len(curves) == 2
    for config in curves:
        assert config["xAxis"] in streamed.history
        assert set(config["metrics"]) <= streamed.history
        assert config["metrics"] or any(re.search(config["metricRegex"], name) for name in streamed.history)
    assert streamed.config["loss"] == "dftopk"


def test_the_metrics_are_those_of_the_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of two cascades, one of them in a comparison: each panel with a metric is there for both."""
    monkeypatch.chdir(tmp_path)
    for number, (name, monitor) in enumerate({"a": "joint_recall@5@50", "c/runs/b": "ranking_ndcg@3"}.items()):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps({"monitor": monitor}))
        os.utime(folder / "run.json", (number, number))
    (tmp_path / "runs" / "run.json").write_text("{broken")
    assert main(["dashboard", "--print"]) == 0
    shown = capsys.readouterr().out
    assert "@10@20" not in shown
    titles = [panel["config"].get("chartTitle") for panel in panels(json.loads(shown))]
    assert titles[:2] == [
        f"{name} by loss, mean and spread of its runs" for name in ("ranking_ndcg@3", "joint_recall@5@50")
    ]
    assert titles.count("Loss") == 1
    (sort,) = json.loads(shown)["section"]["runSets"][0]["sort"]["keys"]
    assert sort["key"]["name"] == "val/ranking_ndcg@3"

    assert main(["dashboard", "--print", "--metric", "joint_recall@7@70"]) == 0
    shown = capsys.readouterr().out
    assert "val/joint_recall@7@70" in shown
    assert "stream/joint_recall@7@70" in shown
    assert "ndcg" not in shown


def test_a_run_says_what_it_is_compared_by(fitted: Logged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a key, the runs that W&B has are asked."""
    import wandb

    assert fitted.config["monitor"] == "joint_recall@10@20"

    class Api:
        def __init__(self, timeout: int) -> None:
            pass

        def runs(self, path: str, order: str) -> Iterator[SimpleNamespace]:
            assert (path, order) == ("e/p", "-created_at")
            configs = [{"monitor": "joint_recall@5@50"}, {}, fitted.config, {"monitor": "joint_recall@5@50"}]
            return (SimpleNamespace(config=config) for config in configs)

    monkeypatch.setattr(wandb, "Api", Api)
    assert metrics_of_project("e", "p") == ["joint_recall@5@50", "joint_recall@10@20"]


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that takes a workspace as W&B's does; its address, and what it was asked."""
    asked: list[dict[str, Any]] = []
    answer = {
        "viewer": {"id": "u", "entity": "somebody", "username": "somebody", "flags": "{}", "teams": {"edges": []}},
        "upsertView": {"view": {"id": "v", "name": "nw-abc-v"}, "inserted": True},
    }

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            known = self.path == "/graphql"
            if known:
                asked.append(json.loads(body))
            text = json.dumps({"data": answer}).encode()
            self.send_response(200 if known else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: Any) -> None:
            """Keep quiet."""

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}", asked
    running.shutdown()


def test_with_a_key_it_is_saved_and_its_address_printed(
    server: tuple[str, list[dict[str, Any]]], spec: dict[str, Any], environment: dict[str, str], tmp_path: Path
) -> None:
    address, asked = server
    done = subprocess.run(
        [sys.executable, "-m", "recsys_topk", "dashboard", "--project", "theirs"],
        capture_output=True, text=True, check=False, cwd=tmp_path, stdin=subprocess.DEVNULL, timeout=120,
        env={**environment, "WANDB_API_KEY": "k" * 40, "WANDB_BASE_URL": address},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{address}/somebody/theirs?nw=abc\n"
    (given,) = [query["variables"] for query in asked if "upsertView" in query["query"]]
    assert (given["entityName"], given["projectName"]) == ("somebody", "theirs")
    assert [panel["config"] for panel in panels(json.loads(given["spec"]))] == [p["config"] for p in panels(spec)]


def test_it_is_written_whole_or_not_at_all(recsys_topk: Command, tmp_path: Path, spec: dict[str, Any]) -> None:
    done = recsys_topk("dashboard", "--out", "spec.json")
    assert done.returncode == 0, done.stderr
    assert "spec.json" in done.stdout
    assert len(panels(json.loads((tmp_path / "spec.json").read_text()))) == len(panels(spec))
    assert [path.name for path in tmp_path.iterdir()] == ["spec.json"]
    refused = recsys_topk("dashboard", "--out", ".")
    assert refused.returncode == 2
    assert "--out must be a file" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["spec.json"]
