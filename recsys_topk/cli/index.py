"""`recsys-topk index`: a faiss index of the item vectors of an export."""

from __future__ import annotations

from recsys_topk.cli.console import echo, make_parser


def main(argv: list[str]) -> int:
    """Run the command."""
    parser = make_parser("index", "Index the items of an export by the vectors of its first stage. Needs no torch.")
    parser.add_argument("--export", required=True, help="folder that `recsys-topk export` wrote")
    parser.add_argument("--out", required=True, help="folder to create; it must not exist")
    kind = "flat is exact (default: flat up to 200,000 items, else hnsw)"
    parser.add_argument("--kind", choices=("flat", "ivf", "hnsw"), help=kind)
    parser.add_argument("--effort", type=int, help="lists to visit (ivf) or candidates to keep (hnsw) in a search")
    parser.add_argument("--threads", type=int, default=1, help="threads (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=42, help="seed of the clusters (default: %(default)s)")
    args = parser.parse_args(argv)
    from tqdm import tqdm

    from recsys_topk.serving.index import build_index

    with tqdm(unit=" items", unit_scale=True, desc="index") as bar:
        facts = build_index(**vars(args), progress=bar.update)
    echo(
        f"{args.out}: {facts.items:,} items, {facts.kind}, recall {facts.recall:.4f} against exact search "
        f"({facts.queries} queries), built in {facts.seconds:.1f} s, {facts.bytes_per_item:.0f} bytes per item"
    )
    echo(f"next: recsys-topk serve --export {args.export} --index {args.out}")
    return 0
