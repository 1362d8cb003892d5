"""Write one self-contained HTML page of the results of experiment, compare, stream, fit and bench --json.

Unfinished results are shown as far as they are there.
"""

from __future__ import annotations

from pathlib import Path

from recsys_topk.cli.console import echo, make_parser
from recsys_topk.files import write_whole
from recsys_topk.reports.results import find_all
from recsys_topk.runs.directory import sync_line
from recsys_topk.runs.provenance import provenance
from recsys_topk.text import size_text


def main(argv: list[str]) -> None:
    """Write the page, and log its tables and plots to W&B with `--logger wandb`."""
    parser = make_parser("report", __doc__)
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="folders or files; folders are searched")
    parser.add_argument("--out", default="report.html", help="the page (default: %(default)s)")
    parser.add_argument("--title", default="recsys_topk: results", help="its heading (default: %(default)s)")
    parser.add_argument("--logger", choices=["wandb"], help="log tables and plots to W&B too (offline without a key)")
    options = parser.parse_args(argv)
    target = Path(options.out)
    if target.is_dir():
        raise ValueError(f"--out {options.out!r} is a folder; give a file, e.g. --out {target / 'report.html'}")
    results = find_all(options.runs)
    from recsys_topk.reports.page import log_page, render

    facts = provenance(["recsys-topk", "report", *argv])
    page, sections = render(options.title, results, facts)
    write_whole(target, page)
    for section in sections:
        echo(": ".join([section.title, *section.verdict[:1]]))
        for text in section.missing:
            echo(f"  missing: {text}")
    if options.logger == "wandb":
        log_page(target, sections, facts)
        for folder in sorted(target.parent.glob("wandb/offline-run-*"))[-1:]:
            echo(f"logged to {sync_line(folder)}")
    echo(f"written: {target}  ({size_text(target.stat().st_size)})")
