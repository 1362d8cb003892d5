"""One small world, trained and exported once for all tests of serving."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from recsys_topk.serving.manifest import read_manifest, write_manifest
from recsys_topk.serving.recommend import CascadeRecommender
from tests.conftest import TINY_WORLD
from tests.serving.films import write_films

OLD_EXPORT = Path(__file__).parents[1] / "fixtures" / "v0_2" / "export"
DOCS = Path(__file__).parents[2] / "docs" / "serving.md"
THREE_STAGES = """
data: {layout: three-stage, train_negatives: 25}
model:
  stages:
    - {kind: two_tower, name: retrieval, quota: 40}
    - {kind: mlp, name: preranking, quota: 20}
    - {kind: din, name: ranking, quota: 10, previous: add, options: {history: recency}}
  k: 5
  lr: 0.01
loss: dftopk
trainer: {max_epochs: 1, accelerator: cpu}
"""


@pytest.fixture(scope="session")
def checkpoint(made_once: Callable[..., Path]) -> Path:
    """A checkpoint of three stages after a few steps."""
    fit = ("fit", "--config", "three.yaml", *TINY_WORLD, "--name=three", "--trainer.enable_progress_bar=false")
    folder = made_once("serving-run", *fit, files={"three.yaml": THREE_STAGES})
    return folder / "runs" / "three" / "checkpoints" / "last.ckpt"


@pytest.fixture(scope="session")
def export(made_once: Callable[..., Path], checkpoint: Path) -> Path:
    """The export of `checkpoint`, made by the first command of docs/serving.md."""
    command = next(serving_commands(**{"runs/demo/checkpoints/best.ckpt": str(checkpoint)}))
    return made_once("serving-export", *command) / "export"


@pytest.fixture(scope="session")
def stream_checkpoint(made_once: Callable[..., Path]) -> Path:
    """A checkpoint of two stages after one day of a stream, with fused tables."""
    options = [option for option in TINY_WORLD if "log_every" not in option]
    stream = ("stream", "--losses", "dftopk", "--seeds", "1", *options, "--model.embedding_optimizer=rowwise_adagrad")
    folder = made_once("serving-stream", *stream, "--trainer.accelerator=cpu")
    return sorted(folder.rglob("*.ckpt"))[-1]


@pytest.fixture(scope="session")
def stream_export(made_once: Callable[..., Path], stream_checkpoint: Path) -> Path:
    """The export of `stream_checkpoint`, without torch programs and with tables in float16."""
    options = ("--no-programs", "--half-tables")
    return made_once("stream-export", "export", "--ckpt_path", str(stream_checkpoint), "--out", "out", *options) / "out"


@pytest.fixture(scope="session")
def recommender(export: Path) -> CascadeRecommender:
    """A recommender of `export`."""
    return CascadeRecommender.from_export(export)


def serving_commands(**replaced: str) -> Iterator[list[str]]:
    """Yield the arguments of the first four commands of docs/serving.md, with some words replaced."""
    text = DOCS.read_text(encoding="utf-8")
    block = text[text.index("```bash\n") + 8 :]
    for line in block[: block.index("```")].splitlines():
        program, *arguments = shlex.split(line, comments=True)
        assert program == "recsys-topk"
        yield [replaced.get(word, word) for word in arguments]


@pytest.fixture(scope="session")
def sealed_export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small export as this version writes it, made without torch from that of version 0.2."""
    folder = tmp_path_factory.mktemp("sealed") / "export"
    shutil.copytree(OLD_EXPORT, folder)
    manifest = read_manifest(folder)
    write_manifest(folder, manifest.schema, manifest.stages, manifest.k, manifest.facts)
    return folder


@pytest.fixture(scope="session")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export with random weights, of films with genres and languages."""
    return write_films(tmp_path_factory.mktemp("films") / "export")
