"""`recsys-topk similar`: the nearest items of an item."""

from __future__ import annotations

from recsys_topk.cli.console import echo, make_parser
from recsys_topk.text import table


def main(argv: list[str]) -> int:
    """Run the command."""
    parser = make_parser(
        "similar",
        "List the items whose vectors are nearest to that of an item: cosine of the first stage's item vectors.",
    )
    parser.add_argument("--item", required=True, help="name of the item in the data")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--export", help="folder that `recsys-topk export` wrote (no torch needed)")
    source.add_argument("--ckpt_path", dest="checkpoint", help="checkpoint of a fit")
    parser.add_argument("--number", type=int, default=10, help="number of items (default: %(default)s)")
    parser.add_argument("--data.root", dest="root", help="with --ckpt_path: current folder of the data")
    parser.add_argument("--trust", action="append", default=[], help="package whose classes the checkpoint may name")
    args = parser.parse_args(argv)
    if args.number < 1:
        raise ValueError(f"--number must be at least 1, got {args.number}")
    if args.export is not None:
        from recsys_topk.serving.recommend import CascadeRecommender

        nearest = CascadeRecommender.from_export(args.export).similar(args.item, args.number)
    else:
        from recsys_topk.evaluation.similar import similar_items
        from recsys_topk.runs.deploy import open_checkpoint

        model, data, _ = open_checkpoint(args.checkpoint, root=args.root, trust=args.trust)
        nearest = similar_items(model, data, args.item, args.number)
    echo(table([{"item": name, "cosine": value} for name, value in nearest]))
    return 0
