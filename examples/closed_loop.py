"""A population that answers: `python examples/closed_loop.py FOLDER [--days 10] [--seeds 3]`.

Every day, simulated users ask a cascade for items, see six of them, and click by the true utility. Tastes rotate and
new items arrive. Day by day, the true utility of what is shown, when the cascade is: trained once (`frozen`), trained
again every night on clicks and shown items (`clicks`), or on the log of the whole funnel (`funnel`). On the first day,
the most popular of 39 random items are shown, in all three cases. docs/online.md has the result.
"""

import argparse
import json
import logging
import shutil
import warnings
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pyarrow as pa
import pyarrow.compute

from recsys_topk import CascadeModule
from recsys_topk.datamodules import ListsDataModule, WorldConfig
from recsys_topk.datamodules.simulator.world import DAY_MS, World
from recsys_topk.serving.export import export_cascade
from recsys_topk.serving.recommend import CascadeRecommender
from recsys_topk.tabular.export_tables import ItemTable

ARMS = ("frozen", "clicks", "funnel")
SHOWN, RANKED, RETRIEVED = 6, 10, 40
STAGES = [
    {"kind": "two_tower", "name": "retrieval", "quota": RETRIEVED},
    {"kind": "mlp", "name": "ranking", "quota": RANKED},
]
LABELS = {"clicked": 3, "shown": 2, "ranked": 1, "retrieved": 0}  # clicked items are positive
FEATURES = {
    "user": {"user": "categorical"},
    "items": {"item": "categorical", "category": "categorical", "author": "categorical"},
    "history": ["item"],
}


class Log(ListsDataModule):
    """A log of lists whose export has all items of the day, also those that were never shown."""

    of_today = None

    def serving_items(self):
        ids, values = self.encoder.encode("items", self.of_today)
        names = np.asarray(self.of_today["item"])
        return ItemTable(names, ids.astype(np.int32), values, np.ones(len(names), dtype=np.int64))


class Population:
    """The users of a world, and what they have clicked."""

    def __init__(self, world, seed):
        self.world, self.rng = world, np.random.default_rng(seed)
        self.clicked = {user: [] for user in range(world.config.users)}
        self.start = int(world.upload_s.max()) // 86400 * 86400 - (world.config.days - 1) * 86400

    def items(self, day):
        """Return the items that are there at the begin of a day."""
        return np.flatnonzero(self.world.upload_s <= self.start + day * 86400)

    def visit(self, day, number, recommend):
        """Return the log of a day, and the true utilities of what was shown."""
        users = self.rng.integers(0, self.world.config.users, number)
        times = np.sort(self.start * 1000 + day * DAY_MS + self.rng.integers(0, DAY_MS, number))
        there, rows, shown_utility = self.items(day), [], []
        for begin in range(0, number, 50):
            part = slice(begin, begin + 50)
            lists = recommend([{"user": int(user), "history": self.clicked[user][-20:]} for user in users[part]])
            for user, time, items in zip(users[part], times[part], lists, strict=True):
                items = list(dict.fromkeys([*items[: SHOWN - 1], int(self.rng.choice(there)), *items[SHOWN - 1 :]]))
                utility = self.world.utility(np.array([user]), np.array([time]), np.array([items]))[0]
                click = self.rng.random(SHOWN) < 1 / (1 + np.exp(1.5 - utility[:SHOWN]))
                stage = np.where(np.arange(len(items)) < RANKED, "ranked", "retrieved").astype(object)
                stage[:SHOWN] = np.where(click, "clicked", "shown")
                request = f"{day}-{begin}-{len(rows)}"
                seen = self.clicked[user][-20:]
                rows += [
                    (request, int(time), int(user), seen, item, own) for item, own in zip(items, stage, strict=True)
                ]
                self.clicked[user] += [item for item, own in zip(items, click, strict=False) if own]
                shown_utility.append(utility[:SHOWN].mean())
        columns = dict(
            zip(("request", "time", "user", "history", "item", "stage"), zip(*rows, strict=True), strict=True)
        )
        item = np.array(columns["item"])
        columns |= {"category": self.world.category[item], "author": self.world.author[item]}
        return pa.table({name: list(column) for name, column in columns.items()}), float(np.mean(shown_utility))


