"""The funnel log of the service: against the answers and the stages, read by the data module, and under failure."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from fastapi.testclient import TestClient

from recsys_topk.cli.main import main
from recsys_topk.datamodules.lists.datamodule import ListsDataModule
from recsys_topk.serving import funnel_log, row_log
from recsys_topk.serving.recommend import CascadeRecommender
from recsys_topk.serving.service import ServiceOptions, make_app
from tests.serving.films import DESCRIPTION, NAMES, QUOTAS, raw_request

Row = dict[str, Any]
DROPPED = 12


def client_of(export: Path, folder: Path, **options: Any) -> TestClient:
    given = {"log_share": 1.0, "log_dropped": DROPPED, "watch": 0.0, **options}
    return TestClient(make_app(export, options=ServiceOptions(log=str(folder), **given)))


def read(folder: Path) -> list[Row]:
    found = pq.read_table(folder).to_pylist() if list(folder.glob("*.parquet")) else []
    return sorted(found, key=lambda row: (row["timestamp"], row["request_id"]))


def counted(client: TestClient) -> dict[str, float]:
    lines = client.get("/metrics").text.splitlines()
    rows = [line.split() for line in lines if line.startswith("recsys_topk_log_rows_total{")]
    return {name.partition("{")[2]: float(number) for name, number in rows}


@pytest.fixture(scope="module")
def logged(films: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A log of 60 requests and some clicks, and the answers by request."""
    folder = tmp_path_factory.mktemp("logged") / "log"
    answers: dict[str, Any] = {}
    with client_of(films, folder) as client:
        for number in range(60):
            body = {"rows": [raw_request(number)], "number": 4}
            answer = client.post("/recommend", json=body, headers={"X-Request-ID": f"r{number}"})
            assert answer.headers["X-Request-ID"] == answer.json()["request"] == f"r{number}"
            answers[f"r{number}"] = [one["item"] for one in answer.json()["recommendations"][0]]
        events = [
            {"request": name, "item": items[place], "event": event, "value": 1.5}
            for name, items in answers.items()
            for place, event in ((1, "click"), (1, "view"), (2, "view"), (3, "hover"))
        ]
        events.append({"request": "elsewhere", "item": NAMES[0], "event": "click"})
        assert client.post("/feedback", json={"events": events}).json() == {"accepted": len(events)}
    return folder, answers


def test_every_item_has_its_stage_scores_and_position(films: Path, logged: tuple[Path, dict[str, Any]]) -> None:
    folder, answers = logged
    recommender = CascadeRecommender.from_export(films)
    rows = read(folder)
    assert sorted(row["request_id"] for row in rows) == sorted(answers)
    for row in rows:
        number = int(row["request_id"][1:])
        passages = recommender.passages([raw_request(number)])[0]
        names = [[NAMES[one] for one in passage.kept] for passage in passages]
        scores = [dict(zip([NAMES[one] for one in p.rows], p.scores, strict=True)) for p in passages]
        own = dict(zip(row["item_id"], zip(row["stage"], row["position"], strict=True), strict=True))
        assert len(own) == QUOTAS[0] + DROPPED
        for item, (stage, position) in own.items():
            shown = answers[row["request_id"]]
            reached = "shown" if item in shown else "ranking" if item in names[1] else "retrieval"
            assert stage == (reached if item in names[0] else "dropped")
            assert position == (shown.index(item) + 1 if item in shown else None)
        for stage, wanted in zip(("retrieval", "ranking"), scores, strict=True):
            found = dict(zip(row["item_id"], row[f"funnel_score_{stage}"], strict=True))
            assert {item: score for item, score in found.items() if score is not None} == pytest.approx(
                wanted, rel=1e-4
            )
        chance = DROPPED / (len(NAMES) - QUOTAS[0])
        wanted_chances = [chance if stage == "dropped" else 1.0 for stage in row["stage"]]
        assert row["funnel_inclusion"] == pytest.approx(wanted_chances)
        assert (row["funnel_share"], row["funnel_export"]) == (1.0, recommender.identity)


