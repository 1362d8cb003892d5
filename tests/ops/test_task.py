"""Lists of a task are divided among threads, and the result does not depend on the threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from recsys_topk import losses
from recsys_topk.ops.backends import parallel
from recsys_topk.ops.dispatch import backend, installed
from recsys_topk.ops.losses.joint_terms import JointTask, joint_terms
from recsys_topk.ops.selection.membership import Law
from tests.ops.forked import assert_ends_in_a_forked_process, needs_fork

pytestmark = pytest.mark.skipif(not installed("numba"), reason="the compiled loops need numba")

GENERATOR = torch.Generator().manual_seed(0)
SCORES = torch.randn(37, 401, generator=GENERATOR)
LABELS = torch.randint(0, 3, (37, 401), generator=GENERATOR).float()


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def loss_and_gradient(scores: Tensor = SCORES) -> list[Tensor]:
    x = scores.detach().requires_grad_()
    with backend("numba"):
        value = losses.get("dftopk", k=20)(x, LABELS)
    value.backward()
    assert x.grad is not None
    return [value.detach(), x.grad]


def joint_terms_and_gradients() -> list[Tensor]:
    x = [SCORES.clone().requires_grad_(), SCORES.flip(1).clone().requires_grad_()]
    with backend("numba"):
        terms, survival = joint_terms(x, JointTask(LABELS, None, 20, (60, 30), 1.0, Law("dftopk", 0.5)))
    (terms.sum() + survival).backward()
    return [terms.detach(), survival.detach(), *(one.grad for one in x)]


@pytest.mark.parametrize("work", [loss_and_gradient, joint_terms_and_gradients])
@pytest.mark.parametrize("team", [True, False], ids=["threads of torch", "threads of Python"])
def test_result_does_not_depend_on_the_threads(work, team, threads, monkeypatch):
    torch.set_num_threads(1)
    expected = work()
    if not team:
        monkeypatch.setattr(parallel, "_team", lambda: None)
    for number in (2, 3):
        torch.set_num_threads(number)
        for one, other in zip(work(), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_view_with_other_strides_gives_the_same_result(threads):
    wide = torch.empty(401, 74).T[::2].copy_(SCORES)
    for one, other in zip(loss_and_gradient(wide), loss_and_gradient(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@needs_fork
def test_forked_process_does_not_wait_for_the_threads_of_its_parent(threads):
    torch.set_num_threads(2)
    loss_and_gradient()
    assert_ends_in_a_forked_process(_compute_loss)


def _compute_loss() -> None:
    with backend("numba"), torch.no_grad():
        losses.get("dftopk", k=20)(SCORES, LABELS)
