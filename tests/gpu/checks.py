"""The checks of `make test-gpu`. Each is a function that takes a device and returns rows of the table."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from recsys_topk import losses, operators
from recsys_topk.cli.main import main as command
from recsys_topk.testing import check_loss, check_objective, check_operator
from recsys_topk.testing.fuzz import fuzz_one
from tests.conftest import TINY_WORLD

Row = dict[str, str]
ROOT = Path(__file__).parents[2]


def row(check: str, what: str, run: Callable[[], object]) -> Row:
    """Return a row of the table with the result of `run`, or with its error."""
    try:
        result = run()
    except Exception as error:  # any error is reported in the table
        return {"check": check, "what": what, "result": f"FAILED: {type(error).__name__}: {error}"}
    return {"check": check, "what": what, "result": "ok" if result is None else str(result)}


def contract(device: str, quick: bool) -> list[Row]:
    """Check losses, operators and the joint objective with the contract suite and with random lists."""
    from recsys_topk.cascades.objectives.joint import JointObjective

    rows = []
    for name, loss in losses.registry.classes().items():
        if not quick or name == "lapsum":
            rules = ["masked items have no effect", "k can be given per list"] if quick else None
            rows.append(row("contract", f"loss {name}", lambda c=loss, r=rules: check_loss(c, rules=r, device=device)))
    for name, operator in operators.registry.classes().items():
        if not quick or name == "sparse":
            rules = ["masked items have no effect", "ties are fair"] if quick else None
            run = lambda c=operator, r=rules: check_operator(c, rules=r, device=device)  # noqa: E731
            rows.append(row("contract", f"operator {name}", run))
    for name in ("dftopk",) if quick else ("dftopk", "sigmoid", "lapsum"):
        make = lambda name=name: JointObjective(losses.get(name), 2)  # noqa: E731
        rows.append(row("contract", f"joint {name}", lambda m=make: check_objective(m, 2, device=device)))

    def random_lists(kind: Any, name: str) -> None:
        found = fuzz_one(kind, name, 256 if quick else 20_000, device=device)
        assert found.clean, found.first

    for kind, names in (("loss", losses.available()), ("operator", operators.available())):
        for name in names:
            if not quick or name == "dftopk":
                rows.append(row("random lists", f"{kind} {name}", lambda k=kind, n=name: random_lists(k, n)))
    return rows


def kernels(device: str, quick: bool) -> list[Row]:
    """Run the tests of the Triton kernels on the GPU or in the interpreter."""

    def run() -> str:
        environment = dict(os.environ) if device == "cuda" else {**os.environ, "TRITON_INTERPRET": "1"}
        pytest_command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "tests/ops/test_triton_kernels.py",
        ]
        pytest_command += ["-k", "half_precision"] if quick else []
        done = subprocess.run(pytest_command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:]
        return done.stdout.strip().splitlines()[-1].strip("= ")

    return [row("kernels", "Triton", run)]


@contextlib.contextmanager
def no_waiting(device: str) -> Iterator[None]:
    """Raise if the host waits for the GPU; does nothing on a CPU."""
    if device != "cuda":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def waits(device: str, quick: bool) -> list[Row]:
    """Check that losses, operators and training steps do not wait for the GPU after a first call."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(16, 50, generator=generator).to(device).requires_grad_()
    labels = (torch.rand(16, 50, generator=generator) < 0.2).float().to(device)
    mask = (torch.rand(16, 50, generator=generator) < 0.8).to(device)
    ks = torch.randint(1, 6, (16,), generator=generator).to(device)

    def twice(call: Callable[[], object]) -> None:
        call()
        with no_waiting(device):
            call()

    rows = []
    for name in losses.available():
        if not quick or name in ("dftopk", "lambdaloss"):
            loss = losses.get(name, k=5).to(device)
            run = lambda f=loss: twice(lambda: f(scores, labels, mask, k=ks).backward())  # noqa: E731
            rows.append(row("no waiting", f"loss {name}", run))
    for name in operators.available():
        if not quick or name == "lapsum":
            operator = operators.get(name)
            run = lambda f=operator: twice(lambda: (f(scores, ks, mask).p * labels).sum().backward())  # noqa: E731
            rows.append(row("no waiting", f"operator {name}", run))
    flat, grades, one = scores.detach().flatten(), labels.flatten(), losses.get("dftopk", k=5)
    run = lambda: twice(lambda: one(flat, grades, lengths=[30, 0, 70, 700]))  # noqa: E731
    rows.append(row("no waiting", "flat lists, lengths on the host", run))
    for source in (None, "popularity") if quick else (None, "in_batch", "uniform", "popularity"):
        what = f"step, clipping, Adam, 25 negatives: {source}" if source else "step, clipping, Adam"
        rows.append(row("no waiting", what, lambda s=source: twice(_step(device, s))))
    return rows


