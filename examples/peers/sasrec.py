"""RecTools' SASRec on an exported split: trials on validation, then the test split once with several seeds.

It needs an environment of its own, `pip install 'rectools[torch]' 'numpy<2'` (RecTools 0.19):

    python examples/peers/sasrec.py ml-100k.npz --work path/to/partial --out docs/results/own-data

Each training run is one JSON in `--work`; a script that was killed continues after the last complete run. Early
stopping on the validation Recall@20 keeps the best epoch; the validation items are in the histories of the test
requests, not in the training data.
"""

import argparse
import hashlib
import json
import time
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytorch_lightning as pl
import torch
from protocol import METRIC, Cost, Split, best_trial, draw_trials, metrics, ranks, write_json, write_result
from rectools import Columns
from rectools.dataset import Dataset
from rectools.models import SASRecModel
from rectools.models.nn.transformers.lightning import TransformerLightningModule
from rectools.models.nn.transformers.ligr import LiGRLayers
from rectools.models.nn.transformers.sasrec import SASRecTransformerLayers

LENGTH = 50
BATCH = 32  # a quarter of RecTools' default: more steps per epoch, and cheaper ones
LAYERS = {"sasrec": SASRecTransformerLayers, "ligr": LiGRLayers}
SPACE = {
    "n_factors": [64, 128],
    "n_blocks": [2, 1],
    "dropout_rate": [0.2, 0.1, 0.3],
    "lr": [1e-3, 5e-4, 2e-3],
    "layers": ["sasrec", "ligr"],
}


def dataset_of(split):
    """Return the training sequences as a RecTools data set; the times are only an order."""
    user = np.repeat(np.arange(len(split.train)), [len(one) for one in split.train])
    item = np.concatenate(split.train)
    at = pd.Timestamp("2000-01-01") + pd.to_timedelta(np.arange(len(item)), unit="s")
    return Dataset.construct(
        pd.DataFrame({Columns.User: user, Columns.Item: item, Columns.Weight: 1.0, Columns.Datetime: at})
    )


def vectors(module, split, part):
    """Return the vectors of the requests, of the known items, and the catalogue rows of these items."""
    preparator, model = module.data_preparator, module.torch_model
    known = preparator.get_known_item_ids().astype(np.int64)
    number = np.zeros(split.items, np.int64)  # 0 = padding: an item that RecTools does not know
    number[known] = preparator.get_known_items_sorted_internal_ids()
    sessions = np.zeros((len(split.target[part]), LENGTH), np.int64)
    for row, history in enumerate(split.history[part]):
        own = number[history]
        own = own[own > 0][-LENGTH:]
        sessions[row, LENGTH - len(own) :] = own
    training = model.training
    model.eval()
    with torch.no_grad():
        items = model.item_model.get_all_embeddings()
        users = torch.cat(
            [
                model.encode_sessions({"x": torch.from_numpy(some)}, items)[:, -1]
                for some in np.split(sessions, range(256, len(sessions), 256))
            ]
        )
    model.train(training)
    return users.numpy(), items[number[known]].numpy(), known


def ranks_by(split, part, users, items, known):
    """Return the ranks of the targets by inner products."""

    def scores(some):
        values = np.full((len(users[some]), split.items), -np.inf, np.float32)
        values[:, known] = users[some] @ items.T
        return values

    return ranks(split, part, scores)


class TargetsOnly(TransformerLightningModule):
    """RecTools' softmax loss without the logits of padded positions: the same gradient in half the time."""

    def training_step(self, batch, batch_idx):
        """Return the mean cross-entropy over the positions that have a target."""
        real = batch["y"] > 0
        items = self.torch_model.item_model.get_all_embeddings()
        sessions = self.torch_model.encode_sessions(batch, items)[real]
        return torch.nn.functional.cross_entropy(sessions @ items.T / self.logits_t, batch["y"][real])


