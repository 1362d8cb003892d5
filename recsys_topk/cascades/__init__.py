"""Cascades: TorchRec stages, joint objectives, the LightningModule."""
