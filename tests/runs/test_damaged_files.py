"""Damaged files are refused or made again: no flipped byte gives other weights, data or metrics."""

from __future__ import annotations

import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recsys_topk import files
from recsys_topk.cascades import CascadeModule
from recsys_topk.datamodules import RecFlowDataModule
from recsys_topk.datamodules.interactions.datamodule import InteractionsDataModule
from recsys_topk.files import DamagedError, check_zip
from recsys_topk.runs.checkpoint import read_checkpoint
from tests.conftest import Result
from tests.test_old_files import FIXTURES

PLAIN = FIXTURES / "v0_1" / "plain"
Command = Callable[..., Result]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECSYS_TOPK_CACHE", str(tmp_path / "cache"))


def flip(path: Path, at: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


def same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


def test_no_flipped_bit_of_a_checkpoint_gives_other_content(tmp_path: Path) -> None:
    """Every byte between the entries' contents, and random bits anywhere: refused, or without effect."""
    source, copy = FIXTURES / "v0_2" / "own" / "checkpoints" / "last.ckpt", tmp_path / "a.ckpt"
    before = torch.load(source, weights_only=True)
    content, draw = source.read_bytes(), random.Random(0)
    directory = zipfile.ZipFile(source).start_dir
    positions = [*draw.sample(range(len(content)), 60), *draw.sample(range(directory, len(content)), 60)]
    refused = 0
    for at in positions:
        copy.write_bytes(content)
        flip(copy, at, draw.randrange(8))
        try:
            check_zip(copy)
            loaded = torch.load(copy, weights_only=True)
        except (DamagedError, RuntimeError):
            refused += 1
        else:
            assert same(before, loaded), at
    assert refused > 60


def test_damaged_checkpoint_names_the_newest_whole_one(tmp_path: Path, in_process: Command) -> None:
    shutil.copytree(PLAIN, tmp_path / "runs" / "a")
    last, best = (tmp_path / "runs" / "a" / "checkpoints" / f"{name}.ckpt" for name in ("last", "best"))
    with zipfile.ZipFile(last) as archive:
        weights = max(archive.infolist(), key=lambda entry: entry.file_size)
    flip(last, weights.header_offset + 2000)
    for arguments in (["fit", "--resume", "runs/a"], ["test", "--ckpt_path", "runs/a/checkpoints/last.ckpt"]):
        done = in_process(tmp_path, *arguments)
        (line,) = done.stderr.splitlines()
        assert done.returncode == 2
        assert "last.ckpt' cannot be read: it is damaged, or no checkpoint (the checksum of " in line
        assert line.endswith("use 'runs/a/checkpoints/best.ckpt', the newest whole checkpoint there")
    with pytest.raises(DamagedError, match=r"last\.ckpt"):
        CascadeModule.load_from_checkpoint(last)
    flip(best, 1000)
    with pytest.raises(DamagedError, match="there is no other whole checkpoint"):
        read_checkpoint(last)


def test_entries_that_claim_more_than_the_file_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.ckpt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10_000_000))
    assert (tmp_path / "a.ckpt").stat().st_size < 20_000
    with pytest.raises(ValueError, match="it claims 10,000,000 bytes and has "):
        read_checkpoint(tmp_path / "a.ckpt")


@pytest.mark.parametrize(
    ("part", "value"), [("state_dict", 5), ("datamodule_hyper_parameters", [1]), ("hyper_parameters", ["stages"])]
)
def test_checkpoint_with_a_part_of_another_type_is_refused(part: str, value: object, tmp_path: Path) -> None:
    content = torch.load(PLAIN / "checkpoints" / "last.ckpt", weights_only=True)
    torch.save({**content, part: value}, tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=r"a\.ckpt' was not written by .* it describes no cascade"):
        read_checkpoint(tmp_path / "a.ckpt")


@pytest.mark.parametrize("command", ["test", "export"])
def test_weights_of_another_model_are_refused_in_one_line(command: str, tmp_path: Path, in_process: Command) -> None:
    path = tmp_path / "a.ckpt"
    content = torch.load(FIXTURES / "v0_2" / "own" / "checkpoints" / "last.ckpt", weights_only=True)
    torch.save({**content, "state_dict": {"other": torch.zeros(3)}}, path)
    shutil.copytree(FIXTURES / "v0_2", tmp_path / "v")
    path.rename(tmp_path / "v" / "own" / "checkpoints" / "a.ckpt")
    out = ["--out", "e"] if command == "export" else []
    done = in_process(tmp_path / "v", command, "--ckpt_path", "own/checkpoints/a.ckpt", *out)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "the checkpoint's weights do not fit this model" in line


