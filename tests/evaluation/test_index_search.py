"""Evaluation over the whole catalogue with an index and with exact search."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from recsys_topk.serving.index import build_index


@pytest.mark.parametrize("kind", ["flat", "ivf"])
def test_corpus_metrics_are_reported_with_an_index_and_with_exact_search(
    in_process: Callable[..., object], checkpoint: Path, export: Path, tmp_path: Path, kind: str
) -> None:
    build_index(export, tmp_path / "index", kind, effort=1)  # type: ignore[arg-type]
    options = ("--ckpt_path", str(checkpoint), "--out", "found", "--name", "all", "--corpus")
    done = in_process(tmp_path, "test", *options, "--index", "index", "--export", str(export))
    assert done.returncode == 0, done.stderr  # type: ignore[attr-defined]
    metrics = json.loads((tmp_path / "found" / "test-all" / "corpus.json").read_text())["metrics"]
    names = [name.removesuffix("/index") for name in metrics if name.endswith("/index")]
    assert "joint_recall@5@10" in names
    if kind == "flat":
        assert {name: metrics[f"{name}/index"] for name in names} == pytest.approx(
            {name: metrics[f"{name}/corpus"] for name in names}
        )
    else:  # only one of 16 lists is searched, so most of the best items are missed
        assert metrics["retrieval_recall@5@40/index"] < metrics["retrieval_recall@5@40/corpus"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--index", "x"], "--index goes with --corpus"),
        (["--corpus", "--export", "x"], "give --index DIR too"),
        (["--corpus", "--index"], "--index needs a value"),
    ],
)
def test_incomplete_index_options_raise(options: list[str], message: str) -> None:
    from recsys_topk.cli.arguments import parse_options
    from recsys_topk.cli.corpus_options import take_corpus_options

    with pytest.raises(ValueError, match=message):
        take_corpus_options("test", parse_options(options))
