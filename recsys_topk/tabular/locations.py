"""Paths of data files on the local disk or, given as a URL, on any file system that fsspec supports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import Self


class RemotePath:
    """A file or folder on an fsspec file system, with the methods of `pathlib.Path` that readers need.

    Args:
        filesystem: The fsspec file system.
        path: The path on the file system, without the protocol.
    """

    def __init__(self, filesystem: Any, path: str) -> None:
        self.filesystem = filesystem
        self.path = path.rstrip("/") or "/"

    @property
    def name(self) -> str:
        """The last component of the path."""
        return self.path.rpartition("/")[2]

    @property
    def stem(self) -> str:
        """The last component without its suffix."""
        return Path(self.name).stem

    @property
    def suffix(self) -> str:
        """The suffix of the last component, including the dot."""
        return Path(self.name).suffix

    @property
    def parent(self) -> Self:
        """The folder that contains the path."""
        return type(self)(self.filesystem, self.path.rpartition("/")[0])

    def is_dir(self) -> bool:
        """Return whether the path is an existing folder."""
        return bool(self.filesystem.isdir(self.path))

    def is_file(self) -> bool:
        """Return whether the path is an existing file."""
        return bool(self.filesystem.isfile(self.path))

    def glob(self, pattern: str) -> Iterator[Self]:
        """Yield the paths below this folder that match `pattern`."""
        return (type(self)(self.filesystem, found) for found in self.filesystem.glob(f"{self.path}/{pattern}"))

    def open(self, mode: str = "rb") -> IO[Any]:
        """Open the file."""
        file: IO[Any] = self.filesystem.open(self.path, mode)
        return file

    def resolve(self) -> Self:
        """Return the path itself, because a URL needs no resolution."""
        return self

    def __truediv__(self, part: str) -> Self:
        return type(self)(self.filesystem, f"{self.path.rstrip('/')}/{part}")

    def __str__(self) -> str:
        return str(self.filesystem.unstrip_protocol(self.path))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))


AnyPath = Path | RemotePath


def location(root: str | Path | RemotePath) -> AnyPath:
    """Return a `Path` for a local path or URL, and a `RemotePath` for any other URL.

    The fsspec package of the protocol must be installed, e.g. s3fs for ``s3://``. It also finds the access keys.

    Example:
        >>> location("file:///data/recflow").as_posix(), location("memory://bucket/recflow").name
        ('/data/recflow', 'recflow')
    """
    if isinstance(root, RemotePath):
        return root
    if "://" not in str(root):
        return Path(root).expanduser()
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    try:
        filesystem, path = fsspec.core.url_to_fs(str(root))
    except ValueError as error:
        raise ValueError(f"{root}: {error}; known are e.g. file://, s3://, gs://, az://, hf://, https://") from None
    except ImportError as error:
        raise ImportError(f"{root}: {error}") from None
    return Path(path) if isinstance(filesystem, LocalFileSystem) else RemotePath(filesystem, path)


def version_of(path: AnyPath) -> tuple[int, int | str]:
    """Return the size of a file and a value that changes when the file is rewritten: a time in ns, or a hash."""
    if isinstance(path, Path):
        stat = path.stat()
        return stat.st_size, stat.st_mtime_ns
    return int(path.filesystem.size(path.path)), str(path.filesystem.ukey(path.path))
