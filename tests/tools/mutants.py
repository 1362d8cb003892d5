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
import contextlib
import copy
import functools
import hashlib
import importlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("losses", "operators", "ops", "metrics", "cascades/objectives", "trust", "serving")
LIBRARIES = ("torch", "lightning.pytorch", "torchmetrics", "torchrec", "numba", "pyarrow", "yaml", "jsonargparse")
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
    text = (ROOT / file).read_bytes()
    lines = text.splitlines(keepends=True)
    for node in expressions(ast.parse(text)):
        for changed in changes(node):
            end = (node.end_lineno or 0, node.end_col_offset or 0)
            inside = b"".join(lines[node.lineno - 1 : end[0]])  # ast.get_source_segment splits the file every time
            before = inside[node.col_offset : len(inside) - len(lines[end[0] - 1]) + end[1]].decode()
            yield Mutant(file, node.lineno, node.col_offset, end, before, f"({ast.unparse(changed)})")


def mutated(mutant: Mutant) -> bytes:
    """Return the file with the change; the other lines keep their numbers."""
    lines = (ROOT / mutant.file).read_bytes().splitlines(keepends=True)
    first, last = mutant.line - 1, mutant.end[0] - 1
    head, tail = lines[first][: mutant.column], lines[last][mutant.end[1] :]
    changed = head + mutant.after.encode() + tail
    made = b"".join([*lines[:first], changed, *lines[last + 1 :]])
    compile(made, mutant.file, "exec")
    return made


def cover(folder: Path, tests: list[str], rooms: list[str]) -> None:
    """Run each of the tests once under coverage, one data file per argument; what was measured before is kept."""
    folder.mkdir(exist_ok=True)
    settings = folder / "settings.ini"
    wanted = [f"    recsys_topk/{room}" + ("" if room.endswith(".py") else "/*") for room in rooms]
    settings.write_text("\n".join(["[run]", "include =", *wanted, ""]))
    for test in tests:
        data = folder / f"{test.replace('/', '-')}.coverage"
        if data.is_file():
            continue
        partial = data.with_suffix(".partial")
        command = ["-m", "coverage", "run", f"--rcfile={settings}", f"--data-file={partial}", "-m", "pytest", "-q",
                   "-p", "tests.tools.contexts", "-p", "no:cacheprovider", "-m", "not long", test]  # fmt: skip
        done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment(ROOT), check=False)
        if done.returncode:
            raise SystemExit(f"{test}: the tests must pass before the code is changed")
        partial.rename(data)


