"""The tools of `make fuzz`, `make soak` and `make mutants`, in a tiny size."""

from __future__ import annotations

import ast
import errno
import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.tools import fuzz, mutants, soak

ROOT = Path(__file__).parents[2]
SMALL = """
def above(x: int, y: int = 3) -> bool:
    if x > y and not x == 5:
        raise ValueError(f"{x + 1}")
    return x * 2 >= y
"""


def test_mutants_change_one_expression_and_no_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    (tmp_path / "small.py").write_text(SMALL)
    made = {(one.before, one.after) for one in mutants.mutants_of("small.py")}
    assert made == {
        ("3", "(4)"), ("x > y and not x == 5", "(x > y or not x == 5)"), ("x > y", "(x >= y)"),
        ("not x == 5", "(x == 5)"), ("x == 5", "(x != 5)"), ("5", "(6)"), ("x * 2 >= y", "(x * 2 > y)"),
        ("x * 2", "(x / 2)"), ("2", "(3)"),
    }  # fmt: skip
    for one in mutants.mutants_of("small.py"):
        changed = mutants.mutated(one)
        assert len(changed.splitlines()) == len(SMALL.splitlines())
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(SMALL))


def test_the_tests_of_a_line_are_those_of_its_statement(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    (tmp_path / "lines.py").write_text(
        "def above(\n  x: int,\n  y: int = 3,\n) -> bool:\n  if x > 9:\n    return (x\n      > 1)\n  return x >= y\n"
    )
    lines = {1: [], 5: ["t::a", "t::b"], 8: ["t::b"]}  # as coverage records them: only a test of x <= 9 exists
    covering = {line: mutants.covering(lines, "lines.py", line) for line in range(1, 9)}
    assert covering[5] == ["t::a", "t::b"]
    assert covering[8] == ["t::b"]
    assert covering[6] == covering[7] == []
    assert covering[3] == ["t::a", "t::b"], "a default runs in the import; all tests of the file may depend on it"
    assert mutants.covering({**lines, 6: ["t::c"]}, "lines.py", 7) == ["t::c"]


def test_contracts_are_the_last_tests_of_a_mutant() -> None:
    tests = ["tests/losses/test_contract.py::a", "tests/ops/test_a.py::a[1]", "tests/ops/test_a.py::a[2]"]
    picked = mutants.chosen(tests, "recsys_topk/losses/a.py", 3)
    assert sorted(picked) == sorted(tests)
    assert picked[1] == tests[0]
    assert len(mutants.chosen(tests, "recsys_topk/losses/a.py", 2)) == 2


@pytest.mark.timeout(700)
def test_a_mutant_is_killed_by_a_test_and_survives_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "ROOT", tmp_path / "original")
    for place in (tmp_path / "original", tmp_path / "copy"):
        place.mkdir()
        (place / "small.py").write_text(SMALL)
        (place / "test_small.py").write_text(
            "from small import above\n\ndef test_two():\n    assert above(2)\n\ndef test_nothing():\n    assert above\n"
        )
    found = next(one for one in mutants.mutants_of("small.py") if one.before == "x * 2")
    for test, status in {"test_two": "killed", "test_nothing": "survived"}.items():
        tried = mutants.try_mutant(found, [f"test_small.py::{test}"], tmp_path / "copy", 280.0)
        assert tried["status"] == status
        assert (tmp_path / "copy" / "small.py").read_text() == SMALL
    one = {**tried, "line": 5}
    monkeypatch.setattr(mutants, "__file__", str(tmp_path / "mutants.py"))
    (tmp_path / "survivors.json").write_text("{}")
    assert mutants.report([one]) == 1
    (tmp_path / "survivors.json").write_text(json.dumps({f"small.py: {one['before']} -> {one['after']}": "known"}))
    assert mutants.report([one]) == 0


