"""Local paths and URLs can be listed, opened and compared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from recsys_topk.tabular.locations import RemotePath, location, version_of


@pytest.fixture
def bucket() -> Iterator[str]:
    """A prefix of an object store, which has no real folders and no memory mapping."""
    store = fsspec.filesystem("memory")
    store.pipe({"/bucket/days/2024-01-13.feather": b"one", "/bucket/days/2024-01-14.feather": b"three"})
    yield "memory://bucket"
    store.rm("/bucket", recursive=True)


def test_url_of_a_local_file_is_a_path(tmp_path: Path) -> None:
    assert location(f"file://{tmp_path}") == tmp_path
    assert location(tmp_path) == location(str(tmp_path)) == tmp_path


def test_remote_files_are_listed_and_opened(bucket: str) -> None:
    root = location(bucket)
    assert isinstance(root, RemotePath)
    days = sorted((root / "days").glob("*.feather"), key=str)
    assert [(day.stem, day.suffix, day.parent) for day in days] == [
        ("2024-01-13", ".feather", root / "days"),
        ("2024-01-14", ".feather", root / "days"),
    ]
    assert str(days[0]) == "memory:///bucket/days/2024-01-13.feather"
    assert location(str(days[0])) == days[0]
    assert days[1].open().read() == b"three"
    assert (root / "days").is_dir()
    assert days[0].is_file()
    assert not (root / "nothing").is_file()
    assert not (root / "nothing").is_dir()


def test_rewritten_file_has_another_version(bucket: str, tmp_path: Path) -> None:
    remote = location(f"{bucket}/days/2024-01-13.feather")
    local = tmp_path / "a"
    for path in (remote, local):
        if isinstance(path, Path):
            path.write_bytes(b"one")
        before = version_of(path)
        assert before == version_of(path)
        assert before[0] == 3
    assert isinstance(remote, RemotePath)
    before = version_of(remote)
    remote.filesystem.pipe(remote.path, b"two")
    assert version_of(remote) != before


def test_unknown_protocol_raises() -> None:
    with pytest.raises(ValueError, match="s4://bucket/data: Protocol not known: s4"):
        location("s4://bucket/data")
