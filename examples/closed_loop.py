"""A population that answers: `python examples/closed_loop.py FOLDER [--days 10] [--seeds 3] [--jobs 2]`.

Every day, simulated users ask a cascade for items, see six of them, and click by the true utility. Tastes rotate and
new items arrive. Day by day, the true utility of what is shown, when the cascade is: trained once (`frozen`), trained
again every night on clicks and shown items (`clicks`), or on the log of the whole funnel (`funnel`). `popular` shows
the items with the most clicks of the last days. On the first day, the most popular of 39 random items are shown, in all
cases. Every (seed, case, day) has a file in FOLDER, so the same command resumes. docs/online.md has the result.

With `--answered`, a fifth case is trained on what no service can log: the whole funnel, and whether the user would have
clicked on the items that were not shown.
"""

import argparse
import json
import logging
import shutil
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet
import torch

from recsys_topk import CascadeModule
from recsys_topk.datamodules import ListsDataModule, WorldConfig
from recsys_topk.datamodules.simulator.world import DAY_MS, World
from recsys_topk.files import write_whole
from recsys_topk.serving.export import export_cascade, models_of
from recsys_topk.serving.recommend import CascadeRecommender
from recsys_topk.serving.requests import EncodedRequests
from recsys_topk.tabular.export_tables import ItemTable

ARMS = ("popular", "frozen", "clicks", "funnel")
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
WORLD = {
    "users": 200,
    "items": 3000,
    "new_items": 150,
    "drift": 0.15,
    "author_quality": 0.6,
    "popularity": 0.6,
    "freshness": 0.6,
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
        self.world, self.seed = world, seed
        self.clicked = {user: [] for user in range(world.config.users)}
        self.start = int(world.upload_s.max()) // 86400 * 86400 - (world.config.days - 1) * 86400

    def items(self, day):
        """Return the items that are there at the begin of a day."""
        return np.flatnonzero(self.world.upload_s <= self.start + day * 86400)

    def visit(self, day, number, recommend):
        """Return the log of a day, and the mean true utility of what was shown."""
        rng = np.random.default_rng([self.seed, day])  # the same users at the same times in all cases
        users = rng.integers(0, self.world.config.users, number)
        times = np.sort(self.start * 1000 + day * DAY_MS + rng.integers(0, DAY_MS, number))
        there, rows, shown_utility = self.items(day), [], []
        for begin in range(0, number, 50):
            part = slice(begin, begin + 50)
            lists = recommend([{"user": int(user), "history": self.clicked[user][-20:]} for user in users[part]])
            for user, time, items in zip(users[part], times[part], lists, strict=True):
                items = list(dict.fromkeys([*items[: SHOWN - 1], int(rng.choice(there)), *items[SHOWN - 1 :]]))
                utility = self.world.utility(np.array([user]), np.array([time]), np.array([items]))[0]
                click = rng.random(SHOWN) < 1 / (1 + np.exp(1.5 - utility[:SHOWN]))
                stage = np.where(np.arange(len(items)) < RANKED, "ranked", "retrieved").astype(object)
                stage[:SHOWN] = np.where(click, "clicked", "shown")
                request = f"{day}-{begin}-{len(rows)}"
                seen = self.clicked[user][-20:]
                rows += [
                    (request, int(time), int(user), seen, item, reached)
                    for item, reached in zip(items, stage, strict=True)
                ]
                self.clicked[user] += [item for item, yes in zip(items, click, strict=False) if yes]
                shown_utility.append(utility[:SHOWN].mean())
        columns = dict(
            zip(("request", "time", "user", "history", "item", "stage"), zip(*rows, strict=True), strict=True)
        )
        item = np.array(columns["item"])
        columns |= {"category": self.world.category[item], "author": self.world.author[item]}
        return pa.table({name: list(column) for name, column in columns.items()}), float(np.mean(shown_utility))

    def remember(self, table):
        """Take over the clicks of a day from its log."""
        clicks = table.filter(pa.compute.equal(table["stage"], "clicked"))
        for user, item in zip(clicks["user"].to_pylist(), clicks["item"].to_pylist(), strict=True):
            self.clicked[user].append(item)


def chances(log, world, items=None):
    """Return the true probability of a click on each item of a log, or on other items at its place."""
    item = log["item"].to_numpy() if items is None else items
    utility = world.utility(log["user"].to_numpy(), log["time"].to_numpy(), item[:, None])[:, 0]
    return 1 / (1 + np.exp(1.5 - utility))


def was_shown(log):
    """Return whether each item of a log was shown."""
    return np.isin(log["stage"].to_numpy(zero_copy_only=False), ["clicked", "shown"])


def answered(log, world, seed):
    """Return a log with the answers that the users would have given to the items that were not shown."""
    click = np.random.default_rng(seed).random(len(log)) < chances(log, world)
    stage = np.where(was_shown(log), log["stage"].to_numpy(zero_copy_only=False), np.where(click, "clicked", "shown"))
    return log.set_column(log.schema.get_field_index("stage"), "stage", pa.array(stage))


def answers_by_stage(seed, options):
    """Return the true probability of a click in the funnel's log of each later day: shown, not shown, random items."""
    world = World.make(WorldConfig(**WORLD, days=options.days, seed=seed))
    people, rng, found = Population(world, seed), np.random.default_rng(0), []
    for day in range(1, options.days):
        log = pa.parquet.read_table(result_path(options, seed, "funnel", day).with_suffix(".parquet"))
        chance, shown = chances(log, world), was_shown(log)
        random = chances(log, world, rng.choice(people.items(day), len(log)))
        found.append([float(part.mean()) for part in (chance[shown], chance[~shown], random)])
    return found


def first_day(people):
    """Return a recommender of the most appealing of 39 random items."""
    rng, appeal = np.random.default_rng([people.seed, 10_000]), people.world.appeal

    def recommend(users):
        drawn = [rng.permutation(people.items(0))[: RETRIEVED - 1] for _ in users]
        return [items[np.argsort(-appeal[items], kind="stable")].tolist() for items in drawn]

    return recommend


def most_clicked(tables):
    """Return a recommender of the items with the most clicks in some logs, except those in the user's history."""
    table = pa.concat_tables(tables)
    counts = table.filter(pa.compute.equal(table["stage"], "clicked"))["item"].value_counts().to_pylist()
    best = [one["values"] for one in sorted(counts, key=lambda one: -one["counts"])]
    return lambda users: [[item for item in best if item not in one["history"]][: RETRIEVED - 1] for one in users]


def train(tables, world, folder, seed, options):
    """Train a cascade on the logs of some days; return a function from items to a recommender of these items."""
    pl.seed_everything(seed, verbose=False)
    held_out = max(0.02, 10 / options.requests)  # every split needs a list
    data = Log(
        pa.concat_tables(tables), request="request", item="item", stage="stage", user="user", time="time",
        history="history", labels=LABELS, features=FEATURES, split="fraction", val_fraction=held_out,
        test_fraction=held_out, train_negatives=options.negatives, negative_source="uniform",
        batch_size=options.batch_size, history_length=20, seed=seed, cache_dir=str(folder / "prepared"),
    )  # fmt: skip
    data.prepare_data()
    model = CascadeModule(data.schema, STAGES, loss=options.loss, k=SHOWN, lr=options.lr, init_std=0.1, dim=options.dim)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_val_batches": 0,
    }
    trainer = pl.Trainer(accelerator="cpu", max_epochs=options.epochs, num_sanity_val_steps=0, **quiet)
    trainer.fit(model, datamodule=data)

    def serve(items):
        data.of_today = {"item": items, "category": world.category[items], "author": world.author[items]}
        return by_export(model, data, folder / "export") if options.export else by_weights(model.eval(), data)

    return serve


