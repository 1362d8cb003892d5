"""One training run of a comparison: fit, test, and the numbers as JSON; run as a process of its own."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def main(argv: list[str]) -> int:
    """Train and test with the arguments of `fit`, and write what was measured to a file.

    Args:
        argv: The file to write, then the arguments of `fit`.
    """
    from recsys_topk.cli.training import run

    target, arguments = Path(argv[0]), argv[1:]
    start = time.perf_counter()
    cli = run(["fit", *arguments])
    seconds = time.perf_counter() - start
    cli.trainer.test(cli.model, datamodule=cli.datamodule, ckpt_path=None, verbose=False)
    measured = {name: float(value) for name, value in cli.trainer.callback_metrics.items() if name.startswith("test/")}
    partial = target.with_suffix(".partial")
    partial.write_text(json.dumps({"arguments": arguments, "seconds": seconds, "metrics": measured}, indent=1))
    partial.replace(target)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
