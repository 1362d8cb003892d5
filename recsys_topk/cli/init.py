"""Write a config with comments, for your data or a simulated world: then edit it, and `recsys-topk fit --config FILE`.

Asks for what is not given, unless the input is no terminal.
"""

from __future__ import annotations

import json
import re
import sys
from importlib import resources
from pathlib import Path

from recsys_topk.cli.console import echo, make_parser
from recsys_topk.files import write_whole
from recsys_topk.text import printable

MORE = """
# The run: runs/{folder} gets this config, the metrics and the checkpoints. Everything below may be changed.
name: {name}
seed_everything: 42
# logger: wandb               # or mlflow, tensorboard; metrics.csv is always written
# ckpt_path: path/to/a.ckpt   # begin with the weights of another run
# All options: recsys-topk fit --help_all; the losses: recsys-topk losses.
"""


def main(argv: list[str]) -> int:
    """Write the config."""
    parser = make_parser("init", __doc__)
    parser.add_argument("file", metavar="FILE", help="the config to write, e.g. first.yaml; it must not exist")
    parser.add_argument("--root", help="your file or folder: interactions, lists or RecFlow (default: simulated data)")
    parser.add_argument("--stages", type=int, choices=(1, 2), help="stages for interactions (default: 2)")
    parser.add_argument("--name", help="name of the run (default: the name of FILE)")
    args = parser.parse_args(argv)
    target = Path(args.file)
    if target.exists():
        raise ValueError(f"{args.file!r} exists already; give another name, or remove it")
    asks = sys.stdin.isatty()

    def given(value: object, question: str, default: str) -> str:
        return (
            str(value) if value is not None else (input(f"{question} [{default}]: ").strip() if asks else "") or default
        )

    root = given(args.root, "your data, a file or folder (empty: simulated data)", "")
    kind = "simulated"
    if root:
        from recsys_topk.runs.data_kind import guess_kind

        if not Path(root).exists():
            raise ValueError(f"--root {root!r} does not exist; give the file or folder of the data")
        kind = guess_kind(root, {}) or "recflow-2stage"
    if kind == "interactions":
        kind += "-cascade" if given(args.stages, "stages: 1 retrieves, 2 also rank", "2") == "2" else ""
    elif args.stages is not None:
        raise ValueError(f"--stages goes with interactions, and {root or 'a simulated world'} has the config {kind}")
    name = given(args.name, "name of the run", target.stem)
    text = resources.files("recsys_topk.runs.configs").joinpath(f"{kind}.yaml").read_text(encoding="utf-8")
    if root:  # JSON is YAML
        place = r"(?m)^(data:\n  class_path: \w+\n)(  init_args:\n)?"
        insert = f"root: {json.dumps(root, ensure_ascii=False)}\n"
        text = re.sub(place, lambda m: f"{m[1]}{m[2] or ''}{'    ' if m[2] else '  '}{insert}", text, count=1)
    write_whole(target, text + MORE.format(folder=printable(name), name=json.dumps(name, ensure_ascii=False)))
    echo(f"written: {printable(args.file)}  ({kind}); edit it, and train: recsys-topk fit --config {args.file}")
    return 0
