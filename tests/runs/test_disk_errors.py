"""A full or read-only disk and too many open files: one line that names the option to change, and nothing partial."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from recsys_topk.cli.main import main
from recsys_topk.files import disk_error, make_once, whole_file
from recsys_topk.runs.directory import RunDirectory
from tests.conftest import TINY_WORLD, Result

QUIET = "--trainer.enable_progress_bar=false"
# The limits of a process: files of at most 100 KB, which a checkpoint exceeds (EFBIG).
LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
from recsys_topk.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def warm_world(in_process: Callable[..., Result], tmp_path: Path) -> None:
    in_process(tmp_path, "prepare", *(option for option in TINY_WORLD if option.startswith("--data.")))


@pytest.mark.usefixtures("warm_world")
def test_checkpoint_that_cannot_be_written_ends_training_in_one_line(
    tmp_path: Path, environment: dict[str, str], warm_python: list[str]
) -> None:
    """In a process with a limit on the size of files."""
    done = subprocess.run(
        [*warm_python, "-c", LIMITED, "fit", *TINY_WORLD, QUIET, "--out=results"],
        capture_output=True, text=True, check=False, cwd=tmp_path, env=environment,
    )  # fmt: skip
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1
    assert line.startswith("recsys-topk fit: File too large: results/")
    assert line.endswith("; free some, or name another folder: --out FOLDER")
    (run,) = (tmp_path / "results").iterdir()
    assert json.loads((run / "run.json").read_text())["status"] == "failed"
    assert not list((run / "checkpoints").iterdir())


@pytest.mark.usefixtures("warm_world")
def test_status_is_recorded_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], environment: dict[str, str]
) -> None:
    """From the third step on, no file can be flushed to the disk."""
    monkeypatch.chdir(tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    flush = os.fsync

    def full(descriptor: int) -> None:
        flushed.append(descriptor)
        if len(flushed) > 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(descriptor)

    flushed: list[int] = []
    monkeypatch.setattr("os.fsync", full)
    assert main(["fit", *TINY_WORLD, QUIET, "--trainer.max_epochs=9", "--name=a"]) == 1
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert line.startswith("recsys-topk fit: No space left on device: runs/a/")
    assert json.loads(Path("runs/a/run.json").read_text())["status"] == "failed"
    assert not list(Path("runs").rglob("*.pending*"))


def test_killed_run_is_recorded_by_the_next_command(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, "a")
    run.claim()
    run.record(status="running")
    RunDirectory(tmp_path, "b")
    assert run.facts["status"] == "running"  # its process has the lock
    run.release()
    RunDirectory(tmp_path, "c")
    assert run.facts["status"] == "failed"


def test_closed_terminal_stops_after_a_step(
    tmp_path: Path, environment: dict[str, str], warm_python: list[str]
) -> None:
    """SIGHUP, as a terminal sends it when it is closed."""
    process = subprocess.Popen(
        [*warm_python, "-m", "recsys_topk", "fit", *TINY_WORLD, QUIET, "--trainer.max_epochs=5000", "--name=a"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests may run under nohup
    )  # fmt: skip
    metrics = tmp_path / "runs" / "a" / "metrics.csv"
    try:
        while not metrics.is_file() and process.poll() is None:
            os.sched_yield()
        process.send_signal(signal.SIGHUP)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGHUP
    assert json.loads((tmp_path / "runs" / "a" / "run.json").read_text())["status"] == "interrupted"
    assert "Traceback" not in errors


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., str]]:
    """Run `fit` with an error; return its line on standard error."""

    def run(error: Exception, *arguments: str) -> str:
        def fail(argv: list[str]) -> None:
            raise error

        monkeypatch.setattr("recsys_topk.cli.training.main", fail)
        status = main(["fit", *arguments])
        assert status == (2 if "Read-only" in str(error) or "denied" in str(error) else 1)
        (line,) = capsys.readouterr().err.splitlines()
        return line.removeprefix("recsys-topk fit: ")

    return run


@pytest.mark.parametrize(
    ("number", "path", "arguments", "words"),
    [
        (errno.ENOSPC, "{cache}/prepared/x", [], "name another folder: --data.cache_dir FOLDER or RECSYS_TOPK_CACHE="),
        (errno.EROFS, "/mnt/p/a.arrow", ["--data.cache_dir", "/mnt/p"], "; name another folder: --data.cache_dir FOLD"),
        (errno.EROFS, "/mnt/p/a", ["--out=/mnt/p"], "Read-only file system: /mnt/p/a; name another folder: --out FOL"),
        (errno.EACCES, "runs/a", [], "Permission denied: runs/a; name another folder: --out FOLDER"),
        (errno.EMFILE, "x", [], "Too many open files: x; allow more (ulimit -n 4096), or use fewer: --data.num_work"),
    ],
)
def test_error_of_the_disk_names_the_option(
    number: int,
    path: str,
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fails: Any,
) -> None:
    monkeypatch.setenv("RECSYS_TOPK_CACHE", str(tmp_path))
    assert words in fails(OSError(number, os.strerror(number), path.format(cache=tmp_path)), *arguments)


def test_error_of_a_library_is_recognised_by_its_cause_or_text(fails: Any, tmp_path: Path) -> None:
    import duckdb

    assert fails(duckdb.IOException('IO Error: Could not write file "/x": No space left on device')).startswith(
        "No space left on device: where is not known; free some"
    )
    hidden = RuntimeError("unexpected pos 64 vs 0")
    hidden.__context__ = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(OSError, match=r"No space left on device: '.*a\.bin'"), whole_file(tmp_path / "a.bin"):
        raise hidden
    assert disk_error(RuntimeError("no space")) is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("resume", [True, False])
def test_folder_on_a_full_disk_leaves_nothing(resume: bool, tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "a").write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/day'"):
        make_once(tmp_path / "day", write, resume=resume)
    assert [path.name for path in tmp_path.iterdir() if path.name != ".lock"] == []
