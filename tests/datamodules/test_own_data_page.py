"""The five commands in docs/own-data.md run as written, on a CSV of three columns."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

PAGE = Path(__file__).parents[2] / "docs" / "own-data.md"


def write_clicks(path: Path, users: int = 60, items: int = 90, clicks: int = 24) -> None:
    """Write clicks of users who each like one of three equally popular kinds of items."""
    draw = np.random.default_rng(0)
    rows = []
    for user in range(users):
        own = draw.permutation(np.arange(user % 3, items, 3))[:clicks]
        rows += [(int(draw.integers(0, 10**6)), f"u{user},i{item}") for item in own]
    lines = [f"{pair},{1_700_000_000 + time}" for time, pair in sorted(rows)]
    path.write_text("\n".join(["user_id,item_id,timestamp", *lines]) + "\n")


def test_five_commands_run_and_beat_popularity(
    tmp_path: Path, in_process: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (block,) = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)[:1]
    commands = [shlex.split(line) for line in block.splitlines()]
    assert [command[:2] for command in commands] == [
        ["recsys-topk", name] for name in ("schema", "prepare", "fit", "test", "predict")
    ]
    write_clicks(tmp_path / "clicks.csv")
    output = {}
    for command in commands:
        done = in_process(tmp_path, *command[1:])
        assert done.returncode == 0, done.stderr
        output[command[1]] = done.stdout
    assert "user = user_id, item = item_id, time = timestamp" in output["schema"]
    assert "1,440 interactions of 60 users with 90 items" in output["prepare"]
    assert "times: seconds, 2023-11-14 to 2023-11-26" in output["prepare"]
    assert "preparing" not in output["fit"]  # it uses what `prepare` wrote
    (measured,) = (tmp_path / "runs").glob("test-*/corpus.json")
    found = json.loads(measured.read_text())["metrics"]
    others = max(found["recall@20/popularity"], found["recall@20/random"])
    assert found["recall@20/corpus"] > 2 * others
    assert re.search(r"^metric +random +popularity +transitions +this run$", output["test"], re.MULTILINE)
    assert {"coverage@20/corpus", "novelty@20/transitions", "popularity_lift@20/popularity"} <= found.keys()
    (predictions,) = (tmp_path / "runs").glob("predict-*/predictions.parquet")
    assert pq.read_metadata(predictions).num_rows > 60 * 20
