"""Processes that do not belong together end with one line before the first step."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from recsys_topk.runs.agreement import SameOptions, check_port
from tests.conftest import TINY_WORLD, Result
from tests.distributed.launch import environments, stop

OPTIONS = [*TINY_WORLD, "--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.strategy=ddp", "--out=runs",
           "--trainer.enable_progress_bar=false"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_process_with_another_option_ends_both(
    environment: dict[str, str], warm_python: list[str], tmp_path: Path
) -> None:
    started = [
        subprocess.Popen(
            [*warm_python, "-m", "recsys_topk", "fit", *OPTIONS, f"--model.lr={rate}"], cwd=tmp_path, text=True,
            env={**environment, **shared}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )
        for rate, shared in zip(("0.01", "0.02"), environments(2), strict=True)
    ]  # fmt: skip
    try:
        errors = [process.communicate(timeout=500)[1] for process in started]
    finally:
        stop(started)
    assert [process.returncode for process in started] == [1, 1]
    lines = [line for text in errors for line in text.splitlines() if line.startswith("recsys-topk fit:")]
    assert lines == [
        "recsys-topk fit: process 1 of 2 has other options than process 0: model.lr is 0.02, and 0.01 in process 0; "
        "start all with the same options"
    ]
    assert "Traceback" not in "".join(errors)
    assert not list((tmp_path / "runs").glob("*/checkpoints"))


@pytest.mark.parametrize(("changed", "name"), [
    ({"loss": "bce"}, "loss"), ({"seed_everything": 2}, "seed_everything"), ({"data": {"root": "b"}}, "data.root"),
    ({"schema": {"tables": ["other"]}}, "the schema of the data"), ({"out": "b", "name": "c"}, None),
])  # fmt: skip
def test_the_first_difference_is_named(
    changed: dict[str, object], name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both processes in one: what the collectives would return is computed from two sets of options."""
    common = {"loss": "dftopk", "seed_everything": 1, "data": {"root": "a"}, "out": "a", "name": "a"}
    schemas = [{"tables": ["item"]}, changed.pop("schema", {"tables": ["item"]})]
    callbacks = [SameOptions(common), SameOptions({**common, **changed})]
    modules = [SimpleNamespace(schema=SimpleNamespace(to_dict=lambda schema=schema: schema)) for schema in schemas]
    sent: dict[str, object] = {}

    def gather(every: list[object], own: object) -> None:
        every[:] = [sent["options"], own]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)

    def first(value: object) -> object:
        return sent.setdefault("digest", value)

    strategy = SimpleNamespace(broadcast=first, reduce_boolean_decision=lambda own, all: own)
    trainer = SimpleNamespace(world_size=2, strategy=strategy)
    callbacks[0].setup(trainer, modules[0], "fit")  # type: ignore[arg-type]
    sent["options"] = {**callbacks[0].options, "the schema of the data": json.dumps(schemas[0], sort_keys=True)}
    if name is None:
        callbacks[1].setup(trainer, modules[1], "fit")  # type: ignore[arg-type]
    else:
        with pytest.raises(ConnectionError, match=f"process 1 of 2 has other options than process 0: {name} is"):
            callbacks[1].setup(trainer, modules[1], "fit")  # type: ignore[arg-type]


def test_a_port_in_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(ValueError, match=f"cannot meet at port {port}, which MASTER_PORT names .*in use"):
            check_port(2)
        check_port(1)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # torchrun listens itself
        check_port(2)
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
        monkeypatch.setenv("RANK", "1")
        check_port(2)
        monkeypatch.delenv("RANK")
    check_port(2)
    for wrong in ("x", "123456"):
        monkeypatch.setenv("MASTER_PORT", wrong)
        with pytest.raises(ValueError, match=f"port {wrong}, which MASTER_PORT names"):
            check_port(2)


def test_the_command_names_a_port_in_use(
    in_process: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        monkeypatch.setitem(os.environ, "MASTER_PORT", str(other.getsockname()[1]))
        done = in_process(tmp_path, "fit", *OPTIONS)
    assert done.returncode == 2
    assert "which MASTER_PORT names" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "runs").glob("*"))
