"""Features are fitted in batches, encoded like a loop over rows, and saved for serving without torch."""

from __future__ import annotations

import datetime as dt
import math
import statistics
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml

from recsys_topk.cli.main import main
from recsys_topk.tabular.features.description import Description
from recsys_topk.tabular.features.encoder import FeatureEncoder
from recsys_topk.tabular.features.fitter import FeatureFitter, fit_features
from recsys_topk.tabular.features.guess import guess_feature
from recsys_topk.tabular.tables.times import check_one_unit, describe_times, guess_unit, microseconds, time_part

PLAIN: dict[str, Any] = {
    "user": {"country": "categorical", "age": {"kind": "numeric", "transform": "standardise"}},
    "context": {
        "at": {"kind": "time", "column": "when", "parts": ["hour", "weekday", "month", "day"], "utc_offset": 8}
    },
    "items": {
        "film": {"kind": "categorical", "table": "film"},
        "tags": {"kind": "bag", "size": 2, "table": "word"},
        "genres": {"kind": "bag", "separator": "|", "table": "word"},
        "price": {"kind": "numeric", "transform": "log"},
        "votes": {"kind": "numeric", "transform": "bucketise", "buckets": 4},
        "plot": {"kind": "vector"},
        "xy": {"kind": "vector", "columns": ["x", "y"], "transform": "none"},
    },
    "history": ["film", "genres"],
    "tables": {"film": {"kind": "hash", "rows": 50}, "word": "compact:min_count=2"},
}


def item_rows(number: int, seed: int) -> list[dict[str, Any]]:
    draw = np.random.default_rng(seed)

    def maybe(value: Any) -> Any:
        return None if draw.random() < 0.2 else value

    return [
        {
            "film": maybe(int(draw.integers(1000))),
            "tags": maybe([str(word) for word in draw.choice(list("abcdefg"), int(draw.integers(0, 5)))]),
            "genres": maybe("|".join(draw.choice(list("abchij"), int(draw.integers(1, 4))))),
            "price": maybe(float(draw.exponential(20))),
            "votes": maybe(int(draw.integers(0, 1000))),
            "plot": maybe([float(x) for x in draw.normal(size=3)]),
            "x": float(draw.normal()),
            "y": maybe(float(draw.normal())),
        }
        for _ in range(number)
    ]


@pytest.fixture(scope="module")
def train() -> list[dict[str, Any]]:
    return item_rows(300, 0)


@pytest.fixture(scope="module")
def encoder(train: list[dict[str, Any]]) -> FeatureEncoder:
    fitter = FeatureFitter(Description.from_plain(PLAIN))
    for start in range(0, 300, 70):  # in batches
        fitter.update("items", pa.Table.from_pylist(train[start : start + 70]))
    fitter.update("user", {"country": ["de", "cn", None], "age": [20, 40, 60]})
    fitter.update("context", {"when": [0, 1]})
    return fitter.finish()