def _step(device: str, source: Any) -> Callable[[], object]:
    """Return a function that takes one training step with sampled negatives, on a new catalogue per call."""
    from recsys_topk.bench.step import random_batch, random_schema
    from recsys_topk.cascades.module import CascadeModule
    from recsys_topk.cascades.optimizers import make_optimizer
    from recsys_topk.datamodules import Catalogue, expand

    schema = random_schema(500, 100)
    module = CascadeModule(schema, loss="dftopk", dim=8).to(device)
    optimizer = make_optimizer("adam", module, 1e-2, {})
    batch = random_batch(schema, 32, 30, 10)
    # Only the first calls of libraries may wait. The first use of a catalogue must not, so each step gets a new one.
    catalogues = [Catalogue(batch.item_id, batch.items).to(device) for _ in range(2)]
    batch = batch.to(device)

    def step() -> object:
        catalogue = catalogues.pop()
        this = batch
        if source is not None:
            group = len(schema.groups)
            this = expand(batch, 25, seed=1, group=group, source=source, catalogue=catalogue).batch
        quotas = module.cascade.quotas
        made = module.objective(module(this), this.labels, this.mask, groups=this.group, quotas=quotas, k=module.k)
        optimizer.zero_grad()
        made.total.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        return made.total

    return step


def output_of(*arguments: str) -> str:
    """Run a command of the package; return its output."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        status = command(list(arguments))
    assert status == 0, output.getvalue()[-2000:]
    return output.getvalue()


def fit(device: str, quick: bool) -> list[Row]:
    """Train a few steps in float32 and bf16-mixed, with dense and with fused tables."""
    accelerator = "gpu" if device == "cuda" else "cpu"
    kinds = [(p, o) for p in ("32-true", "bf16-mixed") for o in ("same", "rowwise_adagrad")]

    def run(precision: str, optimizer: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            output_of(
                "fit", *TINY_WORLD, f"--trainer.accelerator={accelerator}", "--trainer.devices=1",
                f"--trainer.precision={precision}", f"--model.embedding_optimizer={optimizer}",
                "--trainer.max_epochs=1", f"--trainer.limit_train_batches={2 if quick else 50}", f"--out={folder}/run",
            )  # fmt: skip
            lines = [line.split(",") for file in Path(folder).rglob("metrics.csv") for line in file.open()]
        found = [value for values in lines[1:] for name, value in zip(lines[0], values, strict=True) if "loss" in name]
        last = [float(value) for value in found if value.strip()][-1]
        assert last == last, "the loss is NaN"
        return f"ok, loss {last:.4f}"

    chosen = [kinds[0], kinds[-1]] if quick else kinds
    names = {"same": "dense tables", "rowwise_adagrad": "fused tables"}
    return [row("fit", f"{p}, {names[o]}", lambda p=p, o=o: run(p, o)) for p, o in chosen]


def bench(device: str, quick: bool) -> list[Row]:
    """Time losses, operators and steps."""
    least = ["--names", "dftopk", "--shapes", "2x9x3", "--seconds", "0.01"]
    options = {"losses": ["--quick"], "operators": ["--quick"], "step": []}
    if quick:
        step = ["--case", "train, rowwise", "--batch_size", "4", "--items", "12", "--history", "3", "--repeats", "1"]
        options = {"losses": ["--quick", *least], "operators": ["--quick", *least], "step": step}
    rows: list[Row] = []
    for suite, given in options.items():
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "result.json"
            arguments = ["bench", suite, *given, "--device", device, "--json", str(file)]
            done = row(f"bench {suite}", "", lambda a=arguments: output_of(*a))
            if done["result"].startswith("FAILED") or not file.exists():
                rows.append(done)
                continue
            for one in json.loads(file.read_text())["rows"]:
                words = [value for value in one.values() if isinstance(value, str)]
                ratio = f"ratio {one['ratio']:.2f}, " if one.get("ratio") is not None else ""
                rows.append(
                    {"check": f"bench {suite}", "what": " ".join(words), "result": f"{ratio}{one['ms']:.3f} ms"}
                )
    return rows


CHECKS: dict[str, Callable[[str, bool], list[Row]]] = {
    "contract": contract,
    "kernels": kernels,
    "waits": waits,
    "fit": fit,
    "bench": bench,
}
