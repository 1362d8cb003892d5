"""The lists of `recsys_topk.trust`: classes that a file may name, and keys whose values are names."""

from __future__ import annotations

import sys

PACKAGE = __name__.partition(".")[0]

# Classes that a file may build, by the package that exports them. They accept no code (unlike LambdaCallback), do not
# unpickle, and do not send data to a host that the file chooses (which excludes the loggers of online services).
HARMLESS: dict[str, tuple[str, ...]] = {
    "lightning.pytorch.callbacks": (
        "DeviceStatsMonitor", "EarlyStopping", "GradientAccumulationScheduler", "LearningRateMonitor",
        "ModelCheckpoint", "ModelSummary", "OnExceptionCheckpoint", "RichModelSummary", "RichProgressBar",
        "TQDMProgressBar", "Timer",
    ),
    "lightning.pytorch.callbacks.progress.rich_progress": ("RichProgressBarTheme",),
    "lightning.pytorch.loggers": ("CSVLogger", "TensorBoardLogger"),
    "lightning.pytorch.profilers": ("AdvancedProfiler", "PassThroughProfiler", "SimpleProfiler"),
    "lightning.pytorch.strategies": ("DDPStrategy", "SingleDeviceStrategy"),
    "lightning.pytorch.accelerators": ("CPUAccelerator", "CUDAAccelerator", "MPSAccelerator", "XLAAccelerator"),
    "lightning.pytorch.plugins": (
        "DoublePrecision", "HalfPrecision", "MixedPrecision", "Precision", "TorchSyncBatchNorm",
    ),
    "lightning.pytorch.plugins.environments": ("LightningEnvironment", "SLURMEnvironment", "TorchElasticEnvironment"),
    "lightning.fabric.plugins.environments": ("LightningEnvironment", "SLURMEnvironment", "TorchElasticEnvironment"),
    "torch.optim": (
        "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
    ),
    "torch.optim.lr_scheduler": (
        "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "ExponentialLR", "LinearLR", "MultiStepLR",
        "OneCycleLR", "PolynomialLR", "ReduceLROnPlateau", "StepLR",
    ),
}  # fmt: skip
# Modules of this package that a file may name: those that a config can configure (losses, data modules, ...), and
# callbacks that only write metrics. Other callbacks and loggers write to any path that they are given.
OWN = tuple(
    f"{PACKAGE}.{name}"
    for name in (
        "callbacks.diagnostics.Diagnostics", "cascades", "datamodules", "losses", "metrics", "operators", "reference",
        "strategies.torchrec.TorchRecStrategy",
    )
)  # fmt: skip
HARMLESS_NAMES = frozenset(name for names in HARMLESS.values() for name in names)
# Packages that are too broad to trust as a whole: a typed class path of theirs is trusted alone.
BROAD = frozenset(
    {PACKAGE, "lightning", "pytorch_lightning", "torch", "torchmetrics", "torchrec", *sys.stdlib_module_names}
)

# Keys whose value is always the name of a class.
CLASS_KEYS = frozenset({
    "class_path", "kind", "loss", "objective", "operator", "data", "model", "metric", "metrics", "callbacks", "logger",
    "strategy", "plugins", "profiler", "accelerator", "optimizer", "lr_scheduler",
})  # fmt: skip
# Keys whose value is text or a path, even if it looks like a class path ("runs.old").
TEXT_KEYS = frozenset({
    "out", "name", "root", "cache_dir", "default_root_dir", "ckpt_path", "dirpath", "filename", "save_dir", "root_dir",
    "version", "monitor", "description",
})  # fmt: skip
