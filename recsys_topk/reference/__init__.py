"""The published research code reproduced with its faults, for comparisons with its figures only.

These classes have no registry name. Use the class path, e.g. ``--objective recsys_topk.reference.PublishedJoint``.

- `PublishedJoint`, `PublishedICC`: objectives of `recsys_topk.cascades.objectives`
- `PublishedARF`, `PublishedARFV2`: losses of `recsys_topk.losses`
- `PublishedRecall`, `PublishedJointRecall`: metrics of `recsys_topk.metrics`
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsys_topk.lazy import attach

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

__getattr__, __dir__ = attach(__name__)