def by_export(model, data, folder):
    """Return the recommender of an export."""
    export_cascade(model, data, folder, programs=False)
    recommender = CascadeRecommender.from_export(folder)
    shutil.rmtree(folder)

    def recommend(users):
        passages = recommender.passages(users, exclude_seen=True)
        return [recommender.items.names[one[-1].rows][: RETRIEVED - 1].tolist() for one in passages]

    return recommend


def by_weights(model, data):
    """Return the recommender that an export would be, without the seconds that writing its ONNX files takes."""
    retrieval, ranking = (models_of(stage, data.schema) for stage in model.cascade.stages.values())
    catalogue = data.serving_items()

    def run(part, given):
        tensors = [torch.as_tensor(given[one.name], dtype=getattr(torch, one.dtype)) for one in part.inputs]
        with torch.no_grad():
            return part(*tensors).numpy()

    vectors = run(retrieval["items"], {"items": catalogue.ids, "item_values": catalogue.values})

    def recommend(users):
        requests = EncodedRequests.of_rows(users, data.encoder, catalogue, data.schema, 20)
        scores = run(retrieval["requests"], requests.inputs()) @ vectors.T
        for row, seen in zip(scores, requests.seen, strict=True):
            row[seen] = -np.inf
        rows = np.argsort(-scores, axis=1, kind="stable")[:, :RETRIEVED]
        lists = {"items": catalogue.ids[rows], "item_values": catalogue.values[rows]}
        order = np.argsort(-run(ranking["scores"], requests.inputs() | lists), axis=1, kind="stable")
        return catalogue.names[np.take_along_axis(rows, order, 1)][:, : RETRIEVED - 1].tolist()

    return recommend