def test_logged_features_and_histories_are_encoded_like_the_request(
    films: Path, logged: tuple[Path, dict[str, Any]]
) -> None:
    recommender = CascadeRecommender.from_export(films)
    rows = read(logged[0])
    wanted = recommender.requests([raw_request(int(row["request_id"][1:])) for row in rows])
    found = recommender.requests(rows)
    for name, values in wanted.inputs().items():
        np.testing.assert_array_equal(found.inputs()[name], values, err_msg=name)


def test_users_by_name_several_lists_and_limits(films: Path, tmp_path: Path) -> None:
    with client_of(films, tmp_path / "log") as client:
        body = {"users": ["user 3", "user 5"], "exclude_seen": True, "where": {"genre": ["war"]}, "number": 1}
        answer = client.post("/recommend", json=body, headers={"X-Request-ID": "not a name"}).json()
        assert client.post("/recommend", json={"users": ["user 3"], "where": {"colour": ["x"]}}).status_code == 422
        for wrong in ({"events": []}, {"events": [{"request": "a", "item": "b"}]}):
            assert client.post("/feedback", json=wrong).status_code == 422
    rows = read(tmp_path / "log")
    assert [row["request_id"] for row in rows] == [f"{answer['request']}/{place}" for place in (0, 1)]
    recommender = CascadeRecommender.from_export(films)
    for row, number in zip(rows, (3, 5), strict=True):
        history = raw_request(number)["history"]
        assert (row["user_id"], row["history"], row["age"]) == (f"user {number}", history, None)
        passing = {NAMES[one] for one in recommender.filters.find({"genre": ["war"]}).rows} - set(history)
        assert set(row["item_id"]) <= passing
        dropped = row["stage"].count("dropped")
        assert dropped == DROPPED
        assert min(row["funnel_inclusion"]) == pytest.approx(DROPPED / (len(passing) - QUOTAS[0]))


def test_dropped_items_are_drawn_with_the_logged_probability(films: Path) -> None:
    recommender = CascadeRecommender.from_export(films)
    passages = recommender.passages([raw_request(1)], exclude_seen=True)[0]
    tables = funnel_log.ServedTables(1.0, DROPPED)
    served = [funnel_log.Served(str(n), raw_request(1), passages, 3, recommender) for n in range(2000)]
    (table,) = tables(served)
    rows = table.select(["item_id", "stage", "funnel_inclusion"]).to_pylist()
    never = {*[NAMES[one] for one in passages[0].kept], *raw_request(1)["history"]}
    drawn = [
        item for row in rows for item, stage in zip(row["item_id"], row["stage"], strict=True) if stage == "dropped"
    ]
    assert not set(drawn) & never
    share = np.array([drawn.count(item) for item in NAMES if item not in never]) / len(rows)
    chance = DROPPED / (len(NAMES) - len(never))
    assert {min(row["funnel_inclusion"]) for row in rows} == {chance}
    assert abs(share - chance).max() < 5 * (chance / len(rows)) ** 0.5


def test_share_is_a_sample_by_the_id(films: Path, tmp_path: Path) -> None:
    names = [f"r{number}" for number in range(40)]
    with client_of(films, tmp_path / "log", log_share=0.3) as client:
        for name in names:
            assert client.post("/recommend", json={"rows": [{}]}, headers={"X-Request-ID": name}).status_code == 200
    found = {row["request_id"] for row in read(tmp_path / "log")}
    assert found == {name for name in names if funnel_log.is_sampled(name, 0.3)}
    assert 3 < len(found) < 25


