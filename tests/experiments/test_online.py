"""Training on new days as they arrive: killed at any moment, published behind a gate, with growing vocabularies."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from filelock import FileLock

from recsys_topk.experiments.online import Gate, Online, roll_back
from recsys_topk.experiments.parts import Parts, newest
from recsys_topk.tabular.features.encoder import FeatureEncoder
from tests.conftest import Result
from tests.experiments.test_stream import assert_same

DAYS = ["2024-01-13", "2024-01-14", "2024-01-15", "2024-01-16"]
FIT = [
    "--data.batch_size=60", "--data.eval_negatives=40", "--data.train_negatives=5", "--data.history_length=10",
    "--data.vocabulary=growing:min_count=2,evict_after=2", "--model.embedding_optimizer=rowwise_adagrad",
    "--model.warmup_steps=6", "--trainer.max_epochs=2", "--trainer.accelerator=cpu", "--trainer.logger=false",
]  # fmt: skip
ONLINE = ["online", "--data.root", "world", "--publish", "current", "--out", "o", "--schedule", "once", *FIT]
PARTS = ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch")


@pytest.fixture(scope="module")
def world(made_once: Callable[..., Path]) -> Path:
    """A world of four days, in `world`."""
    sizes = ("--users", "40", "--items", "300", "--days", "4", "--requests", "100", "--new-items", "30")
    return made_once("online-world", "simulate", "--out", "world", *sizes)


def only(world: Path, folder: Path, days: list[str]) -> Path:
    """Copy some days of the world to a folder."""
    shutil.copytree(world / "world", folder / "world", dirs_exist_ok=True)
    for path in (folder / "world" / "data").rglob("*2024*"):
        if path.stem not in days:
            path.unlink()
    return folder


def weights(folder: Path, day: str) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / "o" / "parts" / f"{day}.ckpt", weights_only=True)
    return {name: found[name] for name in PARTS}


def entries_of(out: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((out / "online.json").read_text())["parts"]
    return found


def entries(folder: Path) -> list[dict[str, Any]]:
    return entries_of(folder / "o")


@pytest.fixture(scope="module")
def undisturbed(
    world: Path, in_process: Callable[..., Result], session_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Three days in one go, without exports."""
    folder = only(world, tmp_path_factory.mktemp("undisturbed"), DAYS[:3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Online, "_publish", lambda self, record, parts: record["parts"][-1].update(published=False))
        assert in_process(folder, *ONLINE).returncode == 1
    return folder


def test_each_day_is_tested_before_training_and_new_ids_get_rows(undisturbed: Path) -> None:
    found = entries(undisturbed)
    assert [entry["part"] for entry in found] == DAYS[:3]
    assert ["metrics" in entry for entry in found] == [False, True, True]
    from recsys_topk.tabular.ids.vocabulary import load_vocabularies

    rows = [load_vocabularies(undisturbed / "o" / entry["vocabularies"])["video_id"].rows for entry in found]
    assert rows[0] < rows[1] <= rows[2]
    assert {len(one) for name, one in weights(undisturbed, DAYS[2])["state_dict"].items()
            if name.endswith(".video_id.weight")} == {rows[2]}  # fmt: skip


def wait_for_the_end(folder: Path) -> None:
    """Wait until the forked process, which the server kills, is gone."""
    time.sleep(0.3)
    (folder / "o").mkdir(exist_ok=True)
    with FileLock(folder / "o" / ".lock", timeout=120):
        pass


def run_and_kill(arguments: list[str], folder: Path, environment: dict[str, str], seconds: float) -> int:
    """Run the command and kill it after some time; return its status."""
    with subprocess.Popen(arguments, cwd=folder, env=environment, stdout=subprocess.DEVNULL) as process:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            return process.wait()


def check_link(folder: Path) -> None:
    """Check that the link, if it is there, points to a whole export that answers."""
    from recsys_topk.serving.recommend import CascadeRecommender

    link = folder / "current"
    if link.is_symlink():
        recommender = CascadeRecommender.from_export(link / "export", link / "index")  # compares every file
        assert recommender.users is not None
        assert recommender.recommend(recommender.users.names[:1].tolist())[0]


@pytest.mark.timeout(900)
def test_two_kills_change_nothing_and_the_link_serves_the_result(
    world: Path, undisturbed: Path, environment: dict[str, str], warm_python: list[str],
    in_process: Callable[..., Result], tmp_path: Path,
) -> None:  # fmt: skip
    folder = only(world, tmp_path, DAYS[:3])
    arguments = [*warm_python, "-m", "recsys_topk", *ONLINE]
    for file in ("o/online.json", "o/exports"):  # in the second day, and in the first export
        with subprocess.Popen(arguments, cwd=folder, env=environment, stdout=subprocess.DEVNULL) as process:
            deadline = time.monotonic() + 250
            while not (folder / file).exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            time.sleep(0.1)
            process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        wait_for_the_end(folder)
        assert not (folder / "current").is_symlink()
    done = in_process(folder, *ONLINE)
    assert done.returncode == 0, done.stderr
    assert_same(weights(undisturbed, DAYS[2]), weights(folder, DAYS[2]))
    for one, other in zip(entries(folder), entries(undisturbed), strict=True):
        assert {**one, "gate": 0, "published": 0} == {**other, "gate": 0, "published": 0}
    check_link(folder)
    assert (folder / "current").resolve() == (folder / "o" / "exports" / DAYS[2]).resolve()
    assert in_process(folder, *ONLINE).stdout.endswith("nothing new\n")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECSYS_TOPK_CACHE", environment["RECSYS_TOPK_CACHE"])
        check_measured(folder)

    # One more day, whose export does not pass the gate: the link stays.
    only(world, folder, DAYS)
    with pytest.MonkeyPatch.context() as patch:  # exports of two days are compared in the test of random kills
        patch.setattr(Online, "_export", lambda self, entry, parts, target: (target / "export").mkdir())
        patch.setattr("recsys_topk.experiments.online.measure_export", lambda export, model, data: {
            model.monitor: {DAYS[2]: 0.5, DAYS[3]: 0.4}[export.parent.name]})  # fmt: skip
        refused = in_process(folder, *ONLINE, "--gate", "joint_recall -0.05")
    assert refused.returncode == 1, refused.stderr
    assert "0.4000, in service 0.5000: refused" in refused.stdout
    assert (folder / "current").resolve().name == DAYS[2]
    assert [path.name for path in (folder / "o" / "exports").iterdir() if path.name[0] != "."] == [DAYS[2]]


def check_measured(folder: Path) -> None:
    """Compare the value of the gate with that of the checkpoint on the last tenth of the day's requests."""
    from recsys_topk.cascades.module import CascadeModule
    from recsys_topk.datamodules import RecFlowDataModule

    entry = entries(folder)[-1]
    data = RecFlowDataModule(
        str(folder / "world"), train_days=DAYS[2], val_days="none", test_days=DAYS[2], eval_negatives=40,
        vocabulary=str(folder / "o" / entry["vocabularies"]), history_length=10, batch_size=10,
    )  # fmt: skip
    model = CascadeModule.load_from_checkpoint(folder / "o" / entry["checkpoint"], map_location="cpu").eval()
    *_, last = data.test_dataloader()
    assert last.size == 10
    batch = data.add_negatives(last)
    with torch.no_grad():
        metric = model.update_metrics("test", model(batch), batch)[entry["gate"]["metric"]]
    assert entry["gate"]["new"] == pytest.approx(float(metric.compute()), abs=1e-6)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_kills_at_random_moments(
    world: Path, undisturbed: Path, environment: dict[str, str], warm_python: list[str], tmp_path: Path
) -> None:
    """A day arrives between the kills. After each of them the link has a whole export, or there is none yet."""
    folder = only(world, tmp_path, DAYS[:2])
    arguments = [*warm_python, "-m", "recsys_topk", *ONLINE]
    start = time.monotonic()
    assert run_and_kill(arguments, folder, environment, 600) == 0
    assert list((folder / "current").iterdir())
    first, whole, moments, kills = entries(folder), time.monotonic() - start, random.Random(0), 0
    while kills < int(os.environ.get("RECSYS_TOPK_KILLS", "3")):  # `make soak` sets 20
        killed = run_and_kill(arguments, folder, environment, moments.uniform(0.02, 0.6) * whole) == -signal.SIGKILL
        kills += killed
        wait_for_the_end(folder)
        check_link(folder)
        if killed:
            continue
        if (folder / "current").resolve().name == DAYS[2]:
            assert_same(weights(undisturbed, DAYS[2]), weights(folder, DAYS[2]))
            assert entries(folder)[-1]["gate"]["in_service"] > 0
            shutil.rmtree(folder / "o")
            (folder / "current").unlink()
            only(world, folder, DAYS[:2])
            continue
        assert entries(folder) == first
        only(world, folder, DAYS[:3])
    only(world, folder, DAYS[:3])
    assert run_and_kill(arguments, folder, environment, 600) == 0
    assert_same(weights(undisturbed, DAYS[2]), weights(folder, DAYS[2]))
    assert (folder / "current").resolve().name == DAYS[2]


@pytest.mark.long
def test_new_items_with_rows_are_found_more_often_than_by_the_shared_row(
    made_once: Callable[..., Path], environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a world where only the items' own appeal counts, and new items come every day."""
    from recsys_topk.cascades.inference import apply_quotas
    from recsys_topk.cascades.module import CascadeModule
    from recsys_topk.datamodules import WorldConfig, simulate

    monkeypatch.setenv("RECSYS_TOPK_CACHE", environment["RECSYS_TOPK_CACHE"])
    only_appeal = {"taste": 0.0, "context": 0.0, "freshness": 0.0, "popularity": 3.0}
    world = WorldConfig(users=50, items=600, days=4, requests=300, new_items=60, **only_appeal)
    root = str(simulate(tmp_path / "world", world))
    monkeypatch.setattr(Online, "_publish", lambda self, record, parts: record["parts"][-1].update(published=False))
    recall = {}
    for kind in ("compact", "growing"):
        data = {"root": root, "batch_size": 50, "eval_negatives": 0, "vocabulary": {"video_id": kind}}
        trainer = {"max_epochs": 2, "accelerator": "cpu", "logger": False}
        config = {"data": data, "model": {"lr": 0.03, "init_std": 0.1}, "trainer": trainer}
        online = Online(config, tmp_path / "no-link", tmp_path / kind, Gate())
        online.advance()
        first, before = entries_of(tmp_path / kind)[0], entries_of(tmp_path / kind)[2]
        model = CascadeModule.load_from_checkpoint(tmp_path / kind / before["checkpoint"], map_location="cpu").eval()
        test = online._data({DAYS[3]: root}, tmp_path / kind / before["vocabularies"])
        known = online._data({DAYS[0]: root}, tmp_path / kind / first["vocabularies"]).shard(DAYS[0])
        hits = total = 0
        for batch in test.loader([DAYS[3]], training=False):
            with torch.no_grad():
                kept = apply_quotas(model(batch), batch.mask, model.cascade.quotas).kept
            new = ~torch.isin(batch.item_id[batch.candidates], known.catalogue().item_id)
            positive = new & batch.mask & (batch.labels > model.schema.positive_above)
            hits, total = hits + int((kept & positive).sum()), total + int(positive.sum())
        assert total > 300
        recall[kind] = hits / total
    assert recall["growing"] > recall["compact"] + 0.1, recall


def test_parts_of_lists_are_complete_when_marked_or_when_a_later_one_exists(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    for root, write in (
        (str(tmp_path), lambda name: (tmp_path / name).parent.mkdir(exist_ok=True) or (tmp_path / name).touch()),
        ("memory://log", lambda name: memory.pipe(f"/log/{name}", b"")),
    ):
        parts = Parts.of({"class_path": "lists", "init_args": {"root": root}})
        assert parts.complete() == {}
        write("day=2024-01-13/a.parquet")
        assert list(parts.complete()) == []
        write("day=2024-01-13/_SUCCESS")
        assert list(parts.complete()) == ["2024-01-13"]
        write("day=2024-01-15/b.parquet")
        write("tmp/c.parquet")
        assert list(parts.complete()) == ["2024-01-13"]
        write("2024-01-15T06/b.parquet")
        assert parts.complete()["2024-01-15"].endswith("/day=2024-01-15")
        found = parts.arguments(newest(parts.complete(), "2024-01-15", 7), Path("v"))
        assert [Path(place).name for place in found["root"]] == ["day=2024-01-13", "day=2024-01-15"]
        assert found["val"] == found["test"] == found["root"][1]


def test_days_of_recflow_are_complete_when_their_three_files_exist(world: Path, tmp_path: Path) -> None:
    parts = Parts.of({"class_path": "recflow", "init_args": {"root": str(tmp_path / "world")}})
    assert parts.complete() == {}
    only(world, tmp_path, [DAYS[0], DAYS[2], DAYS[3]])
    (tmp_path / "world" / "data" / "request_id_dict" / f"{DAYS[3]}.pkl").unlink()
    assert list(parts.complete()) == [DAYS[0], DAYS[2]]
    whole = dict.fromkeys(DAYS, "world")
    assert parts.arguments(newest(whole, DAYS[2], 2), None)["train_days"] == f"{DAYS[1]}:{DAYS[2]}"
    assert parts.arguments(parts.complete(), None)["train_days"] == f"{DAYS[2]}:{DAYS[2]}"  # the day before is missing
    with pytest.raises(ValueError, match=r"online takes --data\.root DIR"):
        Parts.of({"class_path": "interactions", "init_args": {"root": "clicks.csv"}})


def test_gate_compares_and_names_mistakes() -> None:
    found = {"joint_recall@10@20": 0.5, "ndcg@5": float("nan")}
    assert Gate.parse("joint_recall -0.01").judge("", found, {"joint_recall@10@20": 0.505})["passed"]
    assert not Gate.parse("joint_recall -0.001").judge("", found, {"joint_recall@10@20": 0.505})["passed"]
    assert Gate().judge("joint_recall@10@20", found, {})["passed"]
    assert not Gate.parse("ndcg@5 -1").judge("", found, {})["passed"]
    with pytest.raises(ValueError, match="--gate 'joint_recal' is no metric; did you mean"):
        Gate.parse("joint_recal 0").judge("", found, {})
    with pytest.raises(ValueError, match="--gate must be METRIC DIFFERENCE"):
        Gate.parse("joint_recall")


def test_rollback_points_to_the_export_published_before(tmp_path: Path, in_process: Callable[..., Result]) -> None:
    parts = [{"part": day, "published": day != DAYS[2]} for day in DAYS]
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "online.json").write_text(json.dumps({"parts": parts}))
    for day in DAYS:
        (tmp_path / "o" / "exports" / day).mkdir(parents=True)
    link = tmp_path / "current"
    link.symlink_to(f"o/exports/{DAYS[3]}")
    assert in_process(tmp_path, "rollback", "current").stdout == f"current: {DAYS[1]}\n"
    assert link.resolve() == (tmp_path / "o" / "exports" / DAYS[1]).resolve()
    assert roll_back(link) == DAYS[0]
    with pytest.raises(ValueError, match=f"no export before {DAYS[0]} to roll back to; kept: {DAYS[0]}, "):
        roll_back(link)
    with pytest.raises(ValueError, match="no export 2024-01-15 to roll back to"):
        roll_back(link, DAYS[2])
    assert roll_back(link, DAYS[3]) == DAYS[3]
    with pytest.raises(ValueError, match="not a link that `recsys-topk online` published"):
        roll_back(tmp_path / "o")


def write_lists(folder: Path, day: int) -> None:
    """Write the lists of a day: every day has ten items that are new."""
    draw = np.random.default_rng(day)
    rows = []
    for request in range(30):
        items = draw.permutation(np.arange(10 * day, 10 * day + 40))[:12]
        stages = ["shown"] * 3 + ["ranked"] * 4 + ["recalled"] * 5
        rows += [{"request": f"{day}-{request}", "user": f"u{request % 9}", "item": f"i{item}", "stage": stage}
                 for item, stage in zip(items, stages, strict=True)]  # fmt: skip
    place = folder / "log" / f"day={DAYS[day]}"
    place.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), place / "part-0.parquet")
    (place / "_SUCCESS").touch()


