"""The commands in docs/cascade-for-your-log.md run as written, in one folder and in their order."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.datamodules.test_own_data_page import write_clicks

PAGE = Path(__file__).parents[2] / "docs" / "cascade-for-your-log.md"


@pytest.mark.long
def test_commands_lead_from_a_csv_to_recommendations(
    tmp_path: Path, in_process: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    commands = [
        shlex.split(line)
        for block in re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
        for line in block.splitlines()
    ]
    names = ["fit", "test", "quotas", "export", "recommend", "similar"]
    assert [command[:2] for command in commands] == [["recsys-topk", name] for name in names]
    write_clicks(tmp_path / "clicks.csv")
    output = {}
    for command in commands:
        done = in_process(tmp_path, *command[1:])
        assert done.returncode == 0, done.stderr
        output[command[1]] = done.stdout
    found = json.loads(next((tmp_path / "runs").glob("test-*/corpus.json")).read_text())["metrics"]
    assert found["recall@20/corpus"] > 2 * found["recall@20/popularity"]
    assert {"recall@20/transitions", "recall@20/itemknn", "recall@20/als"} <= found.keys()
    assert (tmp_path / "runs/cascade/quotas/quotas.svg").is_file()
    answer = json.loads(output["recommend"].splitlines()[0])
    assert answer["user"] == "u17"
    # Users like the items with their number modulo 3; 30 of them, 24 of which each user has had.
    assert len(answer["items"]) == 20
    clicked = {line.split(",")[1] for line in (tmp_path / "clicks.csv").read_text().split() if line.startswith("u17,")}
    assert not clicked & {row["item"] for row in answer["items"]}
    assert "i" in output["similar"]
