"""Encoders of histories, one file each, registered by name. Classes are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsys_topk.lazy import attach

if TYPE_CHECKING:
    from recsys_topk.cascades.encoders.base import HistoryEncoder as HistoryEncoder
    from recsys_topk.cascades.encoders.mean import MeanEncoder as MeanEncoder
    from recsys_topk.cascades.encoders.recency import RecencyEncoder as RecencyEncoder
    from recsys_topk.cascades.encoders.transformer import TransformerEncoder as TransformerEncoder

__getattr__, __dir__ = attach(__name__)