def test_lists_of_a_funnel_with_growing_items(tmp_path: Path, in_process: Callable[..., Result]) -> None:
    features = {
        "user": {"user": "categorical"},
        "items": {"item": "categorical"},
        "tables": {"item": "growing:min_count=2"},
    }
    (tmp_path / "lists.yaml").write_text(json.dumps({"data": {
        "class_path": "lists", "features": features, "labels": {"shown": 3, "ranked": 2, "recalled": 1},
    }}))  # fmt: skip
    command = [*ONLINE[:2], "log", *ONLINE[3:9], "--config", "lists.yaml", "--trainer.max_epochs=1", "--model.k=3"]
    command += ["--model.stages=[{kind: two_tower, name: retrieval, quota: 6}]", *FIT[-2:]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Online, "_export", lambda self, entry, parts, target: (target / "export").mkdir())
        patch.setattr("recsys_topk.experiments.online.measure_export", lambda export, model, data: {
            model.monitor: float(sum(batch.size for batch in data.newest_requests("train")))})  # fmt: skip
        for day in range(2):
            write_lists(tmp_path, day)
            done = in_process(tmp_path, *command)
            assert done.returncode == 0, done.stderr
    first, second = entries(tmp_path)
    assert "metrics" in second
    assert second["gate"] == {**second["gate"], "new": 3.0, "in_service": 3.0, "passed": True}  # a tenth of 30
    old, new = (FeatureEncoder.load(tmp_path / "o" / one["vocabularies"]) for one in (first, second))
    asked = [f"i{item}" for item in range(40)]
    assert old.vocabularies["item"].encode(asked).tolist() == new.vocabularies["item"].encode(asked).tolist()
    assert old.vocabularies["user"] == new.vocabularies["user"]
    assert not old.vocabularies["item"].known(["i45"]).any()
    assert new.vocabularies["item"].known(["i45"]).all()
    (name,) = [name for name in weights(tmp_path, DAYS[1])["state_dict"] if name.endswith(".item.weight")]
    assert len(weights(tmp_path, DAYS[1])["state_dict"][name]) == new.vocabularies["item"].rows
