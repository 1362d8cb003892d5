"""`recsys-topk fuzz`: test losses and operators with random lists, and print a table of the faults."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recsys_topk.cli.console import echo, make_parser, warn
from recsys_topk.files import write_whole
from recsys_topk.text import table

if TYPE_CHECKING:
    from recsys_topk.testing.fuzz import Findings

_SECONDS = 10.0


def main(argv: list[str]) -> int:
    """Run the tests; return 0 without faults, 1 with faults, 130 after an interruption (partial results are shown)."""
    from tqdm import tqdm

    from recsys_topk.testing.fuzz import fuzz_one, fuzz_subjects

    parser = make_parser(
        "fuzz", "Test losses and operators with random lists (masks, ties, extremes, half precision, k per list)."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="losses and operators; all by default")
    parser.add_argument("--lists", type=int, default=10_000, help="lists for each (default 10000)")
    parser.add_argument("--seed", type=int, default=0, help="equal seeds give equal lists (default 0)")
    parser.add_argument("--device", default="cpu", help="where to compute (default cpu)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings and the first list of each fault")
    parser.add_argument("--resume", action="store_true", help="continue from the findings in --json FILE")
    args = parser.parse_args(argv)
    if args.lists < 1:
        raise ValueError(f"--lists must be at least 1, got {args.lists}")
    record = _Record(args.json, {"lists": args.lists, "seed": args.seed, "device": args.device}, args.resume)
    subjects, status, start = fuzz_subjects(args.names or None), 0, time.monotonic()
    try:
        for kind, name in subjects:
            before = record.findings.get(f"{kind} {name}")
            with tqdm(total=args.lists, unit="list", unit_scale=True, desc=f"{kind} {name}", leave=False) as bar:

                def progress(findings: Findings, bar: Any = bar) -> None:
                    bar.update(findings.lists - bar.n)
                    record.keep(findings)

                if before is not None:
                    bar.update(before.lists)
                fuzz_one(kind, name, args.lists, args.seed, device=args.device, progress=progress, resume=before)
    except KeyboardInterrupt:
        status = 130
    record.write()
    chosen = [f"{kind} {name}" for kind, name in subjects]
    findings = [record.findings[subject] for subject in chosen if subject in record.findings]
    shown = ("subject", "lists", "not_finite", "not_k", "exceptions")
    echo(table([{key.replace("_", " "): getattr(one, key) for key in shown} for one in findings]))
    bad = [one for one in findings if not one.clean]
    for one in bad:
        warn(f"{one.subject}: {one.first}")
    total = sum(one.lists for one in findings)
    faults = f"faults in {', '.join(one.subject for one in bad)}" if bad else "nothing found"
    what = f"{len(findings)} losses and operators, seed {args.seed}, {args.device}, {time.monotonic() - start:.0f} s"
    echo(f"{total} lists, {what}: {faults}{' (interrupted)' if status == 130 else ''}")
    return status or int(bool(bad))


class _Record:
    """The findings by subject, written to a file from time to time. To resume, the settings must be equal."""

    def __init__(self, path: Path | None, settings: dict[str, Any], resume: bool) -> None:
        self.path, self.settings = path, settings
        self.findings: dict[str, Findings] = {}
        self._written = time.monotonic()
        if resume:
            self._read()

    def keep(self, findings: Findings) -> None:
        """Store the findings of a subject; write the file every few seconds."""
        self.findings[findings.subject] = findings
        if time.monotonic() - self._written > _SECONDS:
            self.write()

    def write(self) -> None:
        """Write the file."""
        if self.path is not None:
            rows = [vars(one) for one in self.findings.values()]
            write_whole(self.path, json.dumps({**self.settings, "rows": rows}, indent=1) + "\n")
        self._written = time.monotonic()

    def _read(self) -> None:
        from recsys_topk.testing.fuzz import Findings

        if self.path is None:
            raise ValueError("--resume continues from the findings of --json FILE, and no --json was given")
        if not self.path.exists():
            raise FileNotFoundError(f"--resume: there is no file {str(self.path)!r}; leave --resume out to start")
        try:
            kept = json.loads(self.path.read_text(encoding="utf-8"))
            rows = [Findings(**row) for row in kept["rows"]]
            before = {key: kept[key] for key in self.settings}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{str(self.path)!r} holds no findings of recsys-topk fuzz to resume: {error}") from error
        if before != self.settings:
            words = " ".join(f"--{key} {value}" for key, value in before.items())
            raise ValueError(f"{str(self.path)!r} was made with {words}; resume it with these, or name another file")
        self.findings = {one.subject: one for one in rows}
