"""Check the installed versions by use (losses, train, serve, gpu) and print how to fix those that do not fit.

A use of which nothing is installed is no fault: an environment that only serves needs no torch.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from recsys_topk import __version__
from recsys_topk.cli.console import echo, make_parser
from recsys_topk.runs.provenance import installed
from recsys_topk.text import table

TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# Distribution -> the lowest supported release, the first unsupported one, and the command that installs it.
NEEDED: dict[str, tuple[str, str, str]] = {
    "torch": ("2.13", "2.14", "pip install --no-deps torch==2.13.0"),
    "fbgemm-gpu-cpu": ("1.8.0", "1.8.1", "pip install --no-deps fbgemm-gpu-cpu==1.8.0"),
    "fbgemm-gpu": ("1.8.0", "1.8.1", "pip install --no-deps fbgemm-gpu==1.8.0"),
    "torchrec": ("1.9.2", "1.9.3", "pip install --no-deps torchrec==1.9.2"),
    # TorchRec's own pin of 1.0.3 is too old for Lightning.
    "torchmetrics": ("1.9", "2", "pip install --no-deps 'torchmetrics>=1.9,<2'"),
    "lightning": ("2.6", "2.7", "pip install 'lightning>=2.6,<2.7'"),
    "jsonargparse": ("4.53", "4.54", "pip install 'jsonargparse[signatures]>=4.53,<4.54'"),
    **dict.fromkeys(("datasets", "pyarrow", "wandb", "tensordict"), ("0", "", "pip install '.[train]' (in a clone)")),
}
PROBE = """
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
table = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=3, feature_names=["f"])
ebc = EmbeddingBagCollection(tables=[table])
kjt = KeyedJaggedTensor(keys=["f"], values=torch.tensor([0, 2]), lengths=torch.tensor([1, 1]))
ebc(kjt).values().sum().backward()
"""
SHOWN = ("use", "part", "found", "wanted", "fine")
SERVE = ("faiss-cpu", "fastapi", "onnxruntime", "prometheus-client", "pyarrow", "pyyaml", "uvicorn")
TRAIN = ("lightning", "torchrec")  # one of them shows that the environment is for training, one of the next for serving
SERVES = ("faiss-cpu", "fastapi")
GPU = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"


@dataclass(frozen=True)
class Check:
    """One line of the report: the version, whether it is supported, and the command that fixes it."""

    part: str
    found: str
    fine: bool
    wanted: str
    cure: str = ""
    use: str = "train"


def check_versions(versions: Mapping[str, str | None], python: tuple[int, ...] = sys.version_info[:3]) -> list[Check]:
    """Compare installed versions, by distribution name (None = not installed), with the supported ones."""
    shown = ".".join(map(str, python))
    cure = "install Python 3.11 or newer, then: make clean && make install PYTHON=python3.11"
    checks = [Check("python", shown, python >= (3, 11), ">= 3.11", cure, "all")]
    cuda = "+cpu" not in (versions.get("torch") or "+cpu") and versions.get("fbgemm-gpu-cpu") is None
    ours, other = ("fbgemm-gpu", "fbgemm-gpu-cpu") if cuda else ("fbgemm-gpu-cpu", "fbgemm-gpu")
    for name, (low, high, cure) in NEEDED.items():
        have = versions.get(name)
        fine = have is not None and _release(low) <= _release(have) and (not high or _release(have) < _release(high))
        wanted = f">= {low}, < {high}" if high else "any"
        if name == other:
            continue
        if name == "torch" and not cuda:
            cure = f"{cure}+cpu --index-url {TORCH_INDEX}"
        if name == ours and versions.get(other) is not None:
            cure = f"pip uninstall -y {other} && {cure}"
            if have is not None:
                name, have, fine, wanted = "fbgemm", "both the CUDA and the CPU build", False, "one of the two"
                cure = f"pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu && {NEEDED[ours][2]}"
        checks.append(Check(name, have or "missing", fine, wanted, cure))
    return checks


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:3] if part.isdigit())


def _python(code: str) -> tuple[int, str]:
    """Run code in a separate process, because it may crash; return its exit status and its last line."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return done.returncode, lines[-1] if lines else ""


def main(argv: list[str]) -> int:
    """Print the report; return 1 if a part of a use that is installed does not fit, or no use is installed."""
    parser = make_parser("doctor", __doc__)
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    options = parser.parse_args(argv)
    versions = installed()
    python, *train = check_versions(versions)
    checks = [python]
    if {"torch", "numpy"} <= set(versions):
        numba = f"numba {versions['numba']}" if "numba" in versions else "none: install numba, a CPU is faster with it"
        checks.append(Check("torch and numpy", f"{versions['torch']}, {versions['numpy']}", True, "any", use="losses"))
        checks.append(Check("compiled loops", numba, True, "optional", use="losses"))
        gpu = _python(GPU)[1] or "none visible: train with --trainer.accelerator cpu"
        checks.append(Check("GPU", gpu, True, "optional", use="gpu"))
    if any(name in versions for name in TRAIN):
        status, said = _python(PROBE)
        works, cure = "works" if status == 0 else (said or "it crashed")[:100], "make clean && make install"
        checks += [*train, Check("embedding look-up", works, status == 0, "forward and backward", cure)]
    if any(name in versions for name in SERVES):
        cure = "pip install '.[serve]' (in a clone)"
        checks += [Check(n, versions.get(n, "missing"), n in versions, "any", cure, "serve") for n in SERVE]
    uses = {check.use: all(c.fine for c in checks if c.use == check.use) for check in checks}
    ready = [use for use in ("losses", "train", "serve") if uses.get(use)]
    fits = all(uses.values()) and bool(ready)
    if options.json:
        echo(json.dumps({"version": __version__, "checks": [vars(check) for check in checks]}, indent=1))
        return 0 if fits else 1
    echo(f"recsys-topk {__version__} on {platform.platform()}")
    echo(table([{**vars(check), "fine": "ok" if check.fine else "WRONG"} for check in checks], SHOWN))
    for check in checks:
        if not check.fine:
            echo(f"to fix {check.part}: {check.cure}")
    for use, cure in (("losses", "pip install ."), ("train", "make install"), ("serve", "pip install '.[serve]'")):
        says = "ready" if use in ready else "does not work" if use in uses else f"not installed ({cure} in a clone)"
        echo(f"{use}: {says}")
    echo("everything fits together" if fits else "a use that is ready works all the same")
    return 0 if fits else 1
