"""Files are written atomically."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from recsys_topk.files import whole_file, write_whole


def test_file_appears_only_when_complete(tmp_path: Path) -> None:
    target = tmp_path / "new" / "a.bin"
    with whole_file(target) as file:
        file.write(b"one")
        assert not target.exists()
    assert target.read_bytes() == b"one"
    write_whole(target, "two")
    assert [path.name for path in target.parent.iterdir()] == ["a.bin"]
    assert target.read_text() == "two"


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "a.bin"
    write_whole(target, b"before")
    with pytest.raises(TypeError), whole_file(target) as file:
        file.writelines([b"half", None])  # type: ignore[list-item]
    assert target.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.skipif(os.name != "posix", reason="umask")
def test_new_file_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_whole(tmp_path / "private", "x")
    finally:
        os.umask(before)
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o600