@pytest.mark.skipif(importlib.util.find_spec("coverage") is None, reason="coverage is not installed (extra dev)")
def test_contexts_are_the_tests_of_a_line(tmp_path: Path) -> None:
    mutants.cover(tmp_path / "coverage", ["tests/test_registry.py"], ["registry.py"])
    lines = mutants.tests_by_line(tmp_path / "coverage")["recsys_topk/registry.py"]
    assert {test.partition("::")[0] for tests in lines.values() for test in tests} == {"tests/test_registry.py"}


def test_fuzz_tries_every_target_and_repeats_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fault(folder: Path, chance: random.Random) -> None:
        if chance.random() < 0.5:
            raise KeyError("planted")

    monkeypatch.setitem(fuzz.TARGETS, "planted", fault)
    targets = ["readers", "manifests", "planted"]
    assert fuzz.main(["--seconds", "60", "--most", "8", "--out", str(tmp_path / "f.json"), "--targets", *targets]) == 1
    found = json.loads((tmp_path / "f.json").read_text())
    assert found["tried"] == dict.fromkeys(targets, 8)
    assert {one["target"] for one in found["findings"]} == {"planted"}
    assert all(fuzz.fuzz("planted", one["seed"]) == one for one in found["findings"])


@pytest.mark.parametrize(("kind", "number"), [("enospc", errno.ENOSPC), ("erofs", errno.EROFS), ("size", errno.EFBIG)])
def test_writes_fail_from_the_given_one_on(kind: str, number: int, tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from tests.tools.faulty import install
install({kind!r}, 2 if {kind!r} != "size" else 10, Path({str(tmp_path)!r}))
Path("first").write_text("123")
try:
    with Path("second").open("w") as file:
        file.write("4" * 20)
        file.flush()
except OSError as error:
    assert error.errno == {number}, error
    print("failed")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert done.stdout == "failed\n", done.stderr
    assert (tmp_path / "first").read_text() == "123"


@pytest.mark.timeout(700)
def test_soak_completes_a_killed_command_and_finds_another_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a script in place of the command, which counts to 5 in a file and resumes."""
    (tmp_path / "recsys_topk.py").write_text(COUNTER)
    monkeypatch.setattr(soak, "ROOT", tmp_path)
    monkeypatch.setitem(soak.JOBS, "count", soak.Job(["right"]))
    monkeypatch.setitem(soak.JOBS, "wrong", soak.Job(["wrong"]))
    out = tmp_path / "out"
    monkeypatch.setattr(soak, "WHEN", (0.6, 0.7))
    assert soak.main(["--kills", "2", "--faults", "0", "--jobs", "count", "wrong", "--out", str(out)]) == 1
    tried = json.loads((out / "soak.json").read_text())
    assert [one["job"] for one in tried] == ["count", "wrong"]
    assert [bool(one["problems"]) for one in tried] == [False, True]
    assert all(one["stopped"] == -9 for one in tried)


COUNTER = """
import json, sys, time
from pathlib import Path
file = Path("result/count.json")
file.parent.mkdir(exist_ok=True)
resumed = file.exists()
done = json.loads(file.read_text()) if resumed else []
while len(done) < 5:
    done.append(len(done))
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(done))
    partial.replace(file)
    time.sleep(0.02)
if resumed and sys.argv[1] == "wrong":
    file.write_text(json.dumps([*done, -1]))
time.sleep(1.5 * (not resumed))
"""


def test_results_ignore_times_and_see_weights(tmp_path: Path) -> None:
    for name, weight in {"a": 1.0, "b": 1.0, "c": 2.0}.items():
        folder = tmp_path / name / "result"
        folder.mkdir(parents=True)
        torch.save(
            {"state_dict": {"w": torch.tensor(weight)}, "optimizer_states": [], "global_step": 3}, folder / "m.ckpt"
        )
        (folder / "metrics.csv").write_text(f"step,loss,train/seconds\n0,0.5,{name}\n")
    a, b, c = (soak.result(tmp_path / name) for name in "abc")
    assert a == b
    assert a["result/metrics.csv"] == c["result/metrics.csv"] == [{"step": "0", "loss": "0.5"}]
    assert a["result/m.ckpt"] != c["result/m.ckpt"]
