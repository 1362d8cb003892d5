"""Rows of requests with the id of a known user, and what is said about names that the export does not know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from recsys_topk.cli.main import main
from recsys_topk.serving.recommend import CascadeRecommender
from recsys_topk.serving.service import ServiceOptions, make_app


@pytest.fixture(scope="module")
def known(sealed_export: Path) -> CascadeRecommender:
    return CascadeRecommender.from_export(sealed_export)


def ranked(found: list[Any]) -> list[tuple[Any, float]]:
    return [(one.item, pytest.approx(one.scores["ranking"], abs=1e-5)) for one in found]


def test_row_of_a_known_user_has_the_stored_features_and_history(known: CascadeRecommender) -> None:
    assert known.users is not None
    for user in known.users.names[:6].tolist():
        by_name = ranked(known.recommend([user])[0])
        # alone, beside unknown users, and with the id as the value of a feature
        assert ranked(known.recommend([{"user": user}])[0]) == by_name
        assert ranked(known.recommend([{"user": "zoe"}, {"user": user}])[1]) == by_name
        assert ranked(known.recommend([{"user": user, "user_id": user, "age": None, "history": None}])[0]) == by_name


def test_given_features_and_histories_replace_the_stored_ones(known: CascadeRecommender) -> None:
    assert known.users is not None
    user = known.users.names[2].item()
    mixed = known.requests([{"user": user, "age": 99}, {"user": user, "history": ["film 3"]}, {"age": 99}])
    stored = known.requests([user])
    length = int(stored.history_length[0])
    assert mixed.request_values[0] == pytest.approx(mixed.request_values[2])
    assert mixed.request_values[1] == pytest.approx(stored.request_values[0])
    assert mixed.history_length.tolist() == [length, 1, 0]
    assert np.array_equal(mixed.history[0][:length], stored.history[0][:length])
    assert np.array_equal(mixed.history[1][0], known.items.ids[known.items.index.rows(["film 3"])[0]])
    assert set(stored.seen[0]) <= set(mixed.seen[1])


def test_unknown_names_are_reported_and_known_ones_are_not(known: CascadeRecommender) -> None:
    assert known.users is not None
    user = known.users.names[0].item()
    assert known.unknown([user], ["film 1"], ["film 2"]) == []
    assert known.unknown([{"user": user, "age": 3, "history": ["film 1", {"item": "film 2"}]}]) == []
    found = known.unknown(
        [{"user": "zoe", "agee": 3, "history": ["film 1", {"item": "x\x1b[2J"}]}], ["film 1", "y"], ["z"] * 9
    )
    assert found == [
        "features that the export does not have, and that have no effect: 'agee' (did you mean 'age'?)",
        "1 of 1 users are not in the export and have only the given features: 'zoe'",
        r"1 of 2 items of histories are not in the export and have no effect: 'x\\x1b[2J'".replace(r"\\", "\\"),
        "1 of 2 allowed items are not in the export and have no effect: 'y'",
        "9 of 9 blocked items are not in the export and have no effect: 'z'",
    ]


def test_answers_have_warnings_and_the_funnel_has_titles(sealed_export: Path, tmp_path: Path) -> None:
    titles = tmp_path / "items.csv"
    titles.write_text("item_id,title\nfilm 3,Heat\n")
    options = ServiceOptions(watch=0, titles=str(titles))
    with TestClient(make_app(sealed_export, options=options)) as client:
        answer = client.post("/recommend", json={"users": ["u1"], "blocked": ["film 3", "nothing"]}).json()
        assert answer["warnings"] == ["1 of 2 blocked items are not in the export and have no effect: 'nothing'"]
        assert client.post("/recommend", json={"rows": [{"user": "u1"}]}).json()["warnings"] == []
        for user in ({"a": 1}, [1, 2], True, 1.5):
            wrong = client.post("/recommend", json={"rows": [{"user": user}, {"user": "u1"}]})
            assert (wrong.status_code, "the user of a row must be" in wrong.text) == (422, True)
        stages = client.post("/funnel", json={"user": "u1"}).json()["stages"]
    found = {one["item"]: one["title"] for stage in stages for one in stage["items"]}
    assert {name: title for name, title in found.items() if title} in ({"film 3": "Heat"}, {})
    assert set(found.values()) <= {"Heat", None}


def test_users_of_a_file_keep_their_ids(
    sealed_export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, export = tmp_path / "users.csv", str(sealed_export)
    file.write_text("uid,age,town\nu1,,\nu2,,\nzoe,30,x\n")

    def run(*options: str) -> tuple[list[dict[str, Any]], str]:
        assert main(["recommend", "--export", export, *options]) == 0
        output = capsys.readouterr()
        return [json.loads(line) for line in output.out.splitlines()], output.err

    lines, errors = run("--users", str(file))
    assert [line["user"] for line in lines] == ["u1", "u2", "zoe"]
    assert "1 of 3 users are not in the export and have only the given features: 'zoe'" in errors
    assert "have no effect: 'town'" in errors
    by_name, errors = run("--user", "u1", "--user", "u2")
    assert errors == ""
    for line, wanted in zip(lines, by_name, strict=False):
        assert [one["item"] for one in line["items"]] == [one["item"] for one in wanted["items"]]
    file.write_text("who,age\nu1,\nu2,4\n")
    assert [line["user"] for line in run("--users", str(file), "--id", "who")[0]] == ["u1", "u2"]
    assert [line["row"] for line in run("--users", str(file))[0]] == [0, 1]
    assert main(["recommend", "--export", export, "--users", str(file), "--id", "whom"]) == 2
    assert "has no column 'whom' (--id); it has: who, age" in capsys.readouterr().err
