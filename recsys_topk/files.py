"""Files: written completely or not at all, and compared with their checksums when they are opened; the cache folder.

A prepared folder has the hash of each of its files in `checksums.json`. A checkpoint is a ZIP file, whose entries have
a CRC-32 each. Both are compared once per file, size and time of change; a record of that is in the cache folder.
"""

from __future__ import annotations

import csv
import errno
import io
import json
import logging
import os
import secrets
import shutil
import uuid
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

CHECKSUMS: Final = "checksums.json"
FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE)
"""Errors of a disk that is full, of a file that is too large, and of too many open files."""
DISK_ERRORS: Final = (*FULL, errno.EROFS, errno.EACCES)
_MOST_RECORDS: Final = 10_000

log = logging.getLogger(__name__)


class DamagedError(ValueError):
    """A file differs from what was written. The message names it."""


def disk_error(error: BaseException | None) -> OSError | None:
    """Return the cause of an error if it is a full or read-only disk, a limit of the system, or a missing permission.

    Libraries raise errors of their own, which have the cause in their chain or only in their text.

    Example:
        >>> print(disk_error(RuntimeError("IO Error: No space left on device")))
        [Errno 28] No space left on device
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            return error
        for number in DISK_ERRORS:
            if not isinstance(error, ValueError) and os.strerror(number) in str(error):
                return OSError(number, os.strerror(number))
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def naming_disk_errors(path: Path) -> Iterator[None]:
    """Raise errors of the disk (`disk_error`) as an `OSError` that names `path`, unless they name a file already."""
    try:
        yield
    except Exception as error:
        cause = disk_error(error)
        if cause is None or cause.filename is not None:
            raise
        raise OSError(cause.errno, cause.strerror, str(path)) from error


@contextmanager
def whole_file(path: str | Path) -> Iterator[BinaryIO]:
    """Yield a temporary file that is renamed to `path` when the block ends, and removed if the block raises.

    The folder of the file is created if it is missing.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with naming_disk_errors(path), partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file atomically: a reader sees either the old file or all of `content`. Text is written as UTF-8."""
    with whole_file(path) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


def csv_text(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None, head: bool = True) -> str:
    """Return rows, values by column, as CSV. A row may omit columns; by default every key of any row is a column.

    Example:
        >>> csv_text([{"run": "dftopk", "recall": 0.5}, {"run": "listnet"}]).split()
        ['run,recall', 'dftopk,0.5', 'listnet,']
    """
    text = io.StringIO()
    names = columns or list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    if head:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def cache_home() -> Path:
    """Return the cache folder: $RECSYS_TOPK_CACHE if it is set, else recsys_topk in the user's cache folder."""
    chosen = os.environ.get("RECSYS_TOPK_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    user = os.environ.get("XDG_CACHE_HOME")
    return (Path(user).expanduser() if user else Path.home() / ".cache") / "recsys_topk"


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `target` if the block succeeds.

    If the block raises, the temporary folder is removed. If another process has created `target` in the meantime, that
    folder is kept and the temporary one is removed. A killed process leaves a hidden temporary folder behind;
    `remove_partial` removes it.

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "day"
        >>> with whole_folder(target) as folder:
        ...     _ = (folder / "a.txt").write_text("a")
        >>> [path.name for path in target.iterdir()]
        ['a.txt']
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = target.parent / f".{target.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.partial"
    folder.mkdir()
    try:
        with naming_disk_errors(target):
            yield folder
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_once(target: Path, write: Callable[[Path], None], *, resume: bool = False) -> bool:
    """Create a folder with checksums if it does not exist or is damaged; return whether it was created.

    `write` writes the content into the folder it is given. The folder appears only when it is complete, also if the
    process fails or is killed. A second process waits for the first. With `resume`, files of an interrupted or killed
    process are kept for the next one; they are removed if `write` raises an error. A damaged folder is logged.
    """
    from filelock import FileLock

    if target.is_dir() and find_damage(target) is None:
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent / ".lock"):
        if target.is_dir():
            if (damage := find_damage(target)) is None:
                return False
            log.warning("%s; the folder is prepared again", damage)
            shutil.rmtree(target)
        remove_partial(target)
        if not resume:
            with whole_folder(target) as folder:
                write(folder)
                add_checksums(folder)
            return True
        folder = target.parent / f".{target.name}.partial"
        folder.mkdir(exist_ok=True)
        try:
            with naming_disk_errors(target):
                write(folder)
                add_checksums(folder)
        except Exception:  # not an interruption: after the error is mended the folder may have another name
            shutil.rmtree(folder, ignore_errors=True)
            raise
        folder.rename(target)
    return True