def moments(values: list[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.pstdev(values)


def test_encoding_equals_loop_over_rows(encoder: FeatureEncoder, train: list[dict[str, Any]]) -> None:
    words = [word for row in train for word in [*(row["tags"] or []), *(row["genres"] or "").split("|")] if word]
    known = {word for word in words if words.count(word) >= 2}
    mean, deviation = moments([math.log1p(row["price"]) for row in train if row["price"] is not None])
    plots = [moments([row["plot"][i] for row in train if row["plot"]]) for i in range(3)]
    votes = sorted(row["votes"] for row in train if row["votes"] is not None)
    edges = [float(np.quantile(votes, q)) for q in (0.25, 0.5, 0.75)]
    word_row = {word: int(encoder.vocabularies["word"].encode([word])[0]) for word in {*words, "new"}}
    assert len({word_row[word] for word in known} | {0, word_row["new"]}) == len(known) + 2

    rows = [*item_rows(80, 1), {"film": -5, "tags": ["new"], "genres": "a", "x": 1.0}]
    ids, values = encoder.encode("items", rows)
    schema = encoder.schema()
    at, of = schema.id_columns("items"), schema.value_columns("items")
    assert ids.shape == (81, 1 + 2 + 3 + 1)
    assert list(of) == ["price", "price_missing", "plot", "plot_missing", "xy", "xy_missing"]
    assert values.shape == (81, 2 + 4 + 3)
    film = encoder.vocabularies["film"]
    for row, own, numbers in zip(rows, ids, values, strict=True):
        assert own[at["film"]] == (0 if row["film"] is None else film.encode([row["film"]])[0])
        for name, found in (
            ("tags", row.get("tags") or []),
            ("genres", [w for w in (row["genres"] or "").split("|") if w]),
        ):
            here = [word_row[word] for word in found][: at[name].stop - at[name].start]
            assert own[at[name]].tolist() == here + [0] * (at[name].stop - at[name].start - len(here))
        vote = row.get("votes")
        bucket = 1 if vote is None else 2 + sum(vote >= edge for edge in edges)
        assert own[at["votes"]] == bucket
        price = row.get("price")
        expected = 0.0 if price is None else (math.log1p(price) - mean) / deviation
        assert numbers[of["price"]] == pytest.approx(expected, abs=1e-5)
        assert numbers[of["price_missing"]] == (price is None)
        plot = row.get("plot")
        expected_plot = [(p - m) / s for p, (m, s) in zip(plot, plots, strict=True)] if plot else [0.0] * 3
        assert numbers[of["plot"]].tolist() == pytest.approx(expected_plot, abs=1e-5)
        assert numbers[of["plot_missing"]] == (plot is None)
        assert numbers[of["xy"]].tolist() == pytest.approx([row["x"], row.get("y") or 0.0], abs=1e-6)
    rest = encoder.encode("items", rows[7:9])
    np.testing.assert_array_equal(rest.ids, ids[7:9])  # does not depend on the other rows
    views = encoder.encode("history", rows)
    np.testing.assert_array_equal(views.ids, np.concatenate([ids[:, at["film"]], ids[:, at["genres"]]], 1))


def test_encoded_ids_are_within_their_tables(encoder: FeatureEncoder) -> None:
    schema = encoder.schema(groups=("next",))
    assert [feature.name for feature in schema.request] == [
        "country", "age", "at_hour", "at_weekday", "at_month", "at_day",
    ]  # fmt: skip
    for part in ("items", "history"):
        ids = encoder.encode(part, item_rows(200, 2)).ids
        for feature in schema.features(part):
            if feature.table is not None:
                here = ids[:, schema.id_columns(part)[feature.name]]
                assert 0 <= here.min() <= here.max() < schema.table(feature.table).rows


def test_saved_encoder_needs_no_torch(encoder: FeatureEncoder, tmp_path: Path) -> None:
    encoder.save(tmp_path)
    rows = item_rows(20, 3)
    code = f"""
import sys
sys.modules["torch"] = None  # an import of torch fails
from recsys_topk.tabular.features.encoder import FeatureEncoder
encoder = FeatureEncoder.load({str(tmp_path)!r})
found = encoder.encode("items", {rows!r})
print(found.ids.tolist(), "#", found.values.tolist(), "#", encoder.schema().to_dict())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = encoder.encode("items", rows)
    expected = f"{found.ids.tolist()} # {found.values.tolist()} # {encoder.schema().to_dict()}"
    assert done.stdout.strip() == expected
    assert not list(tmp_path.glob("*.pkl"))
    (tmp_path / "features.json").write_text("{")
    with pytest.raises(ValueError, match=r"features\.json cannot be used"):
        FeatureEncoder.load(tmp_path)


def test_times_in_any_unit_are_equal() -> None:
    moment = dt.datetime(2024, 2, 29, 23, 30, 15, tzinfo=dt.UTC)
    seconds = int(moment.timestamp())
    columns = [
        pa.array([seconds]), pa.array([seconds * 1000]), pa.array([seconds * 10**6]), pa.array([seconds * 10**9]),
        pa.array([float(seconds)]), pa.array([str(seconds)]), pa.array([moment]), pa.array(["2024-02-29T23:30:15"]),
        pa.array(["2024-03-01T07:30:15+08:00"]), pa.array([moment.replace(tzinfo=None)]),
    ]  # fmt: skip
    for column in columns:
        time, missing = microseconds(column, guess_unit(column))
        assert (time.tolist(), missing.tolist()) == ([seconds * 10**6], [False]), column
    local = moment + dt.timedelta(hours=8)
    expected = {"hour": local.hour + 1, "weekday": local.isoweekday(), "day": local.day, "month": local.month}
    assert {part: int(time_part(time, part, 8)[0]) for part in expected} == expected
    assert describe_times("s", 0, seconds * 10**6) == "seconds, 1970-01-01 to 2024-02-29"
    with pytest.raises(ValueError, match="column 'when' has a value that is not a time"):
        microseconds(pa.array(["soon"]), "datetime", "when")


@pytest.mark.parametrize(
    ("number", "unit"),
    [
        (0, "s"), (10**11 - 1, "s"), (10**11, "ms"), (10**14 - 1, "ms"), (10**14, "us"), (10**17 - 100, "us"),
        (10**17, "ns"), (19000100, "s"), (19000101, "yyyymmdd"), (20991231, "yyyymmdd"), (20991232, "s"),
        (19000101000000, "yyyymmddhhmmss"), (20991231235959, "yyyymmddhhmmss"), (20991232000000, "ms"),
        (-20231114, "s"), ("20231114", "yyyymmdd"), (20231114.0, "yyyymmdd"), ("2023-11-14", "datetime"),
    ],
)  # fmt: skip
def test_unit_of_a_time_follows_from_its_size(number: object, unit: str) -> None:
    assert guess_unit(pa.array([number, None])) == unit


def test_numbers_written_as_dates_are_read_as_dates() -> None:
    days = [dt.date(1900, 1, 1) + dt.timedelta(days) for days in range(0, 73_000, 37)] + [dt.date(2099, 12, 31)]
    expected = [(day - dt.date(1970, 1, 1)).days * 86_400_000_000 for day in days]
    digits = [int(day.strftime("%Y%m%d")) for day in days]
    for column in (pa.array(digits), pa.array(map(str, digits)), pa.array(map(float, digits))):
        assert microseconds(column, guess_unit(column))[0].tolist() == expected
    clock = pa.array([20240229233015, None])
    time, missing = microseconds(clock, guess_unit(clock))
    assert dt.datetime.fromtimestamp(time[0] / 1e6, dt.UTC).isoformat() == "2024-02-29T23:30:15+00:00"
    assert missing.tolist() == [False, True]
    assert describe_times("yyyymmdd", 0, expected[-1]) == "dates written yyyymmdd, 1970-01-01 to 2099-12-31"
    assert guess_unit(pa.array(np.arange(0, 20231115, 1000))) == "s"  # a counter, not dates
    assert guess_feature("start_date", pa.array([20231114, 20231115])).feature.kind == "time"


@pytest.mark.parametrize(
    "wrong", [0, 20230229, 20231301, 20230012, 20231100, 20231132, 21000101, 20231114.5, 1e300, 1699920000]
)
def test_number_that_is_no_date_in_a_date_column_raises(wrong: float) -> None:
    column = pa.array([20231114.0, 20231115.0, wrong])
    with pytest.raises(ValueError, match=r"'day' has dates written yyyymmdd, and .* is not such a date"):
        microseconds(column, "yyyymmdd", "day")
    with pytest.raises(ValueError, match="not such a date"):
        microseconds(pa.array([20231114246000]), "yyyymmddhhmmss", "day")


NOW = 1_700_000_000


@pytest.mark.parametrize(
    ("times", "unit", "mixed"),
    [
        ([NOW * 1000, NOW], "ms", True),
        ([-NOW], "ms", True),  # a later batch, all in seconds
        ([NOW, NOW * 1000], "s", True),
        ([NOW * 10**6, NOW * 1000], "us", True),
        ([NOW * 10**9, NOW * 1000], "ns", True),
        ([0, NOW * 1000], "ms", False),  # 0 may mean unknown
        (range(0, 10**12, 10**8), "ms", False),  # milliseconds since a start, for 30 years
        ([0, 10**8, 10**10], "s", False),
    ],
)
def test_check_one_unit(times: Any, unit: str, mixed: bool) -> None:
    converted, _ = microseconds(pa.array(times), unit)
    with pytest.raises(ValueError, match="column 'at' mixes units") if mixed else nullcontext():
        check_one_unit(converted, unit, "at")


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"items": {"a": "categoric"}}, "did you mean 'categorical'"),
        ({"item": {"a": "bag"}}, "no part 'item'; did you mean 'items'"),
        ({"items": {"a": {"kind": "numeric", "transfrom": "log"}}}, "did you mean 'transform'"),
        ({"items": {"a": {"column": "b"}}}, "'a' has no kind"),
        ({"items": {"a": "bag"}, "history": ["b"]}, "history names 'b'"),
        ({"items": {"a": "bag"}, "tables": {"b": "hash:rows=9"}}, "tables names 'b', which no feature uses"),
        ({"items": {"a": {"kind": "time", "parts": ["hours"]}}}, "did you mean 'hour'"),
        ({"user": {"a": "numeric"}, "context": {"a": "numeric"}}, "two request features are called 'a'"),
    ],
)
def test_invalid_description_raises(plain: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Description.from_plain(plain)


def test_columns_that_do_not_match_their_description_raise() -> None:
    described = Description.from_plain({"items": {"a": "numeric", "v": "vector"}})
    with pytest.raises(ValueError, match=r"column 'a' must have numbers.*describe it as categorical"):
        fit_features(described, {"items": {"a": ["x"], "v": [[1.0]]}})
    with pytest.raises(ValueError, match="vector 'v' has 1 numbers, and row 1 has 2"):
        fit_features(described, {"items": {"a": [1, 2], "v": [[1.0], [1.0, 2.0]]}})
    encoder = fit_features(described, {"items": {"a": [1], "v": [[1.0]]}})
    with pytest.raises(ValueError, match="no column 'v'; it has: a"):
        encoder.encode("items", {"a": [1]})
    assert encoder.encode("items", {"a": [1]}, partial=True).values.shape == (1, 2)


def test_description_is_equal_after_yaml_round_trip() -> None:
    described = Description.from_plain(PLAIN)
    assert Description.from_plain(yaml.safe_load(yaml.safe_dump(described.to_plain(), sort_keys=False))) == described


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (pa.array(["a|b", "b", "a"] * 9), {"kind": "bag", "separator": "|", "size": 2}),
        (pa.array([["a", "b"], ["b"], ["a"]] * 9), {"kind": "bag", "size": 2}),
        (pa.array([[0.5, 1.0], [0.5, 2.0]]), {"kind": "vector", "size": 2}),
        (pa.array([1, 2, 3] * 9), {"kind": "categorical"}),
        (pa.array([True, False]), {"kind": "categorical"}),
        (pa.array([0.1, 0.2, 5000.0]), {"kind": "numeric", "transform": "log"}),
        (pa.array([dt.datetime(2024, 1, 1)]), {"kind": "time"}),
        (pa.array([f"title {n}" for n in range(99)]), None),
        (pa.array([1, 1, 1]), None),
        (pa.nulls(3), None),
    ],
)
def test_guess_feature_finds_the_kind(values: Any, expected: dict[str, Any] | None) -> None:
    found = guess_feature("x", values).feature
    assert (None if found is None else found.to_plain()) == expected


def test_schema_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "clicks.csv").write_text(
        "userId,movieId,timestamp,device\n" + "1,7,881250949,tv\n2,8,881250950,web\n" * 30
    )
    (tmp_path / "movies.csv").write_text(
        "movieId,genres\n" + "\n".join(f"{n},{'Comedy|' * (n % 2)}Drama" for n in range(30))
    )
    out = tmp_path / "features.yaml"
    assert main(["schema", str(tmp_path), "--out", str(out)]) == 0
    output = capsys.readouterr().out
    assert "user = userId, item = movieId, time = timestamp" in output
    described = Description.read(out)
    assert [feature.name for feature in described.items] == ["movieId", "genres"]
    assert described.items[1].separator == "|"
    assert not described.context  # device may be known only afterwards
    assert "device" in output
    assert main(["schema", str(tmp_path / "no.csv")]) == 2


def test_tables_of_times_buckets_and_vocabularies_have_different_names() -> None:
    described = Description.from_plain(
        {
            "user": {"hour": "categorical", "price": {"kind": "numeric", "transform": "bucketise", "buckets": 16}},
            "context": {"at": {"kind": "time", "parts": ["hour"]}},
            "items": {"price": {"kind": "numeric", "transform": "bucketise", "buckets": 4}},
        }
    )
    numbers = [float(n) for n in range(100)]
    rows = {
        "user": {"hour": ["a"] * 100, "price": numbers},
        "context": {"at": ["2024-01-01T23:00:00"]},
        "items": {"price": numbers},
    }
    encoder = fit_features(described, rows)  # type: ignore[arg-type]
    schema = encoder.schema()
    size = {table.name: table.rows for table in schema.tables}
    assert len(schema.tables) == len({feature.table for feature in (*schema.request, *schema.items)}) == 4
    request = np.concatenate(
        [encoder.encode("user", rows["user"]).ids.max(0), encoder.encode("context", rows["context"]).ids[0]]
    )
    largest = zip(
        [*schema.request, *schema.items], [*request, encoder.encode("items", rows["items"]).ids.max()], strict=True
    )
    for feature, most in largest:
        assert most < size[feature.table or ""], feature


def test_any_column_name_can_name_a_table_of_a_model() -> None:
    torch = pytest.importorskip("torch")
    names = ["item.id", "_x", *(name for name in dir(torch.nn.ModuleDict()) if not name.startswith("_"))]
    encoder = fit_features(Description.from_plain({"items": names}), {"items": {name: ["a", "b"] for name in names}})
    modules = torch.nn.ModuleDict()
    for table in encoder.schema(reserved=dir(modules)).tables:
        modules[table.name] = torch.nn.Identity()
    assert len(modules) == len(names)


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ({"items": {"a": {"kind": "numeric", "buckets": "many"}}}, "buckets 'many'; it must be a whole number"),
        ({"items": {"a": {"kind": "bag", "size": "2"}}}, "size '2'; it must be a whole number"),
        ({"items": {"a": {"kind": "numeric", "column": 5}}}, r"columns \[5\]; they must be names"),
        ({"items": {"a": {"kind": "time", "utc_offset": "CET"}}}, "utc_offset 'CET'; it must be a number"),
        ({"items": ["a"], "history": 5}, "history must be a list"),
        ({"items": ["a"], "tables": ["a"]}, "tables must map"),
    ],
)
def test_wrong_types_in_a_description_raise(description: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Description.from_plain(description)


def test_guess_feature_skips_bytes() -> None:
    assert guess_feature("picture", pa.array([b"\xff\xd8", b"\xff\x00"])).feature is None


def test_times_of_two_units_in_one_column_raise() -> None:
    with pytest.raises(ValueError, match="'at' has a value that is not a time: overflow"):
        microseconds(pa.array([1700000000, 1700000000000000]), "s", "at")
