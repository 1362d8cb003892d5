"""Logs of other kinds, to see where a recipe fails: sessions, sparse retail, repeats, drift, and taste without order.

    python examples/peers/other_logs.py logs
    recsys-topk fit --config interactions-cascade --data.root logs/drift.csv --name drift \
        --seed_everything 1 --data.seed 1
    recsys-topk test --ckpt_path runs/drift/checkpoints/best.ckpt --corpus --corpus.k 20 \
        --baselines popularity,transitions,itemknn,als,ease

Use `--data.split leave_last` for all but drift.csv, and `--data.repeats true` for repeat.csv.
"""

import argparse
from pathlib import Path

import numpy as np


def make_items(rng, number, clusters=30, dim=8, exponent=1.0):
    """Return the popularity of items (a power law), their clusters, and their vectors."""
    popularity = (np.arange(number) + 5.0) ** -exponent
    popularity /= popularity.sum()
    rng.shuffle(popularity)
    cluster = rng.integers(clusters, size=number)
    centre = rng.normal(size=(clusters, dim))
    return popularity, cluster, centre[cluster] + 0.7 * rng.normal(size=(number, dim))


def taste(rng, popularity, vectors, strength=1.0):
    """Return a user's probabilities of the items: popularity, and likeness to two items."""
    user = vectors[rng.choice(len(popularity), size=2, p=popularity)].mean(0) * strength
    user = user + 0.3 * rng.normal(size=vectors.shape[1])
    logits = np.log(popularity) + vectors @ user / np.sqrt(vectors.shape[1]) * 1.5
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def repeat():
    """60 % of the events repeat an item of the user, rather a recent one."""
    rng = np.random.default_rng(1)
    popularity, _, vectors = make_items(rng, 1000)
    for user in range(140):
        probabilities, number = taste(rng, popularity, vectors), int(rng.integers(60, 180))
        had, time = [], rng.integers(0, 10**7)
        for _ in range(number):
            time += int(rng.exponential(80000)) + 1
            if had and rng.random() < 0.6:
                weights = 0.97 ** np.arange(len(had))[::-1]
                item = had[rng.choice(len(had), p=weights / weights.sum())]
            else:
                item = int(rng.choice(1000, p=probabilities))
            had.append(item)
            yield user, item, time


def retail():
    """3 to 6 events per user, most of them in two clusters."""
    rng = np.random.default_rng(2)
    popularity, cluster, _ = make_items(rng, 4000, clusters=60)
    members = [np.flatnonzero(cluster == k) for k in range(60)]
    inside = [popularity[own] / popularity[own].sum() for own in members]
    of_cluster = np.array([popularity[own].sum() for own in members])
    for user in range(3000):
        number, time = int(rng.integers(3, 7)), rng.integers(0, 10**7)
        liked = rng.choice(60, size=2, p=of_cluster)
        for _ in range(number):
            time += int(rng.exponential(300000)) + 1
            k = rng.choice(liked) if rng.random() < 0.75 else rng.choice(60, p=of_cluster)
            yield user, int(rng.choice(members[k], p=inside[k])), time


def sessions():
    """2 to 8 clicks; 60 % go to one of five successors of the item before."""
    rng = np.random.default_rng(3)
    popularity, _, _ = make_items(rng, 1200, exponent=0.9)
    following = np.stack([rng.choice(1200, size=5, p=popularity) for _ in range(1200)])
    for user in range(3000):
        number, time = int(rng.integers(2, 9)), rng.integers(0, 10**7)
        item = int(rng.choice(1200, p=popularity))
        for _ in range(number):
            yield user, item, time
            time += int(rng.exponential(60)) + 1
            follows = rng.random() < 0.6
            item = int(
                following[item, rng.choice(5, p=[0.4, 0.25, 0.15, 0.1, 0.1])]
                if follows
                else rng.choice(1200, p=popularity)
            )


def noorder():
    """15 to 59 items by taste, in random order."""
    rng = np.random.default_rng(4)
    popularity, _, vectors = make_items(rng, 600, clusters=25, exponent=0.8)
    for user in range(400):
        probabilities, number = taste(rng, popularity, vectors, 1.5), int(rng.integers(15, 60))
        items = rng.choice(600, size=number, replace=False, p=probabilities)
        times = rng.integers(0, 10**7) + np.sort(rng.integers(0, 10**6, size=number))
        yield from ((user, int(item), int(time)) for item, time in zip(items, times, strict=True))


def drift():
    """New items in 1,000 days, whose popularity falls by half in 42 days; users stay for some months."""
    rng = np.random.default_rng(5)
    popularity, _, vectors = make_items(rng, 1200, exponent=0.7)
    born = rng.uniform(-300, 1000, size=1200)
    for user in range(800):
        start, number = rng.uniform(0, 1000 * 0.98), 2 + int(rng.exponential(16))
        times = np.sort(start + rng.exponential(60, size=number))
        logits, had = np.log(taste(rng, popularity, vectors)), []
        for time in times[times < 1000]:
            now = np.where(time > born, logits - (time - born) / 60, -1e9)
            now[had] = -1e9
            weights = np.exp(now - now.max())
            had.append(int(rng.choice(1200, p=weights / weights.sum())))
            yield user, had[-1], int(time * 86400)


def main():
    """Write one CSV per kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for make in (sessions, retail, repeat, drift, noorder):
        lines = [",".join(map(str, row)) for row in make()]
        (folder / f"{make.__name__}.csv").write_text("\n".join(["user_id,item_id,timestamp", *lines]) + "\n")


if __name__ == "__main__":
    main()
