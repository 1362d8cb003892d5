"""The published research code reproduced with its faults, for comparisons with its figures only.

These classes have no registry name. Use the class path, e.g. ``--objective recsys_topk.reference.PublishedJoint``.

- `PublishedJoint`, `PublishedICC`: objectives of `recsys_topk.cascades.objectives`
- `PublishedARF`, `PublishedARFV2`: losses of `recsys_topk.losses`
- `PublishedRecall`, `PublishedJointRecall`: metrics of `recsys_topk.metrics`
- `recsys_topk.reference.research_reader`: reads RecFlow one request at a time, the baseline of `bench data`
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recsys_topk.reference.arf import PublishedARF, PublishedARFV2
    from recsys_topk.reference.icc import PublishedICC
    from recsys_topk.reference.joint import PublishedJoint
    from recsys_topk.reference.recall import PublishedJointRecall, PublishedRecall

__all__ = [
    "PublishedARF",
    "PublishedARFV2",
    "PublishedICC",
    "PublishedJoint",
    "PublishedJointRecall",
    "PublishedRecall",
]

_MODULES = {
    "PublishedARF": "arf",
    "PublishedARFV2": "arf",
    "PublishedICC": "icc",
    "PublishedJoint": "joint",
    "PublishedJointRecall": "recall",
    "PublishedRecall": "recall",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
