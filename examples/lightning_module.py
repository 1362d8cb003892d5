"""A ranking loss in your own LightningModule: only the line that creates the loss and the line that calls it change."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from recsys_topk.losses import DFTopKLoss
from recsys_topk.metrics import RecallAt


class Ranker(LightningModule):
    def __init__(self, features: int):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(features, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        self.loss = DFTopKLoss(k=5)  # was: torch.nn.BCEWithLogitsLoss()
        self.recall = RecallAt(k=5, m=5)

    def training_step(self, batch, _):
        items, labels, mask = batch  # (B, N, features), (B, N), (B, N)
        return self.loss(self.net(items).squeeze(-1), labels, mask)

    def validation_step(self, batch, _):
        items, labels, mask = batch
        self.recall(self.net(items).squeeze(-1), labels, mask)
        self.log("recall", self.recall)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)


torch.manual_seed(0)
items, mask = torch.randn(640, 30, 8), torch.rand(640, 30) > 0.1  # 640 lists of 30 candidates, some are padding
labels = ((items[..., 0] - items[..., 1]) * mask > 1.5).float()
batches = DataLoader(TensorDataset(items, labels, mask), batch_size=64)
trainer = Trainer(max_epochs=4, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
model = Ranker(8)
before = trainer.validate(model, batches, verbose=False)[0]["recall"]
trainer.fit(model, batches)
print(f"recall@5 {before:.3f} -> {trainer.validate(model, batches, verbose=False)[0]['recall']:.3f}")
