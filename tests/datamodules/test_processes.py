"""Two processes with Lightning's DDP see every request once, in training and in testing."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

SCRIPT = """
import json, sys
import torch
from lightning.pytorch import LightningModule, Trainer
from recsys_topk.datamodules.recflow.datamodule import RecFlowDataModule

class Recorder(LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen = {"train": [], "test": []}

    def training_step(self, batch, batch_idx):
        self.seen["train"] += batch.request_id.tolist()
        return self.weight * batch.labels.mean()

    def test_step(self, batch, batch_idx):
        self.seen["test"] += zip(batch.request_id.tolist(), batch.item_id[batch.candidates[:, 40:]].tolist())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)

root, cache, out = sys.argv[1:]
data = RecFlowDataModule(root=root, cache_dir=cache, batch_size=16, eval_negatives=12, num_workers=1)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, limit_val_batches=0, **quiet)
model = Recorder()
trainer.fit(model, data)
trainer.test(model, data, verbose=False)
with open(f"{out}/{trainer.global_rank}.json", "w") as file:
    json.dump(model.seen, file)
"""


@pytest.mark.slow
def test_two_processes_see_every_request_once(world_root: Path, tmp_path: Path, warm_python: list[str]) -> None:
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    command = [*warm_python, str(script), str(world_root), str(tmp_path / "cache"), str(tmp_path)]
    subprocess.run(command, check=True, timeout=240, capture_output=True)
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    first = 10_000_000
    assert sorted(seen[0]["train"] + seen[1]["train"]) == list(range(first, first + 300))
    assert abs(len(seen[0]["train"]) - len(seen[1]["train"])) <= 2
    tested = dict(map(tuple, seen[0]["test"] + seen[1]["test"]))
    assert sorted(tested) == list(range(first + 450, first + 600))

    from recsys_topk.datamodules.recflow.datamodule import RecFlowDataModule

    alone = RecFlowDataModule(root=str(world_root), cache_dir=str(tmp_path / "cache"), batch_size=64, eval_negatives=12)
    for batch in map(alone.add_negatives, alone.test_dataloader()):
        for request, items in zip(
            batch.request_id.tolist(), batch.item_id[batch.candidates[:, 40:]].tolist(), strict=True
        ):
            assert tested[request] == items
