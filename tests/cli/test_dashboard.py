"""The panels of the dashboard show metrics that runs log, and the dashboard is saved, printed or written."""

from __future__ import annotations

import json
import os
import re
import subprocess
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
    """The metrics and config that a run logged to W&B."""

    history: set[str]
    summary: dict[str, Any]
    config: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Logged:
        (file,) = folder.rglob("offline-run-*/*.wandb")
        found = wandb_files.records(file)
        names = {name for row in wandb_files.history(found) for name in row}
        return cls(names, wandb_files.summary(found), wandb_files.config(found))


LOGGED = ("--logger=wandb", "--trainer.enable_progress_bar=false")


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str], warm_python: list[str]) -> Logged:
    """A run with the callback of the diagnostics section."""
    folder = tmp_path_factory.mktemp("fitted")
    done = subprocess.run(
        [*warm_python, "-m", "recsys_topk", "fit", *TINY_WORLD, *LOGGED, DIAGNOSTICS, "--model.embedding_lr=0.1"],
        capture_output=True, text=True, check=False, cwd=folder, env=environment, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return Logged.read(folder)


@pytest.fixture(scope="module")
def spec(environment: dict[str, str], warm_python: list[str]) -> dict[str, Any]:
    """The workspace that is printed without an API key."""
    done = subprocess.run(
        [*warm_python, "-m", "recsys_topk", "dashboard", "--print"],
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
    """Return the value that W&B finds under a path, in which `.value` follows the first part."""
    first, value, *rest = path.split(".")
    assert value == "value", path
    found = config[first]
    for key in rest:
        found = found[key]
    return found


def test_dashboard_has_a_panel_per_question(spec: dict[str, Any]) -> None:
    titles = " | ".join(panel["config"].get("chartTitle", "") for panel in panels(spec))
    for words in ("joint_recall@10@20 by loss", "by tau", "by training negatives", "on each day", "each stage alone"):
        assert words in titles
    for words in ("Requests per second", "Loss", "Selection mass", "Gradient conflict"):
        assert words in titles


def test_runs_log_every_metric_of_a_curve(spec: dict[str, Any], fitted: Logged) -> None:
    curves = [panel["config"] for panel in panels(spec) if panel["viewType"] == "Run History Line Plot"]
    assert len(curves) > 10
    seen = {name for name in fitted.history if not name.startswith("_")}
    for config in curves:
        if "stream/" in str(config):
            continue  # test_stream_logs_the_metrics_of_the_streaming_panels
        assert config["xAxis"] in seen
        assert set(config["metrics"]) <= seen, config["chartTitle"]
        pattern = config.get("metricRegex")
        assert config["metrics"] or pattern
        assert pattern is None or any(re.search(pattern, name) for name in seen), pattern


def test_runs_log_every_option_and_summary_of_a_panel(spec: dict[str, Any], fitted: Logged) -> None:
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
    """Class paths would split a loss into two groups: the default differs from that of `--loss dftopk`."""
    (path,) = {panel["config"]["groupBy"] for panel in panels(spec) if "groupBy" in panel["config"]}
    assert config_value(fitted.config, path) == "dftopk"


def test_stream_logs_the_metrics_of_the_streaming_panels(
    spec: dict[str, Any], tmp_path: Path, in_process: Command
) -> None:
    done = in_process(tmp_path, "stream", "--losses=dftopk", "--seeds=1", *TINY_WORLD, *LOGGED)
    assert done.returncode == 0, done.stderr
    streamed = Logged.read(tmp_path)
    curves = [panel["config"] for panel in panels(spec) if "stream/" in str(panel["config"])]
    assert len(curves) == 2
    for config in curves:
        assert config["xAxis"] in streamed.history
        assert set(config["metrics"]) <= streamed.history
        assert config["metrics"] or any(re.search(config["metricRegex"], name) for name in streamed.history)
    assert streamed.config["loss"] == "dftopk"


def test_panels_show_the_metrics_of_the_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With runs of two cascades, one of them in a comparison, panels exist for both metrics."""
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


def test_runs_in_wandb_name_their_monitored_metric(
    fitted: Logged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an API key, the metrics are read from the runs in W&B."""
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
    """A server that accepts a workspace like W&B's; yields its address and the requests that it got."""
    requests: list[dict[str, Any]] = []
    answer = {
        "viewer": {"id": "u", "entity": "somebody", "username": "somebody", "flags": "{}", "teams": {"edges": []}},
        "upsertView": {"view": {"id": "v", "name": "nw-abc-v"}, "inserted": True},
    }

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            known = self.path == "/graphql"
            if known:
                requests.append(json.loads(body))
            text = json.dumps({"data": answer}).encode()
            self.send_response(200 if known else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}", requests
    running.shutdown()


def test_dashboard_is_saved_and_its_address_printed_with_an_api_key(
    server: tuple[str, list[dict[str, Any]]],
    spec: dict[str, Any],
    environment: dict[str, str],
    warm_python: list[str],
    tmp_path: Path,
) -> None:
    address, requests = server
    done = subprocess.run(
        [*warm_python, "-m", "recsys_topk", "dashboard", "--project", "theirs"],
        capture_output=True, text=True, check=False, cwd=tmp_path, stdin=subprocess.DEVNULL, timeout=120,
        env={**environment, "WANDB_API_KEY": "k" * 40, "WANDB_BASE_URL": address},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{address}/somebody/theirs?nw=abc\n"
    (given,) = [query["variables"] for query in requests if "upsertView" in query["query"]]
    assert (given["entityName"], given["projectName"]) == ("somebody", "theirs")
    assert [panel["config"] for panel in panels(json.loads(given["spec"]))] == [p["config"] for p in panels(spec)]


def test_out_file_is_written_whole_or_not_at_all(recsys_topk: Command, tmp_path: Path, spec: dict[str, Any]) -> None:
    done = recsys_topk("dashboard", "--out", "spec.json")
    assert done.returncode == 0, done.stderr
    assert "spec.json" in done.stdout
    assert len(panels(json.loads((tmp_path / "spec.json").read_text()))) == len(panels(spec))
    assert [path.name for path in tmp_path.iterdir()] == ["spec.json"]
    assert "written: dashboard.json" in recsys_topk("dashboard").stdout  # without a key and without --out
    (tmp_path / "dashboard.json").unlink()
    refused = recsys_topk("dashboard", "--out", ".")
    assert refused.returncode == 2
    assert "--out must be a file" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["spec.json"]