class BestEpoch(pl.Callback):
    """Measures validation Recall@20 after each epoch, keeps the best weights, and stops after `patience` worse ones.

    After a fifth of `epochs`, a trial also stops if its best value is below the median of the best values that
    `others`, the complete trials (at least two), had after the same epoch.
    """

    def __init__(self, split, epochs, patience, others=()):
        self.split, self.epochs, self.patience, self.others = split, epochs, patience, others
        self.trace, self.best = [], None

    def __deepcopy__(self, memo):  # RecTools copies its trainer; the caller keeps this object
        return self

    def on_train_epoch_end(self, trainer, module):
        """Measure."""
        found = metrics(ranks_by(self.split, "val", *vectors(module, self.split, "val")))
        self.trace.append(found)
        values = [one[METRIC] for one in self.trace]
        if values[-1] > max(values[:-1], default=-1.0):
            self.best = {name: value.clone() for name, value in module.state_dict().items()}
        reached = [max(one[METRIC] for one in other[: len(values)]) for other in self.others]
        pruned = len(reached) >= 2 and len(values) >= self.epochs // 5 and max(values) < np.median(reached)
        trainer.should_stop = pruned or len(values) - 1 - int(np.argmax(values)) >= self.patience
        print(f"  epoch {len(values)}: {found}, {time.process_time():.0f} CPU s", flush=True)


def train(split, settings, seed, epochs, patience, folder, others=()):
    """Return the facts of a training run, from its file if it is complete; the vectors of its best epoch are kept."""
    described = {"split": split.digest, "settings": settings, "seed": seed, "epochs": epochs, "patience": patience}
    name = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:12]
    path = Path(folder) / f"{name}.json"
    if not path.exists():
        print(f"{settings}, seed {seed}", flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        with Cost() as cost:
            pl.seed_everything(seed)
            options = {key: value for key, value in settings.items() if key != "layers"}
            model = SASRecModel(
                **options, session_max_len=LENGTH, batch_size=BATCH, transformer_layers_type=LAYERS[settings["layers"]],
                lightning_module_type=TargetsOnly,
            )  # fmt: skip
            stop = BestEpoch(split, epochs, patience, others)
            model._trainer = pl.Trainer(
                max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[stop],
                enable_progress_bar=False, enable_model_summary=False,
            )  # fmt: skip
            model.fit(dataset_of(split))
            model.lightning_model.load_state_dict(stop.best)
            users, items, known = vectors(model.lightning_model, split, "test")
        np.savez(path.with_suffix(".npz"), users=users, items=items, known=known)
        best = int(np.argmax([one[METRIC] for one in stop.trace]))
        facts = {"validation": stop.trace[best], "epoch": best + 1, "epochs": len(stop.trace), "trace": stop.trace}
        write_json(path, {**described, **facts, **cost.found})
    return json.loads(path.read_text()) | {"vectors": str(path.with_suffix(".npz"))}


def main():
    """Tune, then test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("split")
    parser.add_argument("--work", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--patience", type=int, default=3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="rectools|pydantic|pytorch_lightning")
    split = Split(given.split)
    options = {"epochs": given.epochs, "patience": given.patience, "folder": given.work}
    kept = ("settings", "validation", "epoch", "epochs", "cpu_seconds", "peak_memory_mb")
    trials, traces = [], []
    for settings in draw_trials(SPACE, given.trials):
        run = train(split, settings, given.seeds[0], **options, others=traces)
        trials.append({key: run[key] for key in kept})
        traces.append(run["trace"])
    best, runs = best_trial(trials)["settings"], []
    for seed in given.seeds:
        run = train(split, best, seed, **options)
        with np.load(run["vectors"]) as found:
            rank = ranks_by(split, "test", found["users"], found["items"], found["known"])
        runs.append({"seed": seed, "ranks": rank, **{key: run[key] for key in kept[1:]}})
    libraries = ("rectools", "torch", "numpy")
    result = write_result(given.out, "sasrec", Path(given.split).stem, split, trials, runs, libraries)
    print(result["settings"], result["validation"], result["test"])


if __name__ == "__main__":
    main()
