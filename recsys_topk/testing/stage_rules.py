"""The rules for all stages. They use only the interfaces of `Stage`, `Towers` and `HistoryEncoder`."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recsys_topk.cascades.features import FeatureEmbedding
from recsys_topk.cascades.stage import Stage
from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.tabular.schema import Schema
from recsys_topk.testing.batches import padding_ids, random_batch, shared_histories
from recsys_topk.testing.comparison import LOOSE, require, require_finite, require_same, rules_for
from recsys_topk.testing.host_reads import DEVICE, no_host_reads

LISTS = ("candidates", "labels", "mask", "group")
POOL = ("item_id", "items")


class StageSubject:
    """A stage under test; `make` is its class, or returns it for an embedding."""

    def __init__(self, make: Callable[[FeatureEmbedding], Stage], schema: Schema) -> None:
        self.schema = schema
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self._template = make(FeatureEmbedding(schema, 4))
        self.name = type(self._template).__name__
        self.batch = random_batch(schema)

    def build(self) -> Stage:
        """Return a copy of the stage, in training mode."""
        return copy.deepcopy(self._template).train()

    def scores(self, batch: CascadeBatch, *, training: bool = False) -> Tensor:
        """Return the scores of a batch without gradients, with the same random draws each time."""
        stage = self.build().train(training)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            scores: Tensor = stage(batch)
        return scores


def scores_are_finite_and_have_the_shape_of_the_lists(subject: StageSubject) -> None:
    """Scores are (B, N), and finite for real candidates, also with an empty history."""
    scores = subject.scores(subject.batch)
    shape = tuple(subject.batch.candidates.shape)
    require(tuple(scores.shape) == shape, f"scores have shape {tuple(scores.shape)}, not {shape}", subject.schema)
    require_finite(scores[subject.batch.mask], "a score", subject.schema)


def masked_candidates_have_no_effect(subject: StageSubject) -> None:
    """The item that a masked candidate points to changes no other score, in training and in evaluation."""
    batch = subject.batch
    moved = batch.replace(candidates=torch.where(batch.mask, batch.candidates, 3))
    for training in (False, True):
        expected, found = (subject.scores(one, training=training)[batch.mask] for one in (batch, moved))
        require_same(found, expected, f"masked candidates changed scores (training={training})", batch, LOOSE)


def order_of_candidates_does_not_matter(subject: StageSubject) -> None:
    """Permuting the candidates of the lists permutes the scores."""
    batch, order = subject.batch, torch.arange(subject.batch.candidates.shape[1]).flip(0)
    moved = batch.replace(**{name: getattr(batch, name)[:, order] for name in LISTS})
    expected = subject.scores(batch)[:, order][moved.mask]
    require_same(subject.scores(moved)[moved.mask], expected, "permuting the candidates changed scores", batch, LOOSE)


def order_of_the_pool_does_not_matter(subject: StageSubject) -> None:
    """The position of an item in the pool does not matter."""
    batch, last = subject.batch, len(subject.batch.item_id) - 1
    pool = (*POOL, "item_values") if batch.item_values.numel() else POOL
    moved = batch.replace(candidates=last - batch.candidates, **{name: getattr(batch, name).flip(0) for name in pool})
    expected, found = (subject.scores(one)[batch.mask] for one in (batch, moved))
    require_same(found, expected, "permuting the pool changed scores", batch, LOOSE)


def lists_do_not_influence_each_other(subject: StageSubject) -> None:
    """In evaluation, a list has the same scores alone."""
    batch = subject.batch
    expected = subject.scores(batch)
    names = [*LISTS, "request_id", "request", "history", "history_length"]
    names += [name for name in ("request_values", "history_values") if getattr(batch, name).numel()]
    for row in range(batch.size):
        alone = batch.replace(**{name: getattr(batch, name)[row : row + 1] for name in names})
        found, wanted = subject.scores(alone)[alone.mask], expected[row : row + 1][alone.mask]
        require_same(found, wanted, f"list {row} has other scores alone", batch, LOOSE)


def padding_of_histories_has_no_effect(subject: StageSubject) -> None:
    """Histories may be padded to any length."""
    batch = subject.batch
    padding = padding_ids(subject.schema, "history").expand(batch.size, 3, -1)
    longer = batch.replace(history=torch.cat([batch.history, padding], 1))
    if batch.history_values.numel():
        values = batch.history_values.new_zeros(batch.size, 3, batch.history_values.shape[-1])
        longer = longer.replace(history_values=torch.cat([batch.history_values, values], 1))
    for training in (False, True):
        if training and _draws(subject):
            continue
        expected, found = (subject.scores(one, training=training)[batch.mask] for one in (batch, longer))
        require_same(found, expected, f"padding of histories changed scores (training={training})", batch, LOOSE)


def every_parameter_gets_a_finite_gradient(subject: StageSubject) -> None:
    """Parameters that are trained get a finite gradient. DDP waits for one that gets none."""
    stage = subject.build()
    scores: Tensor = stage(subject.batch)
    scores[subject.batch.mask].square().sum().backward()  # type: ignore[no-untyped-call]
    for name, parameter in stage.named_parameters():
        if parameter.requires_grad:
            require(parameter.grad is not None, f"parameter {name} gets no gradient", subject.schema)
            assert parameter.grad is not None
            require_finite(parameter.grad, f"the gradient of {name}", subject.schema)


def towers_give_the_scores(subject: StageSubject) -> None:
    """The dot products of the vectors of a stage with towers are its scores."""
    towers = subject.build().eval().towers
    if towers is None:
        return
    with torch.no_grad():
        users, items = towers.encode(subject.batch)
    width = (len(users), len(items), towers.width)
    require(tuple(users.shape) == width[::2], f"request vectors have shape {tuple(users.shape)}", subject.schema)
    require(tuple(items.shape) == width[1:], f"item vectors have shape {tuple(items.shape)}", subject.schema)
    batch = subject.batch
    found = torch.einsum("bd,bnd->bn", users, items[batch.candidates])[batch.mask]
    require_same(found, subject.scores(batch)[batch.mask], "dot products differ from the scores", batch, LOOSE)


def a_prefix_is_encoded_like_a_shorter_history(subject: StageSubject) -> None:
    """Row r of `HistoryEncoder.prefixes` is the encoding of the first r views, whatever follows."""
    encoder = subject.build().eval().encoder
    if encoder is None:
        return
    draw = torch.Generator().manual_seed(0)
    lengths = torch.tensor([6, 2, 0])
    real = (torch.arange(6) < lengths[:, None]).float()
    views = torch.randn(3, 6, encoder.dim, generator=draw) * real[..., None]
    ages = torch.rand(3, 6, generator=draw).mul(20.0).exp().sort(1, descending=True).values if encoder.ages else None
    with torch.no_grad():
        found = encoder.prefixes(views, lengths, ages)
        for row in range(7):
            shorter = lengths.clamp_max(row)
            expected = encoder(views[:, :row], shorter, None if ages is None else ages[:, :row])
            same = found.gather(1, shorter[:, None, None].expand(-1, 1, encoder.width)).squeeze(1)
            require_same(same, expected, f"prefixes of length {row} differ from a history of that length", views, LOOSE)


def requests_may_share_histories(subject: StageSubject) -> None:
    """A request that sees a prefix of a shared history has the same scores as with a history of its own."""
    if not subject.schema.history:
        return
    batch = shared_histories(subject.batch)
    own = batch.with_own_histories(subject.schema.padding("history"))
    expected, found = (subject.scores(one)[batch.mask] for one in (own, batch))
    require_same(found, expected, "scores of requests with shared histories differ", batch, LOOSE)


def no_values_are_read_on_the_host(subject: StageSubject) -> None:
    """On devices other than the CPU, training and evaluation do not wait for the device."""
    stage, batch = subject.build().to(DEVICE), subject.batch.to(DEVICE)
    with no_host_reads():
        stage(batch).sum().backward()
        with torch.no_grad():
            stage.eval()(batch)


def pickle_and_state_dict_restore_the_stage(subject: StageSubject) -> None:
    """A stage gives the same scores after pickling, and after `load_state_dict` into another one."""
    stage, expected = subject.build().eval(), subject.scores(subject.batch)
    other = subject.build()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    other.load_state_dict(stage.state_dict())
    for how, restored in (("pickle", pickle.loads(pickle.dumps(stage))), ("load_state_dict", other.eval())):
        with torch.no_grad():
            found: Any = restored(subject.batch)
        require_same(found, expected, f"{how} changed the scores", subject.schema, LOOSE)


def _draws(subject: StageSubject) -> bool:
    """Return whether the stage draws random numbers in training, e.g. for dropout."""
    stage = subject.build()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        stage(subject.batch)
        return not torch.equal(before, torch.get_rng_state())


_, RULES = rules_for(StageSubject, __name__)