def train(tables, world, items, folder, seed, epochs):
    """Train a cascade on the log of some days; return the recommender with the given items."""
    pl.seed_everything(seed, verbose=False)
    data = Log(
        pa.concat_tables(tables), request="request", item="item", stage="stage", user="user", time="time",
        history="history", labels=LABELS, features=FEATURES, split="fraction", val_fraction=0.1, test_fraction=0.1,
        train_negatives=40, negative_source="uniform", batch_size=64, history_length=20, seed=seed,
        cache_dir=str(folder / "prepared"),
    )  # fmt: skip
    data.of_today = {"item": items, "category": world.category[items], "author": world.author[items]}
    data.prepare_data()
    model = CascadeModule(data.schema, STAGES, loss="dftopk", k=SHOWN, lr=0.01, init_std=0.1)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(accelerator="cpu", max_epochs=epochs, limit_val_batches=0, num_sanity_val_steps=0, **quiet)
    trainer.fit(model, datamodule=data)
    export_cascade(model, data, folder / "export", programs=False)
    return CascadeRecommender.from_export(folder / "export")


def run(seed, options):
    """Return the true utility of what is shown, by arm and day."""
    size = {"users": 200, "items": 3000, "new_items": 150, "days": options.days, "drift": 0.15, "author_quality": 0.6}
    world = World.make(WorldConfig(**size, popularity=0.6, freshness=0.6, seed=seed))
    results = {}
    for arm in ARMS:
        people, logs, utilities, recommender = Population(world, seed), [], [], None

        def popular(users, people=people):
            found = [people.rng.permutation(people.items(0))[: RETRIEVED - 1] for _ in users]
            return [items[np.argsort(-world.appeal[items], kind="stable")].tolist() for items in found]

        def by_cascade(users):
            names = recommender.items.names  # noqa: B023
            found = recommender.passages(users, exclude_seen=True)  # noqa: B023
            return [names[one[-1].rows][: RETRIEVED - 1].tolist() for one in found]

        for day in range(options.days):
            if day and (recommender is None or arm != "frozen"):
                folder = Path(options.folder) / f"{arm}-{seed}-{day}"
                recommender = train(logs[-options.window :], world, people.items(day), folder, seed, options.epochs)
                shutil.rmtree(folder)
            table, utility = people.visit(day, options.requests, popular if day == 0 else by_cascade)
            if arm == "clicks":
                table = table.filter(pa.compute.is_in(table["stage"], pa.array(["clicked", "shown"])))
            logs.append(table)
            utilities.append(utility)
            print(f"seed {seed}, {arm}, day {day}: {utility:.3f}", flush=True)
        results[arm] = utilities
    return results


def draw(results, path):
    """Draw the mean of each arm over the seeds, and its range."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    for arm in ARMS:
        lines = np.array([one[arm] for one in results])
        axes.plot(lines.mean(0), label=arm, marker="o", markersize=3)
        axes.fill_between(range(lines.shape[1]), lines.min(0), lines.max(0), alpha=0.2)
    axes.set(xlabel="day", ylabel="true utility of the shown items")
    axes.legend()
    figure.savefig(path)
    pyplot.close(figure)


def main():
    """Run all seeds, and print the last day of each arm."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    for name, default in {"days": 10, "seeds": 3, "requests": 1000, "window": 4, "epochs": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    Path(options.folder).mkdir(parents=True, exist_ok=True)
    results = [run(seed, options) for seed in range(options.seeds)]
    (Path(options.folder) / "closed_loop.json").write_text(json.dumps(results, indent=1))
    draw(results, Path(options.folder) / "closed_loop.svg")
    for arm in ARMS:
        last = [np.mean(one[arm][-(options.days // 2) :]) for one in results]
        print(f"{arm:8} mean of the second half, by seed: {' '.join(f'{value:.3f}' for value in last)}")
    apart = [np.mean(np.subtract(one["funnel"], one["clicks"])[-(options.days // 2) :]) for one in results]
    print(f"funnel - clicks, by seed: {' '.join(f'{value:+.3f}' for value in apart)}")


if __name__ == "__main__":
    main()
