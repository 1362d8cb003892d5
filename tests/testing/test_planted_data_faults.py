"""The contract suite for data modules detects faults: each class below has exactly one."""

from dataclasses import replace

import pytest
import torch
from in_memory import InMemory

from recsys_topk.datamodules import Catalogue, Feature, TensorShard, cache_home
from recsys_topk.testing import check_data_module


class Faulty(InMemory):
    """A data module whose batches a subclass can change."""

    @staticmethod
    def change(batch):
        return batch

    def open_shard(self, name):
        return ChangedShard(super().open_shard(name), self)


class ChangedShard(TensorShard):
    def __init__(self, shard, module):
        self.__dict__.update(shard.__dict__)
        self.change = module.change

    def batch(self, rows):
        return self.change(super().batch(rows))


class PreparesForTheOutline(InMemory):
    @property
    def outline(self):
        self.prepare_data()
        return super().outline


class SimulatesForTheOutline(InMemory):
    @property
    def outline(self):
        (cache_home() / "worlds").mkdir(parents=True)
        return super().outline


class KnowsAnotherOutline(InMemory):
    @property
    def outline(self):
        return replace(super().outline, positive_above=5.0)


class HasIdsBeyondTheTable(Faulty):
    @staticmethod
    def change(batch):
        return batch.replace(request=batch.request + 1000)


class HasTooFewColumns(Faulty):
    @property
    def schema(self):
        schema = super().schema
        return replace(schema, items=(*schema.items, Feature("colour", "genre")))


class HasNaN(Faulty):
    @staticmethod
    def change(batch):
        values = batch.item_values.clone()
        values[0, 0] = torch.nan
        return batch.replace(item_values=values)


class PadsHistoriesWithViews(Faulty):
    @staticmethod
    def change(batch):
        return batch.replace(history_length=batch.history_length.clamp_max(1))


class LabelsPadding(Faulty):
    @staticmethod
    def change(batch):
        return batch.replace(labels=torch.where(batch.mask, batch.labels, 1.0))


class RepeatsPoolItems(Faulty):
    @staticmethod
    def change(batch):
        return batch.replace(item_id=batch.item_id.clone().fill_(int(batch.item_id[0])))


class GroupsAreUnknown(Faulty):
    @staticmethod
    def change(batch):
        return batch.replace(group=torch.where(batch.mask, 7, -1))


class CallsPlacesGrades(Faulty):
    @staticmethod
    def change(batch):
        return batch.replace(labels=batch.labels * 40)


class CallsGradesPlaces(Faulty):
    @property
    def schema(self):
        return replace(super().schema, labels="places")


class HasNoPositives(Faulty):
    @property
    def schema(self):
        return replace(super().schema, positive_above=5.0)


class ShufflesWithoutASeed(Faulty):
    def train_dataloader(self):
        self.seed = int(torch.randint(1 << 30, ()))
        return super().train_dataloader()


class EvaluatesOnTheWholeBatch(Faulty):
    """Negatives of other requests in the batch, as in the research code."""

    def add_negatives(self, batch):
        if batch.training:
            return super().add_negatives(batch)
        training = batch.replace(training=True, draw_seed=1)
        self.train_negatives, self.negative_source = self.eval_negatives, "in_batch"
        return super().add_negatives(training)


class DropsTheLastBatch(Faulty):
    def loader(self, shards, *, training):
        loader = super().loader(shards, training=training)
        loader.slices = loader.slices[:-1] if len(loader.slices) > 1 else loader.slices
        return loader


class GivesEveryProcessEverything(Faulty):
    def _set_share(self, value):
        pass

    _share = property(lambda self: lambda: (0, 1), _set_share)


class ForgetsWhereItWas(Faulty):
    def load_state_dict(self, state):
        super().load_state_dict({**state, "offset": 0})


class SavesATensor(Faulty):
    def __init__(self, **options):
        super().__init__(**options)
        self.save_hyperparameters({"weights": torch.zeros(2)})


class MisrecordsItsSeed(Faulty):
    def __init__(self, **options):
        super().__init__(**options)
        self.hparams["seed"] = 7


class SamplesItsOwnItems(Faulty):
    def add_negatives(self, batch):
        added = super().add_negatives(batch)
        number = added.candidates.shape[1] - batch.candidates.shape[1]
        candidates, mask, group = added.candidates.clone(), added.mask.clone(), added.group.clone()
        if number:
            first = batch.mask.int().argmax(1)
            candidates[:, -1] = batch.candidates.gather(1, first[:, None])[:, 0]
            mask[:, -1], group[:, -1] = True, len(self.schema.groups)
        return added.replace(candidates=candidates, mask=mask, group=group)


class HasAnotherCatalogue(Faulty):
    def catalogue(self, shard, device="cpu"):
        found = super().catalogue(shard, device)
        return Catalogue(found.item_id, found.features, found.count, found.values * 2)


class MiscountsItsLists(Faulty):
    def list_length(self, split):
        return super().list_length(split) - 1


class CannotBePickled(Faulty):
    def open_shard(self, name):
        shard = super().open_shard(name)
        shard.change = lambda batch: batch
        return shard


FAULTS = {
    PreparesForTheOutline: "the outline is known before preparation",
    SimulatesForTheOutline: "the outline is known before preparation",
    KnowsAnotherOutline: "the outline is known before preparation",
    HasIdsBeyondTheTable: "batches match the schema",
    HasTooFewColumns: "batches match the schema",
    HasNaN: "batches match the schema",
    PadsHistoriesWithViews: "batches match the schema",
    LabelsPadding: "lists are consistent",
    RepeatsPoolItems: "lists are consistent",
    GroupsAreUnknown: "lists are consistent",
    CallsPlacesGrades: "labels are of the declared kind",
    CallsGradesPlaces: "labels are of the declared kind",
    HasNoPositives: "labels are of the declared kind",
    ShufflesWithoutASeed: "the same seed gives the same batches",
    EvaluatesOnTheWholeBatch: "evaluation does not depend on batching",
    DropsTheLastBatch: "every request occurs once",
    GivesEveryProcessEverything: "every request occurs once",
    ForgetsWhereItWas: "training resumes at the exact batch",
    SavesATensor: "hyper parameters are plain and restore the data module",
    MisrecordsItsSeed: "hyper parameters are plain and restore the data module",
    SamplesItsOwnItems: "sampled negatives are new items",
    HasAnotherCatalogue: "the catalogue holds the items of the lists",
    MiscountsItsLists: "list length is the longest list",
    CannotBePickled: "shards can be sent to workers",
}


def test_data_module_without_a_fault_passes():
    check_data_module(Faulty)


@pytest.mark.parametrize(("faulty", "rule"), FAULTS.items(), ids=[cls.__name__ for cls in FAULTS])
def test_fault_in_a_data_module_is_reported(faulty, rule):
    with pytest.raises(AssertionError) as caught:
        check_data_module(faulty, rules=[rule])
    assert f"rule '{rule}'" in str(caught.value)
    assert faulty.__name__ in str(caught.value)
    assert "raised" not in str(caught.value) or faulty in (CannotBePickled, ForgetsWhereItWas)
