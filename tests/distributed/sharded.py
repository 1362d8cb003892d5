"""Run in several processes: every case of `training.CASES`, then saving and resuming."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from tests.distributed.training import CASES, train


def main(folder: Path) -> None:
    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = {}
    wanted = os.environ.get("CASES")
    for case in CASES:
        if wanted and case.name not in wanted.split(","):
            continue
        result = train(case, processes, folder)
        if rank == 0:
            torch.save(result["weights"], folder / f"{case.name}.pt")
        found[case.name] = {key: result[key] for key in ("losses", "metrics", "digest")}
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
