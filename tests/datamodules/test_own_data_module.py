"""The example in docs/data.md trains as written and keeps the contract."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs" / "data.md"
CHECK = """
from recsys_topk.datamodules import get, restore
from recsys_topk.testing import check_data_module

recall = float(trainer.callback_metrics["test/joint_recall@3@5/40"])
assert recall > 3 * 5 / 40, recall  # three times chance
assert type(get("films", requests=30)) is Films
assert restore(data.hparams, trust=["__main__"]).schema == data.schema
check_data_module(lambda: Films(users=20, films=60, requests=30))
print("done")
"""


def test_docs_example_trains_and_keeps_the_contract(tmp_path: Path, warm_python: list[str]) -> None:
    (code,) = (
        block for block in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL) if "class Films" in block
    )
    script = tmp_path / "films.py"
    script.write_text(code + CHECK)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*warm_python, str(script)], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.endswith("done\n")
