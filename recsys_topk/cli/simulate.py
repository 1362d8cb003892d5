"""Simulate a multi-stage recommender and write what it did in RecFlow's layout.

The ground truth is beside it (ground_truth.npz).
"""

from __future__ import annotations

from recsys_topk.cli.console import echo, make_parser
from recsys_topk.datamodules import WorldConfig
from recsys_topk.text import table

OPTIONS = {
    "users": "users",
    "items": "items over all days",
    "days": "days",
    "requests": "requests per day",
    "seed": "the same seed gives the same files",
    "start": "first day, YYYY-MM-DD",
}


def main(argv: list[str]) -> int:
    """Run the command."""
    parser = make_parser("simulate", __doc__)
    parser.add_argument("--out", required=True, help="folder to create; it must not exist")
    for name, text in OPTIONS.items():
        default = getattr(WorldConfig(), name)
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{text} (default: %(default)s)")
    recalls = "print the recalls of random order, popularity and the true utility on the last day"
    parser.add_argument("--recalls", action="store_true", help=recalls)
    options = vars(parser.parse_args(argv))
    out, recalls = options.pop("out"), options.pop("recalls")
    from tqdm import tqdm

    from recsys_topk.datamodules import RecFlowDataModule, reference_recalls, simulate

    config = WorldConfig(**options)
    if recalls and config.days < 3:
        raise ValueError(f"--recalls needs days to train, validate and test on, at least 3; got {config.days}")
    with tqdm(total=config.days, unit="day", desc="simulate") as bar:

        def done(day: str) -> None:
            bar.set_postfix_str(day)
            bar.update()

        root = simulate(out, config, progress=done)
    echo(f"{root}: {config.days} days, {config.days * config.requests} requests in {bar.format_dict['elapsed']:.1f} s")
    if recalls:
        data = RecFlowDataModule(root=str(root))
        data.prepare_data()
        echo(table([{"ranker": ranker, **values} for ranker, values in reference_recalls(data).items()]))
    echo(f"train on it: recsys-topk fit --data.root {root}")
    return 0
