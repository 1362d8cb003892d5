"""`make fuzz`: damaged and random input for everything that reads what others wrote, for a given time.

Every input is either read, or refused by an error that the command line shows as one line (ValueError, OSError,
ImportError). Anything else is a finding, and so are a much larger memory and a long time. The seed repeats a finding.

    python -m tests.tools.fuzz --seconds 60 --out runs/fuzz.json
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet

from recsys_topk.tabular.tables.reader import open_table

REFUSED = (ValueError, OSError, ImportError)
INTERESTING = [
    b"\x00", b"\xff\xff\xff\xff", b"-1", b"1e309", b"nan", b"'", b'"', b"\n", b"{{", b"&a [*a]", b"\xef\xbb\xbf",
    b"!!python/object:os.system", b"../../../etc/passwd", b"9" * 40, b"\x1b[31m", b"",
]  # fmt: skip


def damage(content: bytes, chance: random.Random) -> bytes:
    """Return a content with some bytes changed, cut, repeated or replaced."""
    made = bytearray(content)
    for _ in range(chance.choice([1, 1, 2, 5, 20])):
        at = chance.randrange(len(made) + 1)
        kind = chance.randrange(5)
        if kind == 0 and made:
            made[at % len(made)] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del made[at : at + chance.choice([1, 10, 1000])]
        elif kind == 2:
            made[at:at] = made[at : at + chance.choice([1, 10, 1000])]
        elif kind == 3:
            part = chance.choice(INTERESTING)
            made[at : at + len(part)] = part
        else:
            made[at:at] = chance.choice(INTERESTING)
    return bytes(made)


def table() -> pa.Table:
    draw = np.random.default_rng(0)
    return pa.table({
        "user_id": [f"u{n}" for n in draw.integers(0, 20, 200)], "item_id": draw.integers(0, 50, 200),
        "timestamp": 1_700_000_000 + np.arange(200), "price": draw.random(200),
    })  # fmt: skip


def readers(folder: Path, chance: random.Random) -> None:
    """Read a damaged CSV, Parquet, Feather or JSON-lines file."""
    suffix = chance.choice(["csv", "parquet", "feather", "jsonl"])
    path = folder / f"clicks.{suffix}"
    if suffix == "csv":
        pa.csv.write_csv(table(), path)
    elif suffix == "parquet":
        pa.parquet.write_table(table(), path)
    elif suffix == "feather":
        pa.feather.write_feather(table(), path)
    else:
        path.write_text("\n".join(json.dumps(row) for row in table().to_pylist()))
    path.write_bytes(damage(path.read_bytes(), chance))
    read = open_table(str(path))
    for batch in read.batches([name for name in ("user_id", "item_id") if name in read.schema.names]):
        batch.num_rows  # noqa: B018


CONFIG = """
loss: {class_path: dftopk, init_args: {tau: 1.0}}
model:
  dim: 8
  k: 5
  stages: [{kind: two_tower, name: retrieval, quota: 30}, {kind: din, name: ranking, quota: 10}]
data: {class_path: simulator, init_args: {train_negatives: 5}}
trainer: {max_epochs: 1, accelerator: cpu}
"""


def configs(folder: Path, chance: random.Random) -> None:
    """Parse a damaged config."""
    from recsys_topk.runs.run import TrainingRun

    path = folder / "config.yaml"
    path.write_bytes(damage(CONFIG.encode(), chance))
    TrainingRun({"config": [str(path)]}).options("fit")


def manifests(folder: Path, chance: random.Random) -> None:
    """Read the damaged manifest of an export."""
    from recsys_topk.serving.manifest import read_manifest

    path = folder / "manifest.json"
    path.write_bytes(damage((EXPORT / "manifest.json").read_bytes(), chance))
    read_manifest(folder, verify=False)


def bodies(folder: Path, chance: random.Random) -> None:
    """Send a damaged request to the service; an answer above 499 is a finding."""
    body = damage(json.dumps({"users": ["u1", "u2"], "k": 3}).encode(), chance)
    answer = client().post(
        chance.choice(["/recommend", "/recommend", "/score", "/similar"]), content=body,
        headers={"content-type": chance.choice(["application/json", "text/plain", "application/json; charset=utf-7"])},
    )  # fmt: skip
    if answer.status_code >= 500:
        raise AssertionError(f"status {answer.status_code} for {body!r:.300}")


@functools.cache
def client() -> Any:
    from starlette.testclient import TestClient

    from recsys_topk.serving.service import ServiceOptions, make_app

    made = TestClient(make_app(EXPORT, options=ServiceOptions(watch=0)), raise_server_exceptions=False)
    return made.__enter__()


def losses(folder: Path, chance: random.Random) -> None:
    """Compute a loss or an operator on random lists."""
    from recsys_topk.testing.fuzz import fuzz_one, fuzz_subjects

    kind, name = chance.choice(fuzz_subjects())
    found = fuzz_one(kind, name, lists=256, seed=chance.randrange(1 << 30))
    if not found.clean:
        raise AssertionError(found.first)


EXPORT = Path(__file__).parents[1] / "fixtures" / "v0_2" / "export"
TARGETS: dict[str, Callable[[Path, random.Random], None]] = {
    "readers": readers, "configs": configs, "manifests": manifests, "bodies": bodies,
    "losses": losses,
}  # fmt: skip


def fuzz(target: str, seed: int) -> dict[str, Any] | None:
    """Try one input; return the finding, if there is one."""
    folder, begin = Path(tempfile.mkdtemp(prefix="fuzz-")), time.process_time()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    problem = ""
    try:
        TARGETS[target](folder, random.Random(seed))
    except REFUSED as error:
        if str(error).count("\n") > 3:
            problem = f"{len(str(error).splitlines())} lines of error"
    except Exception as error:  # what is looked for
        problem = f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    if grown > 1000:
        problem = problem or f"{grown:,.0f} MB of memory"
    if time.process_time() - begin > 30:
        problem = problem or "30 seconds"
    return {"target": target, "seed": seed, "problem": problem[:500]} if problem else None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Try damaged and random inputs for a given time.")
    parser.add_argument("--seconds", type=float, default=60.0, help="time for all targets together")
    parser.add_argument("--most", type=int, default=1_000_000, help="most inputs per target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--out", type=Path, help="write the findings as JSON")
    options = parser.parse_args(argv)
    tried, findings = dict.fromkeys(options.targets, 0), []
    end = time.monotonic() + options.seconds
    for number in range(options.most):
        for target in options.targets:
            if number == 0 or time.monotonic() < end:  # at least one of each
                found = fuzz(target, options.seed + number)
                tried[target] += 1
                findings += [found] if found else []
        if time.monotonic() >= end:
            break
    text = json.dumps({"tried": tried, "findings": findings}, indent=1)
    print(text)  # noqa: T201
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text)
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
