"""Items and users of an export can be written, read back and found by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from recsys_topk.tabular.arrow import write_file
from recsys_topk.tabular.export_tables import ItemTable, Names, UserTable


@pytest.mark.parametrize("names", [[3, 7, 90], [90, 3, 7], ["b", "a", "zz"], [], [5]])
def test_names_are_found_like_in_a_dict(names: list[object]) -> None:
    index = Names(np.array(names, dtype=np.int64 if not names else None))
    rows = {name: row for row, name in enumerate(names)}
    wanted = [*names, *((1, 10**30, -4) if index.are_integers else ("", "zzz", "A"))]
    assert index.rows(np.array(wanted, dtype=object)).tolist() == [rows.get(name, -1) for name in wanted]


def test_integers_are_found_by_text_and_texts_by_integer() -> None:
    assert Names(np.array([3, 7])).rows(["7", "x", None, "3"]).tolist() == [1, -1, -1, 0]
    assert Names(np.array(["3", "7"])).rows([7, 8]).tolist() == [1, -1]


def test_texts_that_are_no_canonical_integers_are_not_found() -> None:
    names = Names(np.array([3, 10, 2**62 + 1]))
    assert names.rows(["010", "1_0", " 10", "10"]).tolist() == [-1, -1, -1, 1]
    assert names.rows([3.7, 3.0]).tolist() == [-1, 0]
    assert names.rows([str(2**62 + 1), None]).tolist() == [2, -1]
    assert Names(np.array([3], dtype=np.int32)).rows(["5000000000", "3"]).tolist() == [-1, 0]


@pytest.mark.parametrize("kind", [ItemTable, UserTable])
@pytest.mark.parametrize("content", ["cut", "empty", "other columns"])
def test_damaged_table_raises_an_error_that_names_the_file(
    kind: type[ItemTable | UserTable], content: str, tmp_path: Path
) -> None:
    path = tmp_path / "table.arrow"
    write_file(path, pa.table({"other": [1, 2, 3]}))
    whole = path.read_bytes()
    path.write_bytes({"cut": whole[:-8], "empty": b"", "other columns": whole}[content])
    with pytest.raises(ValueError, match=r"table\.arrow cannot be read"):
        kind.read(path)


@pytest.mark.parametrize("widths", [(2, 3), (0, 3), (2, 0)])
@pytest.mark.parametrize("names", [np.array([1, 5, 9, 2**40]), np.array(["a", "é", "", "b"])])
def test_items_are_equal_after_write_and_read(tmp_path: Path, names: np.ndarray, widths: tuple[int, int]) -> None:
    generator = np.random.default_rng(0)
    items = ItemTable(
        names,
        generator.integers(0, 2**31 - 1, (4, widths[0])),
        generator.normal(size=(4, widths[1])).astype(np.float32),
        np.arange(4),
    )
    items.write(tmp_path / "items.arrow")
    found = ItemTable.read(tmp_path / "items.arrow")
    for field in ("names", "ids", "values", "count"):
        np.testing.assert_array_equal(getattr(found, field), getattr(items, field))
        assert getattr(found, field).shape == getattr(items, field).shape


@pytest.mark.parametrize("views", [0, 1, 4])
def test_users_are_equal_after_write_and_read(tmp_path: Path, views: int) -> None:
    generator = np.random.default_rng(0)
    users = UserTable(
        names=np.array(["x", "y", "z"]),
        request=generator.integers(0, 2**40, (3, 2)),
        request_values=generator.normal(size=(3, 1)).astype(np.float32),
        history=generator.integers(0, 9, (3, views, 2)),
        history_length=np.array([0, views, views]),
        history_values=np.empty((3, views, 0), dtype=np.float32),
        seen=np.array([1, 2, 0]),
        seen_ends=np.array([1, 1, 3]),
    )
    users.write(tmp_path / "users.arrow")
    found = UserTable.read(tmp_path / "users.arrow")
    for field in ("names", "request", "request_values", "history_length", "seen", "seen_ends"):
        np.testing.assert_array_equal(getattr(found, field), getattr(users, field))
    assert found.history.shape[:2] == (3, views)
    if views:
        np.testing.assert_array_equal(found.history, users.history)
        assert found.history_values.shape == (3, views, 0)
    assert [found.seen_of(row).tolist() for row in range(3)] == [[1], [], [2, 0]]


def test_sorted_users_keep_their_seen_items() -> None:
    none = np.empty((3, 0), dtype=np.float32)
    users = UserTable(
        np.array([9, 2, 5]), none, none, none[:, None], np.zeros(3), none[:, None], np.arange(4), [2, 2, 4]
    )
    found = users.sorted()
    assert found.names.tolist() == [2, 5, 9]
    assert [found.seen_of(row).tolist() for row in range(3)] == [[], [2, 3], [0, 1]]