def test_slow_or_failing_disk_drops_rows_counts_them_and_answers(
    films: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, real = threading.Event(), row_log.whole_file
    broken: list[bool] = [False]

    def slow(path: Path) -> Any:
        gate.wait(60)
        if broken[0]:
            raise OSError(28, "No space left on device")
        return real(path)

    monkeypatch.setattr(row_log, "whole_file", slow)
    ask = {"rows": [raw_request(1)]}
    with client_of(films, tmp_path / "log", log_queue=5, log_seconds=0.0) as client:
        assert client.post("/recommend", json=ask).status_code == 200
        while client.app.state.logs[0]._rows:  # the thread has taken the row and waits for the disk
            time.sleep(0.01)
        time.sleep(0.05)
        for _ in range(9):
            assert client.post("/recommend", json=ask).status_code == 200
        many = [{"request": "a", "item": NAMES[0], "event": "click"}] * 6
        assert client.post("/feedback", json={"events": many}).status_code == 503
        assert counted(client)['log="requests",outcome="dropped"}'] == 4.0
        broken[0] = True
        gate.set()
        while sum(number for name, number in counted(client).items() if "requests" in name) < 10:
            time.sleep(0.01)
        totals = counted(client)
    assert totals['log="requests",outcome="dropped"}'] == 10.0  # two files could not be written
    assert totals['log="feedback",outcome="dropped"}'] == 6.0
    assert read(tmp_path / "log") == []


def test_files_roll_by_size_and_time_and_are_complete_when_they_appear(films: Path, tmp_path: Path) -> None:
    with client_of(films, tmp_path / "log", log_bytes=1) as client:
        for _ in range(2):
            client.post("/recommend", json={"rows": [raw_request(2)]})
            time.sleep(0.5)
        assert len(list((tmp_path / "log").iterdir())) >= 1
    with client_of(films, tmp_path / "log", log_seconds=3600) as client:
        client.post("/recommend", json={"rows": [raw_request(2)]})
        time.sleep(0.5)
        before = len(list((tmp_path / "log").iterdir()))
    assert len(list((tmp_path / "log").iterdir())) == before + 1
    assert len(read(tmp_path / "log")) == 3


def test_schema_guesses_the_log_and_training_data_have_its_labels(
    logged: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, answers = logged
    assert main(["schema", str(folder), "--out", str(tmp_path / "log.yaml")]) == 0
    guessed = yaml.safe_load((tmp_path / "log.yaml").read_text())["data"]["init_args"]
    roles = {name: guessed[name] for name in ("request", "item", "stage", "time", "user", "history")}
    assert roles == {"request": "request_id", "item": "item_id", "stage": "stage", "time": "timestamp",
                     "user": "user_id", "history": "history"}  # fmt: skip
    assert guessed["labels"] == {"shown": 3, "ranking": 2, "retrieval": 1, "dropped": 0}
    used = json.dumps(guessed["features"])
    assert "age" in used
    assert "funnel_" not in used
    features = {**DESCRIPTION, "items": {"item_id": "categorical"}}
    data = ListsDataModule(
        str(folder), feedback=f"{folder}-feedback", events={"view": 8, "click": 30}, features=features,
        split="fraction", val_fraction=0.2, test_fraction=0.2, cache_dir=str(tmp_path),
    )  # fmt: skip
    data.prepare_data()
    assert data.schema.groups == ("click", "view", "shown", "ranking", "retrieval", "dropped")
    logged_rows = {row["request_id"]: row for row in read(folder)}
    seen = 0
    for split in ("train", "val", "test"):
        for batch in data.loader(data.splits[split], training=False):
            requests = data.request_names(split, batch.request_id.numpy())
            for place, request in enumerate(requests):
                row, shown = logged_rows[request], answers[request]
                items = data.item_names(batch.item_id[batch.candidates[place][batch.mask[place]]].numpy())
                labels = batch.labels[place][batch.mask[place]].tolist()
                told = {shown[1]: 30.0, shown[2]: 8.0}
                stages = dict(zip(row["item_id"], row["stage"], strict=True))
                wanted = {item: told.get(item, float(guessed["labels"][stage])) for item, stage in stages.items()}
                assert dict(zip(items.tolist(), labels, strict=True)) == wanted
                seen += 1
    assert seen == 60
    counts = data.prepared.facts["counts"]
    assert counts["items with an event"] == 120
    assert counts["items with an event that are in no list"] == 1


@pytest.mark.long
def test_fit_trains_on_the_log_and_the_feedback(
    logged: tuple[Path, dict[str, Any]], tmp_path: Path, in_process: Any
) -> None:
    short = ("--trainer.max_epochs=1", "--trainer.accelerator=cpu", "--name=own", f"--data.cache_dir={tmp_path}")
    told = (f"--data.feedback={logged[0]}-feedback", "--data.events={click: 30, view: 8}")
    done = in_process(tmp_path, "fit", "--data", "lists", f"--data.root={logged[0]}", *told, *short)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "runs" / "own").rglob("last.ckpt"))