def environment(root: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip


def tests_by_line(folder: Path) -> dict[str, dict[int, list[str]]]:
    """Return the ids of the tests that run each line, by file. A line that only an import runs has no test."""
    from coverage import CoverageData

    lines: dict[str, dict[int, list[str]]] = {}
    for data in sorted(folder.glob("*.coverage")):
        read = CoverageData(str(data))
        read.read()
        for file in read.measured_files():
            of_file = lines.setdefault(str(Path(file).relative_to(ROOT)), {})
            for line, tests in read.contexts_by_lineno(file).items():
                of_file.setdefault(line, []).extend(test for test in tests if "::" in test)
    return lines


def statement(file: str, line: int) -> int:
    """Return the first line of the innermost statement that holds a line: only some of its lines are recorded."""
    return max((first for first, last in statements(ROOT / file) if first <= line <= last), default=line)


@functools.cache
def statements(path: Path) -> list[tuple[int, int]]:
    """Return the first and the last line of every statement of a file."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return [(node.lineno, node.end_lineno or 0) for node in nodes if isinstance(node, ast.stmt)]


def covering(lines: dict[int, list[str]], file: str, line: int) -> list[str]:
    """Return the tests that run a line; those of the whole file if only the import runs it (a default, a constant)."""
    seen = [lines[at] for at in range(line, statement(file, line) - 1, -1) if at in lines]
    if not seen:
        return []
    return seen[0] or sorted({test for tests in lines.values() for test in tests})


def chosen(tests: list[str], file: str, most: int) -> list[str]:
    """Return at most `most` tests: spread over the functions, long ones (contracts) last, then by folder."""
    room = Path(file).parts[1]
    shuffled = random.Random(file).sample(sorted(tests), len(tests))
    seen: dict[str, int] = {}
    order = []
    for test in shuffled:
        function = test.partition("[")[0]
        seen[function] = seen.get(function, 0) + 1
        order.append((seen[function], "_contract.py" in test, f"/{room}/" not in test, test))
    return [test for *_, test in sorted(order)[:most]]


def warm() -> None:
    """Import the heavy libraries, and nothing of the project: the tests of each mutant run in a fork."""
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def run_tests(place: Path, tests: list[str]) -> None:
    """Run tests of a copy of the repository, in a forked process, with the output in ``output.txt``."""
    os.setsid()
    output = os.open(place / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w") for stream in (1, 2))
    for name, module in list(sys.modules.items()):
        if name != "__main__" and (getattr(module, "__file__", None) or "").startswith(f"{ROOT}{os.sep}recsys_topk"):
            raise RuntimeError(f"{name} was imported before the code was changed")
        if name.partition(".")[0] == "tests":
            del sys.modules[name]
    os.environ.update(environment(place))
    os.chdir(place)
    sys.path.insert(0, str(place))
    status = pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--no-header", *tests])
    sys.stdout.flush()
    os._exit(int(status))


def try_mutant(mutant: Mutant, tests: list[str], place: Path, seconds: float) -> dict[str, Any]:
    """Run the tests on a copy of the repository with the change."""
    file = place / mutant.file
    file.write_bytes(mutated(mutant))
    process = multiprocessing.get_context("fork").Process(target=run_tests, args=(place, tests))
    begin = time.monotonic()
    try:
        process.start()
        process.join(seconds)
        late = process.is_alive()
        with contextlib.suppress(ProcessLookupError):  # what the tests started, too
            os.killpg(int(process.pid or 0), signal.SIGKILL)
        process.join()
    finally:
        shutil.copy(ROOT / mutant.file, file)
    text = (place / "output.txt").read_text(errors="replace")
    by = [line for line in text.splitlines() if line.startswith(("FAILED", "ERROR"))]
    status = {0: "survived", 1: "killed", 2: "killed"}.get(int(process.exitcode or 0), f"status {process.exitcode}")
    if late:
        status, by = "timeout", []
    took = round(time.monotonic() - begin, 1)
    return {**asdict(mutant), "status": status, "tests": len(tests), "seconds": took, "by": by[0][:200] if by else ""}


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
    cover(data, options.tests, options.rooms)
    lines = tests_by_line(data)
    rooms = [ROOT / "recsys_topk" / room for room in options.rooms]
    paths = [path for room in rooms for path in ([room] if room.suffix else room.rglob("*.py"))]
    files = [path.relative_to(ROOT).as_posix() for path in paths]
    every = [mutant for file in sorted(files) for mutant in mutants_of(file)]
    if options.covered_only:
        every = [mutant for mutant in every if covering(lines.get(mutant.file, {}), mutant.file, mutant.line)]
    drawn = random.Random(options.seed).sample(every, min(options.number, len(every)))
    results: dict[str, Any] = json.loads(target.read_text()) if target.is_file() else {}
    warm()
    places = [out / f"copy-{number}" for number in range(options.jobs)]
    for place in places:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(ROOT, place, ignore=shutil.ignore_patterns(".*", "runs", "_build", "__pycache__", "generated"))

    def work(number: int) -> None:
        for mutant in drawn[number :: options.jobs]:
            before = results.get(mutant.name)
            if before and (before["status"] != "timeout" or before["seconds"] >= options.seconds):
                continue
            tests = covering(lines.get(mutant.file, {}), mutant.file, mutant.line)
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
    """Print the share of killed mutants and the survivors without a reason; return 1 if there is one.

    A timeout is no verdict: the change may loop for ever, or the machine may be slow. A longer ``--seconds`` tries it
    again.
    """
    reasons = json.loads((Path(__file__).parent / "survivors.json").read_text())
    late = sum(one["status"] == "timeout" for one in results)
    killed, judged = sum(one["status"] == "killed" for one in results), len(results) - late
    print(f"{killed} of {judged} mutants killed ({killed / max(judged, 1):.0%}), {late} timed out")  # noqa: T201
    left = [one for one in results if one["status"] not in ("killed", "timeout")]
    keys = [f"{one['file']}: {one['before']} -> {one['after']}" for one in left]
    for one, key in zip(left, keys, strict=True):
        print(f"{one['status']}: line {one['line']} of {key}  [{reasons.get(key, 'no reason yet')}]")  # noqa: T201
    return int(any(key not in reasons for key in keys))


if __name__ == "__main__":
    sys.exit(main())
