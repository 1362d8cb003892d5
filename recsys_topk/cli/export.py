"""`recsys-topk export`: write the stages of a checkpoint for serving, one folder per stage."""

from __future__ import annotations

from recsys_topk.cli.console import echo, make_parser
from recsys_topk.text import table


def main(argv: list[str]) -> int:
    """Run the command."""
    parser = make_parser(
        "export",
        "Write each stage of a checkpoint as ONNX with its own parameters only, with the catalogue, the users and the "
        "encoder of features. Nothing is written unless onnxruntime gives the scores of the checkpoint.",
    )
    parser.add_argument("--ckpt_path", dest="checkpoint", required=True, help="checkpoint of a fit or of a stream")
    parser.add_argument("--out", required=True, help="folder to create; it must not exist")
    parser.add_argument("--data.root", dest="root", help="current folder of the data (default: as in training)")
    parser.add_argument("--half-tables", action="store_true", help="float16 embedding tables; prints the lost recall")
    parser.add_argument("--no-programs", dest="programs", action="store_false", help="no torch programs (.pt2)")
    parser.add_argument("--trust", action="append", default=[], help="package whose classes the checkpoint may name")
    args = parser.parse_args(argv)

    from recsys_topk.runs.deploy import export_checkpoint

    report = export_checkpoint(**vars(args), log_line=echo)
    rows = [
        {
            "stage": entry.name,
            "kind": entry.kind,
            "passes on": entry.quota,
            "files": ", ".join(model.file for model in entry.models.values()),
            "difference": f"{report.agreement.differences[entry.name]:.1e}",
        }
        for entry in report.manifest.stages
    ]
    echo(table(rows))
    facts = report.manifest.facts
    echo(
        f"{facts['items']:,} items; scores compared with the checkpoint on {report.agreement.requests:,} requests "
        f"(difference: share of the largest score)"
    )
    if report.recalls is not None:
        before, after = report.recalls["checkpoint"], report.recalls["export"]
        echo(f"float16 tables: joint recall {after:.4f}, the checkpoint's {before:.4f} ({after - before:+.4f})")
    echo(f"next: recsys-topk index --export {args.out} --out {args.out}-index")
    return 0
