"""List the packaged W&B sweeps, or print one as YAML for `wandb sweep FILE`.

Further options are passed to every `recsys-topk fit` of the sweep. The sweep is in the project of --wandb.project or
WANDB_PROJECT.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

import recsys_topk
from recsys_topk.cli.arguments import parse_options
from recsys_topk.cli.console import echo, make_parser, write_to
from recsys_topk.registry import suggest
from recsys_topk.runs import TrainingRun
from recsys_topk.text import table

ARGS = "  - ${args}\n"


def folder() -> Path:
    """Return the folder of the sweeps: inside an installed package, next to it in a checkout."""
    package = Path(recsys_topk.__file__).parent
    packaged = package / "sweeps"
    return packaged if packaged.is_dir() else package.parent / "sweeps"


def sweeps() -> dict[str, str]:
    """Return the text of each sweep by its name."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder().glob("*.yaml"))}


def with_options(text: str, further: list[str]) -> str:
    r"""Return a sweep with further options of `recsys-topk fit`; a config replaces that of the sweep.

    Example:
        >>> print(with_options("command:\n  - --config=simulated\n  - ${args}\n", ["--config", "recflow-2stage"]))
        command:
          - "--config"
          - "recflow-2stage"
          - ${args}
    """
    if any(option.partition("=")[0] in ("-c", "--config") for option in further):
        text = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("  - --config="))
    lines = "".join(f"  - {json.dumps(option)}\n" for option in further)
    return text.replace(ARGS, lines + ARGS)


def main(argv: list[str]) -> None:
    """List the sweeps, or print one."""
    parser = make_parser(
        "sweep",
        __doc__,
        usage="recsys-topk sweep [NAME] [--out FILE] [options of fit ...]",
        epilog="example: recsys-topk sweep losses --out mine.yaml --config recflow-2stage --data.root path/to/recflow",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="name of a sweep; without it, the sweeps are listed")
    parser.add_argument("--out", metavar="FILE", help="write the sweep to a file instead of printing it")
    options, further = parser.parse_known_args(argv)
    texts = sweeps()
    if options.name is None:
        if further or options.out:
            raise ValueError(f"which sweep? give its name first: {', '.join(texts)}")
        contents = {name: yaml.safe_load(text) for name, text in texts.items()}
        echo(table([{"sweep": name, "method": c["method"], "": c["description"]} for name, c in contents.items()]))
        echo("\nrecsys-topk sweep NAME --out NAME.yaml, then: wandb sweep NAME.yaml")
        return
    if options.name not in texts:
        raise ValueError(f"unknown sweep {options.name!r}; {suggest(options.name, texts)}sweeps: {', '.join(texts)}")
    text = texts[options.name]
    given = parse_options(further).get("wandb") or {}
    project = given.get("project") or os.environ.get("WANDB_PROJECT")
    if project:
        text = re.sub(r"^project: .*$", lambda _: f"project: {json.dumps(project)}", text, count=1, flags=re.MULTILINE)
    if further:
        content = yaml.safe_load(text)
        wanted = f"val/{check(further, set(content['parameters']))}"
        text = with_options(text, further).replace(f"name: {content['metric']['name']}\n", f"name: {wanted}\n")
    if options.out is None:
        echo(text.rstrip("\n"))
        return
    write_to(options.out, text)
    echo(f"written: {options.out}  (create the sweep with: wandb sweep {options.out})")


def check(further: list[str], varied: set[str]) -> str:
    """Return the monitored metric of the runs; raise if the sweep sets an option itself, or `fit` refuses it."""
    for option in further:
        name = option.partition("=")[0].removeprefix("--")
        if option.startswith("--") and name in varied:
            raise ValueError(f"the sweep sets --{name} itself in every run; change it in the file, under `parameters`")
    return monitored(TrainingRun(parse_options(further)).options()["model"])


def monitored(model: Mapping[str, Any]) -> str:
    """Return the monitored metric of a model, from its options.

    Example:
        >>> monitored({"k": 5, "stages": [{"name": "ranking", "quota": 50}], "metrics": None, "monitor": None})
        'joint_recall@5@50'
    """
    if model["monitor"] is not None:
        return str(model["monitor"])
    from recsys_topk.cascades.default_stages import default_k
    from recsys_topk.metrics.configured import DEFAULT, configured_metrics
    from recsys_topk.operators import get

    stages = model["stages"] or [{"name": "retrieval", "quota": 30}, {"name": "ranking", "quota": 20}]
    quotas = {stage["name"]: stage["quota"] for stage in stages}
    entries = model["metrics"] or DEFAULT
    metrics = configured_metrics(
        entries, k=model["k"] or default_k(), quotas=quotas, operator=get("dftopk")
    )  # any operator will do
    return next((name for name, metric in metrics.items() if metric.whole_cascade), next(iter(metrics)))
