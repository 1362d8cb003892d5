"""`recsys-topk doctor`: which versions are here, whether they fit together, and what mends what does not."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from recsys_topk import __version__
from recsys_topk.cli.console import echo
from recsys_topk.runs.text import table

TORCH, TORCHREC, FBGEMM = "2.13.0", "1.9.2", "1.8.0"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True)
class Check:
    """One line of the report: what was found, whether it is right, and the command that mends it."""

    part: str
    found: str
    fine: bool
    wanted: str
    cure: str = ""


def installed(name: str) -> str | None:
    """Return the version of a distribution, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:3] if part.isdigit())


def check_versions(found: Mapping[str, str | None], python: tuple[int, ...] = sys.version_info[:3]) -> list[Check]:
    """Judge a set of installed versions (a function of its arguments, so that broken sets can be tested).

    Args:
        found: Version by distribution name; None = not installed.
        python: Version of the interpreter.
    """
    checks = [
        Check(
            "python",
            ".".join(map(str, python)),
            python >= (3, 10),
            ">= 3.10",
            "install Python 3.10 or newer, then: make clean && make install PYTHON=python3.11",
        )
    ]
    torch = found.get("torch")
    cuda = torch is not None and "+cpu" not in torch and found.get("fbgemm-gpu-cpu") is None
    torch_cure = (
        f"pip install --no-deps torch=={TORCH}"
        if cuda
        else f"pip install --no-deps torch=={TORCH}+cpu --index-url {TORCH_INDEX}"
    )
    fits = torch is not None and _release(torch)[:2] == _release(TORCH)[:2]
    checks.append(Check("torch", torch or "missing", fits, f"{TORCH} (what fbgemm {FBGEMM} was built for)", torch_cure))
    fbgemm_name = "fbgemm-gpu" if cuda else "fbgemm-gpu-cpu"
    fbgemm = found.get(fbgemm_name)
    both = found.get("fbgemm-gpu") is not None and found.get("fbgemm-gpu-cpu") is not None
    if both:
        cure = f"pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu && pip install --no-deps fbgemm-gpu-cpu=={FBGEMM}"
        checks.append(Check("fbgemm", "both the CUDA and the CPU build", False, "one of the two", cure))
    else:
        wrong = found.get("fbgemm-gpu") if fbgemm is None else None
        shown = f"fbgemm-gpu {wrong} (CUDA) beside a CPU torch" if wrong else fbgemm or "missing"
        cure = f"pip install --no-deps {fbgemm_name}=={FBGEMM}"
        cure = f"pip uninstall -y fbgemm-gpu && {cure}" if wrong else cure
        checks.append(Check(fbgemm_name, shown, fbgemm == FBGEMM, FBGEMM, cure))
    torchrec = found.get("torchrec")
    cure = f"pip install --no-deps torchrec=={TORCHREC}"
    checks.append(Check("torchrec", torchrec or "missing", torchrec == TORCHREC, TORCHREC, cure))
    metrics = found.get("torchmetrics")
    fine = metrics is not None and (1, 9) <= _release(metrics) < (2,)
    cure = "pip install --no-deps 'torchmetrics>=1.9,<2'  (TorchRec's own pin of 1.0.3 is too old for Lightning)"
    checks.append(Check("torchmetrics", metrics or "missing", fine, ">= 1.9, < 2", cure))
    for name, low, high in (("lightning", (2, 5), (2, 7)), ("jsonargparse", (4, 40), (4, 54))):
        have = found.get(name)
        fine = have is not None and low <= _release(have) < high
        wanted = f">= {low[0]}.{low[1]}, < {high[0]}.{high[1]}"
        cure = f"pip install '{name}>={low[0]}.{low[1]},<{high[0]}.{high[1]}'"
        checks.append(Check(name, have or "missing", fine, wanted, cure))
    for name in ("datasets", "pyarrow", "wandb", "tensordict"):
        have = found.get(name)
        checks.append(
            Check(
                name,
                have or "missing",
                have is not None,
                "any",
                "make install (or, in a clone: pip install '.[train]')",
            )
        )
    return checks


PARTS = (
    "torch", "fbgemm-gpu", "fbgemm-gpu-cpu", "torchrec", "torchmetrics", "lightning", "jsonargparse", "datasets",
    "pyarrow", "wandb", "tensordict",
)  # fmt: skip

PROBE = """
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
table = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=3, feature_names=["f"])
ebc = EmbeddingBagCollection(tables=[table])
kjt = KeyedJaggedTensor(keys=["f"], values=torch.tensor([0, 2]), lengths=torch.tensor([1, 1]))
ebc(kjt).values().sum().backward()
"""


def probe_torchrec() -> Check:
    """Look a row up and differentiate it, in a process of its own: a mismatched fbgemm can crash the interpreter."""
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=False)
    reason = (done.stderr.strip().splitlines() or ["it crashed"])[-1]
    found = "works" if done.returncode == 0 else reason[:100]
    return Check("embedding look-up", found, done.returncode == 0, "forward and backward", "make clean && make install")


def gpu() -> str:
    """Say which GPU torch sees, in one phrase."""
    code = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    name = done.stdout.strip()
    return name if done.returncode == 0 and name else "none visible: train with --trainer.accelerator cpu"


def loops() -> str:
    """Say whether the compiled inner loops for a CPU are there, in one phrase."""
    numba = installed("numba")
    return f"numba {numba}" if numba else "none: pip install numba (extra 'fast') makes training on a CPU faster"


def main(argv: list[str]) -> int:
    """Print the report; return 1 if something does not fit."""
    parser = argparse.ArgumentParser(prog="recsys-topk doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    options = parser.parse_args(argv)
    checks = [*check_versions({name: installed(name) for name in PARTS}), probe_torchrec()]
    device = gpu()
    if options.json:
        found = {"version": __version__, "gpu": device, "loops": loops(), "checks": [vars(check) for check in checks]}
        echo(json.dumps(found, indent=1))
    else:
        echo(f"recsys-topk {__version__} on {platform.platform()}")
        rows = [{"part": c.part, "found": c.found, "wanted": c.wanted, "": "ok" if c.fine else "WRONG"} for c in checks]
        echo(table(rows))
        echo(f"GPU: {device}")
        echo(f"compiled loops: {loops()}")
        for check in checks:
            if not check.fine:
                echo(f"to mend {check.part}: {check.cure}")
        fits = all(check.fine for check in checks)
        echo("everything fits together" if fits else "the losses work all the same: they need torch and numpy only")
    return 0 if all(check.fine for check in checks) else 1
