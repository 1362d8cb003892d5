"""Streams: the protocol against a hand-written loop, and a command that is killed and resumed."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from recsys_topk.datamodules import WorldConfig
from recsys_topk.datamodules.simulator.embedded import embedded_root
from tests import wandb_files
from tests.conftest import TINY_WORLD, Result

# A random loss, negatives and a warm-up, which a new process must restore.
OPTIONS = [*TINY_WORLD, "--data.train_negatives=5", "--model.warmup_steps=6", "--trainer.max_epochs=2"]
STREAM = ["stream", "--losses", "dftopk,perturbed", "--seeds", "1", "--out", "s", *OPTIONS]
DAYS = ["2024-01-13", "2024-01-14", "2024-01-15", "2024-01-16"]
METRICS = ["joint_recall@10@20", "retrieval_recall@10@30", "ranking_recall@10@20"]


@pytest.fixture(scope="module")
def streamed(made_once: Callable[..., Path]) -> Path:
    """A folder with a finished stream in `s`."""
    return made_once("streamed", *STREAM)


def content(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "s" / "stream.json").read_text())
    return found


def numbers(folder: Path) -> list[Any]:
    """Return all measured values except times."""
    (run,) = content(folder)["runs"]["perturbed"]
    return [{name: value for name, value in day.items() if name != "seconds"} for day in (run["first"], *run["days"])]


def checkpoint(folder: Path) -> dict[str, Any]:
    (path,) = (folder / "s" / "days").glob("perturbed*.ckpt")
    assert path.name == "perturbed-s0-2024-01-16.ckpt"
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


def assert_same(one: Any, two: Any) -> None:
    """Compare nested containers of tensors bit by bit."""
    assert type(one) is type(two)
    if isinstance(one, dict):
        assert list(one) == list(two)
        for name in one:
            assert_same(one[name], two[name])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(two)
        for a, b in zip(one, two, strict=True):
            assert_same(a, b)
    else:
        assert torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two


def test_files_hold_every_day(streamed: Path) -> None:
    found = content(streamed)
    assert found["command"] == ["recsys-topk", *STREAM]
    assert found["versions"]["torch"] == torch.__version__
    assert found["machine"]["cores"] == os.cpu_count()
    (run,) = found["runs"]["perturbed"]
    assert run["seed"] == 0
    assert run["given"]["model"]["loss"]["class_path"].endswith(".PerturbedTopKLoss")
    assert run["given"]["data"]["init_args"]["seed"] == 0
    assert run["first"]["day"] == DAYS[0]
    assert "metrics" not in run["first"]
    assert [day["day"] for day in run["days"]] == DAYS[1:]
    assert all(list(day["metrics"]) == METRICS for day in run["days"])
    assert {(day["requests"], day["candidates"]) for day in run["days"]} == {(120, 80)}
    output = (streamed / "stdout.txt").read_text()
    with (streamed / "s" / "stream.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["run"] == "perturbed"]
    for row, day in zip(rows, run["days"], strict=True):
        assert (row["run"], row["seed"], row["day"]) == ("perturbed", "0", day["day"])
        assert float(row[METRICS[0]]) == day["metrics"][METRICS[0]]
        (line,) = [line for line in output.splitlines() if line.startswith("perturbed") and day["day"] in line]
        assert all(f"{value:.4f}" in line for value in day["metrics"].values())
    root = ET.parse(streamed / "s" / "stream.svg").getroot()
    texts = {"".join(node.itertext()).strip() for node in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {*DAYS[1:], "perturbed", "joint recall@10@20, lists of 80"} <= texts


def test_killed_stream_resumes_to_the_same_metrics_and_weights(
    streamed: Path,
    environment: dict[str, str],
    warm_python: list[str],
    in_process: Callable[..., Result],
    tmp_path: Path,
) -> None:
    command = ["stream", "--losses", "perturbed", *STREAM[3:], "--logger", "wandb"]
    arguments = [*warm_python, "-m", "recsys_topk", *command]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment) as first:
        assert first.stdout is not None
        for line in first.stdout:
            if DAYS[1] in line:
                time.sleep(0.15)  # into the next day
                break
        first.send_signal(signal.SIGKILL)
    kept = tmp_path / "s" / "days" / "perturbed-s0.json"
    time.sleep(0.5)  # the training process notices that its parent is gone
    before = kept.read_text()
    learned = [day["day"] for day in json.loads(before)["days"]]
    assert DAYS[-1] not in learned
    time.sleep(0.5)
    assert kept.read_text() == before

    second = in_process(tmp_path, *command)
    assert second.returncode == 0, second.stderr
    assert not [line for line in second.stdout.splitlines() if line.startswith("perturbed") and DAYS[1] in line]
    assert numbers(tmp_path) == numbers(streamed)
    one, two = checkpoint(streamed), checkpoint(tmp_path)
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch"):
        assert_same(one[part], two[part])
    assert one["global_step"] == 4 * 2 * 2  # days, passes, batches
    assert one["lr_schedulers"][0]["_last_lr"] == [0.01]
    assert_wandb(tmp_path)


def assert_wandb(folder: Path) -> None:
    """Check that both parts are one W&B run and the second part has every day."""
    files = sorted((folder / "s" / "runs").glob("*/wandb/offline-run-*/*.wandb"), key=lambda path: path.parent.name)
    assert len(files) == 2
    assert len({path.name for path in files}) == 1
    found = wandb_files.records(files[-1])
    rows = [row for row in wandb_files.history(found) if "stream/day" in row]
    (run,) = content(folder)["runs"]["perturbed"]
    assert [(row["stream/day"], row["stream/date"]) for row in rows] == list(enumerate(DAYS, start=1))[1:]
    joint = f"stream/{METRICS[0]}"
    assert [row[joint] for row in rows] == [day["metrics"][METRICS[0]] for day in run["days"]]
    axes = {record.metric.glob_name: record.metric.step_metric for record in found if record.HasField("metric")}
    assert axes["stream/*"] == "stream/day"


def test_metrics_equal_a_hand_written_loop(
    streamed: Path, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop uses one optimizer for all days and never saves its state."""
    from recsys_topk.runs import TrainingRun

    monkeypatch.setenv("RECSYS_TOPK_CACHE", environment["RECSYS_TOPK_CACHE"])
    (run,) = content(streamed)["runs"]["dftopk"]
    alone = TrainingRun({"config": run["given"], "out": str(tmp_path)})
    model, data = alone.model, alone.data
    made = model.configure_optimizers()
    optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
    for number, day in enumerate(DAYS):
        if number:
            model.eval()
            with torch.no_grad():
                for batch in data.loader([day], training=False):
                    lists = data.add_negatives(batch)
                    metrics = model.update_metrics("test", model(lists), lists)
            found = {name: float(metric.compute()) for name, metric in metrics.items()}
            assert run["days"][number - 1]["metrics"] == pytest.approx(found, abs=1e-6)
            for metric in metrics.values():
                metric.reset()
        model.train()
        loader = data.loader([day], training=True)
        for epoch in (2 * number, 2 * number + 1):
            loader.set_epoch(epoch)
            for batch in loader:
                optimizer.zero_grad()
                model.compute_objective(data.add_negatives(batch)).total.backward()
                optimizer.step()
                schedule.step()


