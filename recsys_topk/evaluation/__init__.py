"""Evaluation beyond sampled lists: the whole catalogue, baselines, index search and diagnostics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsys_topk.lazy import attach

if TYPE_CHECKING:
    from recsys_topk.evaluation.corpus import CorpusEvaluation as CorpusEvaluation
    from recsys_topk.evaluation.corpus_metrics import CorpusMetrics as CorpusMetrics
    from recsys_topk.evaluation.corpus_metrics import evaluate_baseline as evaluate_baseline
    from recsys_topk.evaluation.corpus_metrics import evaluate_corpus as evaluate_corpus
    from recsys_topk.evaluation.list_baselines import measure_baselines as measure_baselines
    from recsys_topk.evaluation.popularity import Popularity as Popularity
    from recsys_topk.evaluation.search import ExactSearch as ExactSearch

__getattr__, __dir__ = attach(__name__)
