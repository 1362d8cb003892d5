"""Files of a data set on the local disk or, by URL, on any file system that fsspec knows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self


class RemotePath:
    """A file or folder of an fsspec file system, with the part of `pathlib.Path` that readers need.

    Args:
        filesystem: The fsspec file system.
        path: The path in it, without protocol.
    """

    def __init__(self, filesystem: Any, path: str) -> None:
        self.filesystem = filesystem
        self.path = path.rstrip("/") or "/"

    @property
    def name(self) -> str:
        """The last part."""
        return self.path.rpartition("/")[2]

    @property
    def stem(self) -> str:
        """The last part without its ending."""
        return Path(self.name).stem

    @property
    def suffix(self) -> str:
        """The ending of the last part, with its dot."""
        return Path(self.name).suffix

    @property
    def parent(self) -> Self:
        """The folder it is in."""
        return type(self)(self.filesystem, self.path.rpartition("/")[0])

    def is_dir(self) -> bool:
        """Return whether it is a folder."""
        return bool(self.filesystem.isdir(self.path))

    def is_file(self) -> bool:
        """Return whether it is a file."""
        return bool(self.filesystem.isfile(self.path))

    def glob(self, pattern: str) -> Iterator[Self]:
        """Return what matches `pattern` below it."""
        return (type(self)(self.filesystem, found) for found in self.filesystem.glob(f"{self.path}/{pattern}"))

    def open(self, mode: str = "rb") -> IO[Any]:
        """Open the file."""
        file: IO[Any] = self.filesystem.open(self.path, mode)
        return file

    def resolve(self) -> Self:
        """Return itself: a URL has one form."""
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
    """Return a path or URL as something to list and open: a `Path` if it is local, else a `RemotePath`.

    Needs the package of the protocol, e.g. s3fs for ``s3://``; access keys come from where that package looks for them.

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
    """Return the size of a file and something that differs if it is written again: a time in ns, or a hash."""
    if isinstance(path, Path):
        stat = path.stat()
        return stat.st_size, stat.st_mtime_ns
    return int(path.filesystem.size(path.path)), str(path.filesystem.ukey(path.path))
