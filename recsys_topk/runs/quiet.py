"""Notices of libraries that say nothing about the run are not shown."""

from __future__ import annotations

import logging
import re
import warnings

# Notices of libraries that say nothing about the run.
NOTICES = (
    "Failed to import: fbgemm_gpu|is now DEPRECATED|does not have many workers|LeafSpec|The number of training batches|"
    "torch.distributed.(reduce_scatter_tensor|all_gather_into_tensor)|deprecating ShardedTensor|"
    "Checkpoint directory|callbacks used to create the checkpoint|Total length of `list` across ranks is zero"
)
GREETINGS = re.compile(
    "(GPU|TPU|HPU) available|💡|`Trainer.|Restor(ing|ed)|Loaded model weights|Loading `train_dataloader`|Using|-{20}|"
    "\nDetected KeyboardInterrupt"
)
LOUD = {
    "lightning.fabric.utilities.seed": logging.WARNING,
    "lightning.fabric.utilities.distributed": logging.WARNING,
    "lightning.pytorch.trainer.connectors.checkpoint_connector": logging.WARNING,
    "torch.fx._symbolic_trace": logging.ERROR,
}


def quiet_libraries() -> None:
    """Silence notices that say nothing about the run: TorchRec's import and Lightning's advice on workers."""
    warnings.filterwarnings("ignore", message=f".*({NOTICES}).*")
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="fbgemm_gpu.*")
    for name, level in LOUD.items():
        logging.getLogger(name).setLevel(level)
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).addFilter(_is_about_the_run)


def _is_about_the_run(record: logging.LogRecord) -> bool:
    """Return False for Lightning's greetings; lines of the data modules go through the same logger and are kept."""
    return not GREETINGS.match(record.getMessage())
