"""Settings of libraries for a run: no notices that do not concern it, and freed memory is kept for the next step."""

from __future__ import annotations

import ctypes
import logging
import re
import sys
import warnings

# Numbers of glibc's mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> bool:
    """Let the C library keep freed blocks of up to 32 MB; return whether it accepted the setting.

    A training step frees and allocates the same few hundred megabytes. If they are returned to the system, the kernel
    zeroes every page again. Peak memory does not change. Without glibc this has no effect.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, 32 * 2**20)) and bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1))


NOTICES = (
    "Failed to import: fbgemm_gpu|is now DEPRECATED|does not have many workers|LeafSpec|The number of training batches|"
    "torch.distributed.(reduce_scatter_tensor|all_gather_into_tensor)|deprecating ShardedTensor|"
    "Checkpoint directory|callbacks used to create the checkpoint|infer the batch indices fetched|"
    "Total length of `list` across ranks is zero"
)
GREETINGS = re.compile(
    "(GPU|TPU|HPU) available|💡|`Trainer.|Restor(ing|ed)|Loaded model weights|Loading `train_dataloader`|Using|-{20}|"
    "\nDetected KeyboardInterrupt|Trainer was signaled"
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
