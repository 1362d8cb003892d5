"""Lightning strategies: `torchrec.TorchRecStrategy` for embedding tables that are sharded over processes."""
