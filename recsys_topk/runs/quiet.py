"""Filters for notices of libraries that do not concern the run."""

from __future__ import annotations

import logging
import re
import warnings

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
    """Hide notices that do not concern the run, such as TorchRec's at import and Lightning's advice on workers."""
    warnings.filterwarnings("ignore", message=f".*({NOTICES}).*")
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="fbgemm_gpu.*")
    for name, level in LOUD.items():
        logging.getLogger(name).setLevel(level)
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).addFilter(_is_about_the_run)


def _is_about_the_run(record: logging.LogRecord) -> bool:
    """Return False for Lightning's greetings. The lines of data modules use the same logger and are kept."""
    return not GREETINGS.match(record.getMessage())
