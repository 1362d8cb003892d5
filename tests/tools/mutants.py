"""`make mutants`: change the code in small ways, and see whether the tests that cover the changed line fail.

The tests run once under coverage, which records the tests of every line. Then, for each of N mutants (drawn with a
seed), a copy of the repository gets one change, and at most ``--tests-per-mutant`` of its tests run. The JSON is
written after each mutant; the same command resumes. Survivors are listed; ``tests/tools/survivors.json`` has the
reasons of those that no test can kill.

    python -m tests.tools.mutants --number 400 --out runs/mutants
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ROOMS = ("losses", "operators", "ops", "metrics", "cascades/objectives", "trust", "serving")
OTHER: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change of one expression."""

    file: str
    line: int
    column: int
    end: tuple[int, int]
    before: str
    after: str

    @property
    def name(self) -> str:
        digest = hashlib.sha256(f"{self.before}>{self.after}".encode()).hexdigest()[:6]
        return f"{self.file}:{self.line}:{self.column}:{digest}"


def changes(node: ast.expr) -> Iterator[ast.expr]:
    """Return the changed forms of an expression."""
    made: Any = copy.deepcopy(node)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OTHER:
        made.ops[0] = OTHER[type(node.ops[0])]()
        yield made
    elif isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in OTHER:
        made.op = OTHER[type(node.op)]()
        yield made
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        made.body, made.orelse = made.orelse, made.body
        yield made
    elif isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
        made.value = not node.value if isinstance(node.value, bool) else node.value + 1
        yield made


