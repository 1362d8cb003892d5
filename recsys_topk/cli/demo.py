"""`recsys-topk demo`: simulate a small world, train a cascade on it, test it, and say how good that is."""

from __future__ import annotations

import argparse
import sys

from recsys_topk.cli.console import echo, table


def main(argv: list[str]) -> int:
    """Run the demonstration; options it does not know are passed to `fit`."""
    parser = argparse.ArgumentParser(
        prog="recsys-topk demo",
        description="Simulate a small world, train a cascade on it, test it. Further options go to `recsys-topk fit`.",
        allow_abbrev=False,
    )
    parser.add_argument("--loss", default="dftopk", help="see `recsys-topk losses` (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the training days (default: %(default)s)")
    parser.add_argument("--out", default="runs", help="folder in which the run gets its own (default: %(default)s)")
    options, further = parser.parse_known_args(argv)

    from recsys_topk.cli.training import run
    from recsys_topk.datamodules import reference_recalls

    fit = ["fit", "--loss", options.loss, "--config", "simulated", f"--trainer.max_epochs={options.epochs}"]
    trained = run([*fit, "--out", options.out, "--name", "demo", *further])
    checkpoint = trained.run.path / "checkpoints" / "best.ckpt"
    tested = run(["test", "--ckpt_path", str(checkpoint), "--out", options.out, "--name", trained.run.path.name])

    model = tested.model
    measured = {name: float(value) for name, value in tested.trainer.callback_metrics.items()}
    joint, *alone = (
        next(v for n, v in measured.items() if n.startswith(f"test/{name}")) for name in model.metrics["test"]
    )
    quotas = model.cascade.quotas
    columns = ["joint recall", *(f"{config.name} alone" for config in model.cascade.configs)]
    rows = [{"ranker": f"this cascade ({options.loss})", **dict(zip(columns, [joint, *alone], strict=True))}]
    for ranker, recalls in reference_recalls(tested.datamodule, quotas=quotas, k=model.k).items():
        rows.append({"ranker": ranker, **dict(zip(columns, recalls.values(), strict=True))})
    order = {"random": 0, "popularity": 1, "oracle": 3}
    rows.sort(key=lambda row: order.get(str(row["ranker"]), 2))
    echo()
    lists = f"lists of {len(tested.datamodule.layout.groups) * 10 + tested.datamodule.eval_negatives}"
    echo(f"Of the {model.k} right items, how many survive {' -> '.join(map(str, quotas))} on the test day ({lists}):")
    echo(table(rows))
    echo()
    program = "recsys-topk" if sys.argv[0].endswith("recsys-topk") else "python -m recsys_topk"
    echo(f"checkpoint  {checkpoint}")
    echo(f"config      {trained.run.path / 'config.yaml'}")
    echo(f"another loss:  {program} demo --loss listnet      all losses:  {program} losses")
    return 0