def test_checkpoint_is_compared_once_per_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.ckpt"
    shutil.copy(PLAIN / "checkpoints" / "last.ckpt", path)
    seen: list[Path] = []
    for _ in range(3):
        files.check_once([path], seen.append)
    assert seen == [path]
    path.touch()
    files.check_once([path], seen.append)
    assert seen == [path, path]
    (tmp_path / "cache" / "checked.json").write_text("[3]")
    files.check_once([path], seen.append)
    assert len(seen) == 3
    with pytest.raises(ZeroDivisionError):
        files.check_once([tmp_path / "missing"], lambda path: 1 // 0)  # type: ignore[arg-type,return-value]


def every_column(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    from recsys_topk.datamodules.prepare.columns import read_columns

    return {f"{path.name} {name}": np.array(column)
            for path in sorted(folder.rglob("*.arrow")) for name, column in read_columns(path).items()}  # fmt: skip


@pytest.mark.parametrize("kind", ["recflow", "interactions"])
def test_damaged_prepared_data_are_prepared_again(
    kind: str, tmp_path: Path, environment: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    def open_data() -> RecFlowDataModule | InteractionsDataModule:
        if kind == "interactions":
            return InteractionsDataModule(str(FIXTURES / "v0_2" / "log.csv"), cache_dir=str(tmp_path / "p"))
        from recsys_topk.datamodules import WorldConfig, simulate

        if not (tmp_path / "w").is_dir():
            simulate(tmp_path / "w", WorldConfig(users=20, items=200, days=3, requests=30))
        return RecFlowDataModule(str(tmp_path / "w"), cache_dir=str(tmp_path / "p"), vocabulary="compact")

    data = open_data()
    data.prepare_data()
    assert data.schema
    found = (tmp_path / "p").glob("w-*" if kind == "recflow" else "*")
    place = next(path for path in sorted(found) if path.is_dir())
    before, draw = every_column(place), random.Random(0)
    hidden = (".lock", files.CHECKSUMS)
    damaged = [path for path in sorted(place.rglob("*")) if path.is_file() and path.name not in hidden]
    assert {path.suffix for path in damaged} >= {".arrow", ".json"}
    for path in draw.sample(damaged, 3):
        flip(path, draw.randrange(path.stat().st_size), draw.randrange(8))
        caplog.clear()
        again = open_data()
        again.prepare_data()
        assert again.schema == data.schema
        (line,) = [message for message in caplog.messages if " is damaged" in message]
        assert str(path) in line
        assert line.endswith("prepared again")
        after = every_column(place)
        assert before.keys() == after.keys()
        assert all(np.array_equal(before[name], after[name]) for name in before)


def test_damaged_data_that_were_given_are_refused(tmp_path: Path) -> None:
    data = InteractionsDataModule(str(FIXTURES / "v0_2" / "log.csv"), cache_dir=str(tmp_path / "p"))
    data.prepare_data()
    folder = data.prepared_folders["prepared"]
    InteractionsDataModule(str(folder)).prepare_data()
    flip(folder / "events.arrow", 900)
    with pytest.raises(ValueError, match=r"events\.arrow is damaged: .*; copy the folder again, or prepare"):
        InteractionsDataModule(str(folder)).prepare_data()
    (folder / files.CHECKSUMS).unlink()  # as written by somebody else
    (folder / "events.arrow").write_bytes(b"ARROW1 nothing")
    with pytest.raises(ValueError, match=r"events\.arrow cannot be read: .*; prepare the data again"):
        InteractionsDataModule(str(folder)).prepare_data()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("metrics.csv", b"step,x\n0,\xff\xfe\n", "line 1 of {} is damaged"),
        ("metrics.csv", b"step,x\n0,1.0\n1,0.2x5\n", "line 3 of {} is damaged (could not convert string to float"),
        ("metrics.csv", b"stop,x\n0,1.0\n", "line 2 of {} is damaged ('step')"),
        ("config.yaml", b"model: {loss: \xff}\n", "{} is not a text file in UTF-8"),
        ("config.yaml", b"model: [1, 2\n", "{} is not valid YAML"),
        ("config.yaml", b"model: [1, 2]\n", "{} is damaged, or was written by another version"),
        ("config.yaml", b"- a\n", "{} is damaged, or was written by another version"),
    ],
)
def test_damaged_file_of_a_run_is_named_in_one_line(
    name: str, content: bytes, words: str, tmp_path: Path, in_process: Command
) -> None:
    shutil.copytree(PLAIN, tmp_path / "a")
    (tmp_path / "a" / name).write_bytes(content)
    commands = [["report", "a"]] if name == "config.yaml" else [["report", "a"], ["fit", "--resume", "a"]]
    for command in commands:
        done = in_process(tmp_path, *command)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert words.format(f"a/{name}") in line
    assert not (tmp_path / "report.html").exists()