def expressions(tree: ast.AST) -> Iterator[ast.expr]:
    """Return the expressions that run: no annotations, messages of errors, decorators and type checks."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "slice") or isinstance(tree, (ast.Raise, ast.JoinedStr)):
            continue
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.expr):
                yield part
            if isinstance(part, ast.AST):
                yield from expressions(part)


def mutants_of(file: str) -> Iterator[Mutant]:
    """Return all mutants of a file of the repository."""
    text = (ROOT / file).read_text()
    for node in expressions(ast.parse(text)):
        before = ast.get_source_segment(text, node)
        for changed in changes(node) if before else ():
            end = (node.end_lineno or 0, node.end_col_offset or 0)
            yield Mutant(file, node.lineno, node.col_offset, end, str(before), f"({ast.unparse(changed)})")


def mutated(mutant: Mutant) -> bytes:
    """Return the file with the change; the other lines keep their numbers."""
    lines = (ROOT / mutant.file).read_bytes().splitlines(keepends=True)
    first, last = mutant.line - 1, mutant.end[0] - 1
    head, tail = lines[first][: mutant.column], lines[last][mutant.end[1] :]
    changed = head + mutant.after.encode() + tail
    made = b"".join([*lines[:first], changed, *lines[last + 1 :]])
    compile(made, mutant.file, "exec")
    return made


def cover(data: Path, tests: list[str], rooms: list[str]) -> None:
    """Run the tests once under coverage."""
    settings = data.with_suffix(".ini")
    wanted = [f"    recsys_topk/{room}" + ("" if room.endswith(".py") else "/*") for room in rooms]
    settings.write_text("\n".join(["[run]", "include =", *wanted, ""]))
    command = ["-m", "coverage", "run", f"--rcfile={settings}", f"--data-file={data}", "-m", "pytest", "-q",
               "-p", "tests.tools.contexts", "-p", "no:cacheprovider", "-m", "not long", *tests]  # fmt: skip
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment(ROOT), check=False)
    if done.returncode:
        data.unlink(missing_ok=True)
        raise SystemExit("the tests must pass before the code is changed")


def environment(root: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip


def tests_by_line(data: Path) -> dict[str, dict[int, list[str]]]:
    """Return the ids of the tests that run each line, by file."""
    from coverage import CoverageData

    read = CoverageData(str(data))
    read.read()
    found = {}
    for file in read.measured_files():
        contexts = read.contexts_by_lineno(file)
        found[str(Path(file).relative_to(ROOT))] = {
            line: [test for test in tests if "::" in test] for line, tests in contexts.items()
        }
    return found


def chosen(tests: list[str], file: str, most: int) -> list[str]:
    """Return at most `most` tests: first those in the folder of the file, spread over the functions."""
    room = Path(file).parts[1]
    shuffled = random.Random(file).sample(sorted(tests), len(tests))
    seen: dict[str, int] = {}
    order = []
    for test in shuffled:
        function = test.partition("[")[0]
        seen[function] = seen.get(function, 0) + 1
        order.append((seen[function], f"/{room}/" not in test, test))
    return [test for *_, test in sorted(order)[:most]]


def try_mutant(mutant: Mutant, tests: list[str], place: Path, seconds: float) -> dict[str, Any]:
    """Run the tests on a copy of the repository with the change."""
    file = place / mutant.file
    file.write_bytes(mutated(mutant))
    (place / "tests.txt").write_text("\n".join(tests))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header", "@tests.txt"]
    try:
        done = subprocess.run(
            command, cwd=place, env=environment(place), capture_output=True, text=True, timeout=seconds, check=False
        )
        status = {0: "survived", 1: "killed", 2: "killed"}.get(done.returncode, f"status {done.returncode}")
        by = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    except subprocess.TimeoutExpired:
        status, by = "timeout", []
    finally:
        shutil.copy(ROOT / mutant.file, file)
    return {**asdict(mutant), "status": status, "tests": len(tests), "by": by[0][:200] if by else ""}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--number", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", nargs="+", default=list(ROOMS), help="folders or files of the package")
    parser.add_argument("--tests", nargs="+", default=["tests", "recsys_topk"], help="what runs under coverage")
    parser.add_argument("--tests-per-mutant", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=300.0, help="longest time of one mutant")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--covered-only", action="store_true", help="draw only lines that a test runs")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    data, target = out / "coverage", out / "mutants.json"
    if not data.is_file():
        cover(data, options.tests, options.rooms)
    lines = tests_by_line(data)
    rooms = [ROOT / "recsys_topk" / room for room in options.rooms]
    paths = [path for room in rooms for path in ([room] if room.suffix else room.rglob("*.py"))]
    files = [path.relative_to(ROOT).as_posix() for path in paths]
    every = [mutant for file in sorted(files) for mutant in mutants_of(file)]
    if options.covered_only:
        every = [mutant for mutant in every if lines.get(mutant.file, {}).get(mutant.line)]
    drawn = random.Random(options.seed).sample(every, min(options.number, len(every)))
    results: dict[str, Any] = json.loads(target.read_text()) if target.is_file() else {}
    places = [out / f"copy-{number}" for number in range(options.jobs)]
    for place in places:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(ROOT, place, ignore=shutil.ignore_patterns(".*", "runs", "_build", "__pycache__", "generated"))

    def work(number: int) -> None:
        for mutant in drawn[number :: options.jobs]:
            if mutant.name in results:
                continue
            tests = lines.get(mutant.file, {}).get(mutant.line, [])
            found = {**asdict(mutant), "status": "no test", "tests": 0, "by": ""}
            if tests:
                picked = chosen(tests, mutant.file, options.tests_per_mutant)
                found = try_mutant(mutant, picked, places[number], options.seconds)
            results[mutant.name] = found
            target.write_text(json.dumps(dict(results), indent=1))
            print(f"{found['status']:9} {mutant.name} {mutant.before!r} -> {mutant.after!r}", flush=True)  # noqa: T201

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(work, range(options.jobs)))
    return report([results[mutant.name] for mutant in drawn])


def report(results: list[dict[str, Any]]) -> int:
    """Print the share of killed mutants and the survivors without a reason; return 1 if there is one."""
    reasons = json.loads((Path(__file__).parent / "survivors.json").read_text())
    killed = sum(one["status"] in ("killed", "timeout") for one in results)
    print(f"{killed} of {len(results)} mutants killed ({killed / max(len(results), 1):.0%})")  # noqa: T201
    left = [one for one in results if one["status"] not in ("killed", "timeout")]
    keys = [f"{one['file']}: {one['before']} -> {one['after']}" for one in left]
    for one, key in zip(left, keys, strict=True):
        print(f"{one['status']}: line {one['line']} of {key}  [{reasons.get(key, 'no reason yet')}]")  # noqa: T201
    return int(any(key not in reasons for key in keys))


if __name__ == "__main__":
    sys.exit(main())
