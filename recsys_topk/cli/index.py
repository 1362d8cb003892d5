"""`recsys-topk index`: a faiss index, or a collection in a vector store, of the item vectors of an export."""

from __future__ import annotations

from typing import Any

from recsys_topk.cli.console import echo, make_parser


def main(argv: list[str]) -> int:
    """Run the command."""
    parser = make_parser("index", "Index the items of an export by the vectors of its first stage. Needs no torch.")
    parser.add_argument("--export", required=True, help="folder that `recsys-topk export` wrote")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--out", help="folder of a faiss index to create; it must not exist")
    target.add_argument("--store", help="vector store: qdrant://HOST[:PORT]/COLLECTION (extra `qdrant`)")
    kind = "flat is exact (default: flat up to 200,000 items, else hnsw; a store has no ivf)"
    parser.add_argument("--kind", choices=("flat", "ivf", "hnsw"), help=kind)
    parser.add_argument("--effort", type=int, help="lists to visit (ivf) or candidates to keep (hnsw) in a search")
    parser.add_argument("--threads", type=int, default=1, help="threads (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=42, help="seed of the clusters (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.store and args.effort is not None:
        parser.error("--effort is an option of faiss; set that of a vector store there")
    from tqdm import tqdm

    from recsys_topk.serving.index import build_index
    from recsys_topk.serving.vector_store import build_store

    options: dict[str, Any] = {name: value for name, value in vars(args).items() if value is not None}
    with tqdm(unit=" items", unit_scale=True, desc="index", delay=0.5) as bar:
        facts = (build_store if args.store else build_index)(**options, progress=bar.update)
    echo(
        f"{args.store or args.out}: {facts.items:,} items, {facts.kind}, recall {facts.recall:.4f} against exact "
        f"search ({facts.queries} queries), built in {facts.seconds:.1f} s"
        + ("" if args.store else f", {facts.bytes_per_item:.0f} bytes per item")
    )
    echo(f"next: recsys-topk serve --export {args.export} --index {args.store or args.out}")
    return 0
