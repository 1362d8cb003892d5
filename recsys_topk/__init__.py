"""Train recommender cascades so that the right *set* of items survives.

The sub-packages are imported on demand; this module imports neither torch nor any optional dependency:

- `recsys_topk.operators`: differentiable top-k membership (torch and numpy only)
- `recsys_topk.losses`: ranking losses behind one interface (torch and numpy only)
- `recsys_topk.metrics`: joint and per-stage recall, NDCG, Kendall tau
- `recsys_topk.cascades`: TorchRec stages, objectives and the LightningModule
- `recsys_topk.datamodules`: RecFlow, its simulator, negative expansion
"""

__version__ = "0.1.0"
__all__ = ["__version__"]
