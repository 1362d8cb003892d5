"""The metric classes: independence of batch size and processes, reset, pickling, and agreement with other libraries."""

import copy
import os
import pickle
import subprocess
from pathlib import Path

import pytest
import torch

from recsys_topk.metrics import (
    DCGAt,
    JointRecall,
    KendallTau,
    MAPAt,
    MRRAt,
    NDCGAt,
    PrecisionAt,
    RecallAt,
    SelectionMass,
    functional,
)
from tests.peers import cases

METRICS = {
    "recall": lambda: RecallAt(k=3, m=4),
    "joint_recall": lambda: JointRecall(k=3, quotas=(8, 4)),
    "ndcg": lambda: NDCGAt(k=5),
    "dcg": lambda: DCGAt(k=5, gain="linear"),
    "map": lambda: MAPAt(k=5),
    "mrr": MRRAt,
    "precision": lambda: PrecisionAt(k=4),
    "kendall": KendallTau,
    "selection_mass": lambda: SelectionMass(k=3),
}


def data(lists=37, n=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-3, 4, (lists, n), generator=generator).float()
    labels = torch.randint(0, 4, (lists, n), generator=generator).float()
    labels[::5] = 0.0
    return scores, labels, torch.rand(lists, n, generator=generator) > 0.3


def feed(metric, scores, labels, mask):
    if isinstance(metric, JointRecall):
        metric.update([scores, -scores + labels], labels, mask)
    elif isinstance(metric, SelectionMass):
        metric.update(scores.sigmoid(), mask)
    else:
        metric.update(scores, labels, mask)


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("size", [1, 4, 36, 37])
def test_result_does_not_depend_on_the_batch_size(name, size):
    whole, parts = METRICS[name](), METRICS[name]()
    feed(whole, *data())
    for batch in zip(*(t.split(size) for t in data()), strict=True):
        feed(parts, *batch)
    assert parts.compute().item() == pytest.approx(whole.compute().item(), abs=1e-7)
    assert parts.count == whole.count
    assert parts.skipped == whole.skipped
    assert whole.compute().dtype == torch.float32


def test_result_is_the_mean_over_counted_lists():
    scores, labels, mask = data()
    values, counted = functional.recall_at(scores, labels, mask, k=3, m=4)
    metric = RecallAt(3, 4)
    metric.update(scores, labels, mask)
    assert metric.compute().item() == pytest.approx(values[counted].mean().item(), abs=1e-7)
    assert metric.skipped == (~counted).sum()
    assert metric.skipped > 0


@pytest.mark.parametrize("name", METRICS)
def test_metrics_can_be_reset_pickled_and_copied(name):
    metric = METRICS[name]()
    feed(metric, *data())
    expected = metric.compute()
    for other in (pickle.loads(pickle.dumps(metric)), copy.deepcopy(metric)):
        assert other.compute() == expected
    metric.reset()
    assert metric.count == 0
    assert metric.skipped == 0
    feed(metric, *data())
    assert metric.compute() == expected


def test_float64_sums_do_not_drift():
    """A float32 sum of ones stops growing at 2^24; the state starts above that."""
    metric = RecallAt(1, 1)
    metric.update(torch.ones(1, 1), torch.ones(1, 1))
    metric.total.fill_(2.0**25)
    metric.count.fill_(2**25)
    metric.update(torch.ones(1, 1), torch.ones(1, 1))
    assert metric.total == 2.0**25 + 1


def test_result_without_counted_lists_is_nan():
    metric = RecallAt(1, 1)
    metric.update(torch.ones(2, 3), torch.zeros(2, 3))
    assert metric.compute().isnan()
    assert metric.skipped == 2


@pytest.mark.parametrize("file", ["metric_recall_atk_rax", "metric_precision_atk_rax"])
def test_recall_matches_rax(file):
    """Rax divides by the number of positives, which a large k does here. Precision is equal in these cases."""
    for case in cases(file):
        values, _ = functional.recall_at(case.scores, case.labels, case.mask, k=10**6, m=case.k)
        assert values.tolist() == pytest.approx(case.raw["per_list"], abs=case.tolerance)


def test_recall_of_all_items_matches_rax():
    for case in cases("metric_recall_rax"):
        values, _ = functional.recall_at(case.scores, case.labels, case.mask, k=10**6, m=10**6)
        assert values.tolist() == pytest.approx(case.raw["per_list"], abs=case.tolerance)


BY_RAX = {
    "metric_ap": functional.average_precision_at,
    "metric_mrr": functional.reciprocal_rank_at,
    "metric_dcg": functional.dcg_at,
    "metric_precision": functional.precision_at,
}


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("name", BY_RAX)
def test_rank_metrics_match_rax(name, cut):
    """All lists of these cases have a positive. Without a cut, precision is that of the whole list."""
    for case in cases(f"{name}_atk_rax" if cut else f"{name}_rax"):
        k = case.k if cut else case.scores.shape[1] if name == "metric_precision" else None
        values, counted = BY_RAX[name](case.scores, case.labels, case.mask, k=k)
        assert counted.all()
        torch.testing.assert_close(values, torch.tensor(case.raw["per_list"], dtype=torch.float64), atol=1e-9, rtol=0)


@pytest.mark.parametrize("file", ["metric_ndcg_rax", "metric_ndcg_atk_rax", "metric_ndcg_atk_tfr"])
def test_ndcg_matches_rax_and_tfr(file):
    for case in cases(file):
        cut = case.k if "atk" in file else None
        values, _ = functional.ndcg_at(case.scores, case.labels, case.mask, k=cut)
        assert values.mean().item() == pytest.approx(case.raw["output"], abs=case.tolerance)
        if "per_list" in case.raw:
            assert values.tolist() == pytest.approx(case.raw["per_list"], abs=case.tolerance)


WORKER = """
import sys
import torch
import torch.distributed as dist
from tests.metrics.test_classes import METRICS, data, feed

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
scores, labels, mask = data()
# Uneven on purpose: 5 lists in one process, 32 in the other.
mine = slice(0, 5) if rank == 0 else slice(5, None)
for name, make in METRICS.items():
    metric = make()
    feed(metric, scores[mine], labels[mine], mask[mine])
    print(name, repr(float(metric.compute())))
dist.destroy_process_group()
"""


def test_two_processes_give_the_result_of_one(tmp_path, warm_python):
    root = Path(__file__).parents[2]
    paths = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    workers = [
        subprocess.Popen(
            [*warm_python, "-c", WORKER, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=root,
        )
        for rank in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=120) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    for out, _ in outputs:
        for line in out.splitlines():
            name, value = line.split()
            single = METRICS[name]()
            feed(single, *data())
            assert float(value) == pytest.approx(float(single.compute()), abs=1e-7)