def remove_partial(target: Path) -> None:
    """Remove the temporary folders of killed writers of `target`. The caller must hold the lock of the folder."""
    for dots in (".", ".."):  # two dots: of a folder in a temporary folder
        for folder in target.parent.glob(f"{dots}{target.name}.*.partial"):
            shutil.rmtree(folder, ignore_errors=True)


def file_hash(path: Path) -> str:
    """Return the XXH3 hash of a file (128 bits, several GB per second). It finds damage, not forgery."""
    import xxhash

    found = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return str(found.hexdigest())


def add_checksums(folder: Path) -> None:
    """Write the hashes of all files of a folder to its `checksums.json`."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != CHECKSUMS]
    hashes = {path.relative_to(folder).as_posix(): file_hash(path) for path in files}
    write_whole(folder / CHECKSUMS, json.dumps(hashes, indent=1) + "\n")


def find_damage(folder: Path) -> str | None:
    """Return which file of a folder differs from its `checksums.json`; None if none does, or without checksums.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "a.txt").write_text("a")
        >>> add_checksums(folder)
        >>> _ = (folder / "a.txt").write_text("b")
        >>> (find_damage(folder) or "").removeprefix(str(folder))
        '/a.txt is damaged: it differs from what was written'
    """
    sums = folder / CHECKSUMS
    if not sums.is_file():
        return None

    def compare(path: Path) -> None:
        if not path.is_file() or file_hash(path) != hashes[path.relative_to(folder).as_posix()]:
            raise DamagedError(f"{path} is damaged: it differs from what was written")

    try:
        hashes = json.loads(sums.read_bytes())
        check_once([folder / name for name in hashes], compare)
    except DamagedError as error:
        return str(error)
    except (ValueError, TypeError):
        return f"{sums} is damaged"
    return None


def check_zip(path: Path) -> None:
    """Raise `DamagedError` if a checkpoint is not a whole ZIP file, or claims more bytes than it has."""
    with path.open("rb") as file:
        try:
            archive = zipfile.ZipFile(file)
            claimed = sum(entry.file_size for entry in archive.infolist())
            if claimed > path.stat().st_size or any(entry.compress_type for entry in archive.infolist()):
                raise ValueError(f"it claims {claimed:,} bytes and has {path.stat().st_size:,}")
            if (wrong := archive.testzip()) is not None:
                raise ValueError(f"the checksum of {wrong} differs")
        except Exception as error:  # whatever the reader of ZIP files meets
            raise DamagedError(f"{str(path)!r} cannot be read: it is damaged, or no checkpoint ({error})") from error


def check_once(paths: Sequence[Path], check: Callable[[Path], None]) -> None:
    """Call `check` with each file, unless it passed with the same size and times of change before."""
    record = cache_home() / "checked.json"
    known: dict[str, str] = {}
    with suppress(OSError, ValueError, TypeError):
        known = dict(json.loads(record.read_bytes()))
    passed = {}
    for path in paths:
        name, version = str(path.resolve()), ""
        if path.is_file():
            stat = path.stat()
            version = f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"
        if not version or known.get(name) != version:
            check(path)
            passed[name] = version
    if passed:
        kept = list({**known, **passed}.items())[-_MOST_RECORDS:]
        with suppress(OSError):  # the cache folder cannot be written: the files are compared again next time
            write_whole(record, json.dumps(dict(kept)) + "\n")


def swap_link(link: str | Path, target: str | Path) -> None:
    """Point a symbolic link to `target`, relative to the folder of the link. A reader sees the old or the new target.

    Raises:
        ValueError: There is a file or a folder in the place of the link.
    """
    link = Path(link)
    if link.exists() and not link.is_symlink():
        raise ValueError(f"{str(link)!r} is a file or folder and no symbolic link; give another --publish, or move it")
    link.parent.mkdir(parents=True, exist_ok=True)
    partial = link.with_name(f".{link.name}.{secrets.token_hex(4)}")
    partial.symlink_to(os.path.relpath(Path(target).resolve(), link.parent.resolve()))
    partial.replace(link)