def test_finished_stream_does_nothing(streamed: Path, in_process: Callable[..., Result], tmp_path: Path) -> None:
    streamed = shutil.copytree(streamed, tmp_path / "copy")
    before = {path.name: path.read_bytes() for path in (streamed / "s" / "days").glob("*[!g]")}
    done = in_process(streamed, *STREAM)
    assert done.returncode == 0, done.stderr
    assert not [line for line in done.stdout.splitlines() if line.startswith("dftopk  ")]
    assert {path.name: path.read_bytes() for path in (streamed / "s" / "days").glob("*[!g]")} == before
    assert len(list((streamed / "s" / "runs").iterdir())) == 2


def test_stream_resumes_with_new_days_and_fails_if_old_days_are_missing(
    streamed: Path,
    environment: dict[str, str],
    warm_python: list[str],
    in_process: Callable[..., Result],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stream to which the last day is added later equals a stream that had all days from the start."""
    monkeypatch.setenv("RECSYS_TOPK_CACHE", environment["RECSYS_TOPK_CACHE"])
    world = embedded_root(WorldConfig(users=40, items=300, days=4, requests=120))
    shutil.copytree(world, tmp_path / "world")
    last, first = (next((tmp_path / "world").rglob(f"all_stage/*{day}*")) for day in (DAYS[-1], DAYS[0]))
    command = ["stream", "--losses", "perturbed", "--seeds", "1", "--out", "s", "--data.root", "world", *OPTIONS]
    hidden = last.rename(tmp_path / last.name)
    assert in_process(tmp_path, *command).returncode == 0
    assert [day["day"] for day in numbers(tmp_path)] == DAYS[:-1]
    hidden.rename(last)
    assert in_process(tmp_path, *command).returncode == 0
    assert numbers(tmp_path) == numbers(streamed)

    first.unlink()
    done = in_process(tmp_path, *command)
    assert done.returncode == 1
    assert f"was trained on {', '.join(DAYS)}, but the data now has {', '.join(DAYS[1:])}" in done.stderr


def test_stream_with_other_options_is_not_resumed(streamed: Path, in_process: Callable[..., Result]) -> None:
    done = in_process(streamed, *STREAM, "--model.lr=0.5")
    assert done.returncode == 2
    assert "dftopk-s0.json was made with other options" in done.stderr
    assert "--model.lr was None and is '0.5' now" in done.stderr
