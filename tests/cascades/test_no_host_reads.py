"""Off the CPU nothing waits for the host: a fake device on which any read raises, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

FAKE_DEVICE = """
import os

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("pretend")
from recsys_topk.cascades.features import FeatureEmbedding
from tests.cascades.batches import mixed_schema, random_batch, recflow_like_schema


def register_columns(self, device):
    "The same without numbers: a fake device cannot be given any."
    for part, chosen in self.layout.selections.items():
        columns = None if chosen is None else torch.zeros(len(chosen), dtype=torch.int64, device=device)
        self.register_buffer(f"columns_{part}", columns, persistent=False)


FeatureEmbedding._register_columns = register_columns
for schema in (mixed_schema(), recflow_like_schema()):
    batch = random_batch(schema)
    with FakeTensorMode():
        try:
            torch.ones(3, device="pretend").sum().item()
        except DataDependentOutputException:
            print("reads are seen")
        there = batch._each(lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype, device="pretend"))
        embedding = FeatureEmbedding(schema, 4, device="pretend")
        for history in ("rows", "mean"):
            found = embedding(there, history=history)
            (found.request.sum() + found.items.sum() + found.history.sum()).backward()
            print(found.items.device.type, found.history.shape[-1], flush=True)
os._exit(0)  # the pretended device's autograd thread cannot be joined
"""


def test_embedding_a_batch_reads_nothing_on_the_host() -> None:
    done = subprocess.run([sys.executable, "-c", FAKE_DEVICE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = ["reads are seen", "pretend 9", "pretend 9", "reads are seen", "pretend 20", "pretend 20"]
    assert done.stdout.splitlines() == seen