def run(seed, arm, options):
    """Run the days of a case of which there is no result yet. The log of a day is there if its result is."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    world = World.make(WorldConfig(**WORLD, days=options.days, seed=seed))
    people, logs, serve = Population(world, seed), [], None
    for day in range(options.days):
        path = result_path(options, seed, arm, day)
        if path.exists():
            logs.append(pa.parquet.read_table(path.with_suffix(".parquet")))
            people.remember(logs[-1])
            continue
        window = logs[:1] if arm == "frozen" else logs[-options.window :]
        if arm == "clicks":
            window = [log.filter(pa.array(was_shown(log))) for log in window]
        elif arm == "answered":
            window = [answered(log, world, [seed, number]) for number, log in enumerate(logs)][-options.window :]
        if day and arm != "popular" and (arm != "frozen" or serve is None):
            shutil.rmtree(folder := path.with_suffix(""), ignore_errors=True)
            serve = train(window, world, folder, seed, options)
        if day == 0:
            recommend = first_day(people)
        else:
            recommend = most_clicked(window) if arm == "popular" else serve(people.items(day))
        table, utility = people.visit(day, options.requests, recommend)
        logs.append(table)
        pa.parquet.write_table(table, path.with_suffix(".parquet"))
        write_whole(path, json.dumps(utility))
        print(f"seed {seed}, {arm}, day {day}: {utility:.3f}", flush=True)


def result_path(options, seed, arm, day):
    """Return the file with the utility of a day."""
    return Path(options.folder) / "days" / f"{seed}-{arm}-{day}.json"


def summary(results):
    """Return funnel - other case in the second half of the days: the mean, by seed, and its 95 % interval.

    The interval is that of a bootstrap over seeds, and over days within a seed.
    """
    rng, found = np.random.default_rng(0), {}
    for arm in [arm for arm in results[0] if arm != "funnel"]:
        apart = np.array([np.subtract(one["funnel"], one[arm]) for one in results])
        apart = apart[:, apart.shape[1] // 2 :]
        seeds, days = apart.shape
        draws = [
            np.mean([apart[seed, rng.integers(0, days, days)] for seed in rng.integers(0, seeds, seeds)])
            for _ in range(2000)
        ]
        low, high = np.quantile(draws, [0.025, 0.975])
        found[f"funnel - {arm}"] = {
            "mean": float(apart.mean()), "interval": [float(low), float(high)], "seeds": apart.mean(1).tolist()
        }  # fmt: skip
    return found


def draw(results, path):
    """Draw the mean of each case over the seeds, and its range."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    for arm in results[0]:
        lines = np.array([one[arm] for one in results])
        axes.plot(lines.mean(0), label=arm, marker="o", markersize=3)
        axes.fill_between(range(lines.shape[1]), lines.min(0), lines.max(0), alpha=0.2)
    axes.set(xlabel="day", ylabel="true utility of the shown items")
    axes.legend()
    figure.savefig(path)
    pyplot.close(figure)


def main():
    """Run all seeds and cases, and print the differences."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    numbers = {
        "days": 10, "seeds": 3, "first_seed": 0, "requests": 1500, "window": 4, "epochs": 10, "batch_size": 256,
        "negatives": 40, "dim": 16, "jobs": 1,
    }  # fmt: skip
    for name, default in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--loss", default="bce")
    parser.add_argument("--answered", action="store_true", help="add the case with all answers")
    parser.add_argument("--export", action="store_true", help="answer with an export, not with the weights in memory")
    options = parser.parse_args()
    folder = Path(options.folder)
    (folder / "days").mkdir(parents=True, exist_ok=True)
    free = ("folder", "jobs", "seeds", "answered")  # may differ when a command resumes
    settings = {name: value for name, value in vars(options).items() if name not in free}
    if (folder / "options.json").exists() and json.loads((folder / "options.json").read_text()) != settings:
        parser.error(f"{options.folder} has results of other options; use another folder")
    write_whole(folder / "options.json", json.dumps(settings))
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    arms = [*ARMS, *(["answered"] if options.answered else [])]
    cases = [(seed, arm, options) for seed in seeds for arm in arms]
    if options.jobs == 1:
        for case in cases:
            run(*case)
    else:
        with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
            for done in [pool.submit(run, *case) for case in cases]:
                done.result()
    results = [
        {
            arm: [json.loads(result_path(options, seed, arm, day).read_text()) for day in range(options.days)]
            for arm in arms
        }
        for seed in seeds
    ]
    differences = summary(results)
    content = {"options": {**settings, "seeds": options.seeds}, "differences": differences, "utility": results}
    write_whole(folder / "closed_loop.json", json.dumps(content, indent=1))
    draw(results, folder / "closed_loop.svg")
    shown, unshown, random = np.mean([answers_by_stage(seed, options) for seed in seeds], axis=(0, 1))
    print(f"funnel: true probability of a click: {shown:.3f} shown, {unshown:.3f} not shown, {random:.3f} random items")
    for arm in arms:
        last = [np.mean(one[arm][-(options.days // 2) :]) for one in results]
        print(f"{arm:8} mean of the second half, by seed: {' '.join(f'{value:.3f}' for value in last)}")
    for name, one in differences.items():
        low, high = one["interval"]
        seeds = " ".join(f"{value:+.3f}" for value in one["seeds"])
        print(f"{name}: {one['mean']:+.3f} (95 %: {low:+.3f} to {high:+.3f}), by seed: {seeds}")


if __name__ == "__main__":
    main()
