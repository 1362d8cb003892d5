"""What libraries say about themselves, kept from people who train."""

from __future__ import annotations

import logging
import warnings

# Notices of libraries that say nothing about the run.
NOTICES = (
    "Failed to import: fbgemm_gpu",
    "is now DEPRECATED",
    "does not have many workers",
    "LeafSpec",
    "The number of training batches",
    "Checkpoint directory",
    "callbacks used to create the checkpoint",
)
GREETINGS = (
    "GPU available",
    "TPU available",
    "HPU available",
    "💡",
    "`Trainer.",
    "Restoring",
    "Restored",
    "Loaded model weights",
    "Using",
    "\nDetected KeyboardInterrupt",
)


def quiet_libraries() -> None:
    """Silence notices that say nothing about the run: TorchRec's import and Lightning's advice on workers."""
    for pattern in NOTICES:
        warnings.filterwarnings("ignore", message=f".*{pattern}.*")
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="fbgemm_gpu.*")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_says_something)
    logging.getLogger("lightning.fabric.utilities.seed").setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.trainer.connectors.checkpoint_connector").setLevel(logging.WARNING)
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


def _says_something(record: logging.LogRecord) -> bool:
    """Drop Lightning's greetings; what the data module says about the world it makes goes through the same logger."""
    return not record.getMessage().startswith(GREETINGS)
