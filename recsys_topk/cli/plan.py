"""`recsys-topk plan`: the sharding of embedding tables over devices, and whether they fit."""

from __future__ import annotations

from typing import Any

from recsys_topk.cli.arguments import parse_options
from recsys_topk.cli.console import echo, make_parser
from recsys_topk.text import table


def main(argv: list[str]) -> int:
    """Print the plan; if the tables do not fit, the error says what would."""
    parser = make_parser("plan", str(__doc__), epilog="Further options, e.g. --config or --model.dim, describe a run.")
    parser.add_argument("--items", type=float, help="rows of one table, e.g. 1e9; or give a config or a checkpoint")
    parser.add_argument("--dim", type=int, default=96, help="its columns (default 96)")
    parser.add_argument("--ckpt_path", help="take the tables of a checkpoint")
    parser.add_argument("--world-size", type=int, required=True, help="number of devices, one process each")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--hbm", "--memory", dest="memory", help="memory of one device, e.g. 80GB")
    parser.add_argument("--sharding", choices=("auto", "table_wise", "row_wise", "column_wise"), default="auto")
    parser.add_argument("--optimizer", help="of the tables: rowwise_adagrad (the default), adagrad or sgd")
    parser.add_argument("--batch-size", type=int, default=1024, help="requests per device, for the estimates of time")
    options, rest = parser.parse_known_args(argv)
    if options.world_size < 1 or options.dim < 1 or (options.items is not None and options.items < 1):
        raise ValueError("--world-size, --dim and --items must be at least 1")

    from recsys_topk.strategies.plan import one_table, plan, without_memory
    from recsys_topk.strategies.sharding import bytes_of

    memory = None if options.memory is None else bytes_of(options.memory)
    if options.items is not None:
        if rest or options.ckpt_path:
            raise ValueError(f"--items describes the only table; leave {rest[0] if rest else '--ckpt_path'} out")
        optimizer = options.optimizer or "rowwise_adagrad"
        tables = one_table(int(options.items), options.dim, optimizer)
    else:
        model = _model(options.ckpt_path, parse_options(rest))
        trained = model.hparams["embedding_optimizer"]
        optimizer = options.optimizer or (trained if trained != "same" else "rowwise_adagrad")
        tables = without_memory(model, optimizer)
    planned = plan(
        tables, options.world_size, options.device, memory,
        optimizer=optimizer, sharding=options.sharding, batch_size=options.batch_size,
    )  # fmt: skip
    echo(table(planned.tables))
    low, high = min(planned.per_device) / 1e9, max(planned.per_device) / 1e9
    echo(f"weights {planned.weights / 1e9:,.2f} GB; optimizer {optimizer}; {options.world_size} x {options.device}")
    echo(f"memory per device {low:,.2f} to {high:,.2f} GB, with optimizer state and buffers")
    echo(f"estimated time of the tables per step {planned.slowest:,.3f} ms (TorchRec's model, not measured)")
    return 0


def _model(checkpoint: str | None, config: dict[str, Any]) -> Any:
    """Return a cascade of a checkpoint or of a config, with tables on the meta device."""
    from recsys_topk.cascades.module import CascadeModule
    from recsys_topk.cascades.tables import tables_on_meta

    if checkpoint is not None:
        from recsys_topk.runs.checkpoint import read_checkpoint

        with tables_on_meta():
            return CascadeModule(**read_checkpoint(checkpoint)["hyper_parameters"])
    from recsys_topk.datamodules import CascadeDataModule
    from recsys_topk.runs import TrainingRun
    from recsys_topk.spec import build

    run = TrainingRun(config)
    options = run.options()
    data = build(options["data"], base=CascadeDataModule, trust=run.trust)
    with tables_on_meta():
        return CascadeModule(data.schema, **{key: value for key, value in options["model"].items() if key != "schema"})
