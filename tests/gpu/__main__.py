"""Run all checks that need a GPU, and write one table for docs/benchmarks.md.

`make test-gpu` installs requirements/gpu.lock and calls this. `python -m tests.gpu --device cpu` runs the same checks
on a CPU, with the kernels in Triton's interpreter. `--quick` runs a small part of every check, in this process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.gpu.checks import CHECKS, ROOT, Row


def markdown(rows: list[Row], machine: dict[str, object]) -> str:
    """Return a line about the machine and the rows as a table."""
    facts = ", ".join(f"{name} {value}" for name, value in machine.items() if value is not None)
    cell = lambda text: " ".join(text.replace("|", "/").split())[:300]  # noqa: E731
    lines = [f"| {one['check']} | {one['what']} | {cell(one['result'])} |" for one in rows]
    return "\n".join([f"`make test-gpu`: {facts}", "", "| check | what | result |", "|---|---|---|", *lines])


def run_in_new_process(name: str, device: str) -> list[Row]:
    """Run a check in a new process: after a GPU error, a process cannot use the GPU any more."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "tests.gpu", "--device", device, "--only", name, "--json", str(file)]
        subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.DEVNULL)
        if file.exists():
            found: list[Row] = json.loads(file.read_text())
            return found
    return [{"check": name, "what": "", "result": "FAILED: the process ended early"}]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    made = argparse.ArgumentParser("tests.gpu", description=__doc__)
    made.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    made.add_argument("--quick", action="store_true", help="a small part of every check, in this process")
    made.add_argument("--only", choices=sorted(CHECKS), help="one check, in this process")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    return made


def main(argv: list[str] | None = None) -> int:
    """Return 0, or 1 if a check failed."""
    args = parser().parse_args(argv)
    import torch

    from recsys_topk.bench.result import machine

    if args.device == "cuda" and not torch.cuda.is_available():
        parser().error("torch finds no GPU; use --device cpu to run the checks on a CPU")
    rows: list[Row] = []
    for name in [args.only] if args.only else CHECKS:
        sys.stderr.write(f"{name} ...\n")
        rows += (
            CHECKS[name](args.device, args.quick) if args.only or args.quick else run_in_new_process(name, args.device)
        )
    if args.json is not None:
        args.json.write_text(json.dumps(rows))
    failed = [one for one in rows if one["result"].startswith("FAILED")]
    sys.stdout.write(markdown(rows, machine()) + f"\n\n{len(rows)} rows, {len(failed)} failed\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
