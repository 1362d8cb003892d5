"""Write the leave-last-out split of a data module as arrays, for libraries in environments of their own.

    python examples/peers/export_split.py path/to/ml-100k ml-100k.npz

All items are rows of the catalogue. A list of lists is one array of all elements and one of the ends.
"""

import io
import sys

import numpy as np

from recsys_topk.datamodules import InteractionsDataModule


def flat(lists):
    """Return the elements of all lists, and the end of each list."""
    return np.concatenate(lists).astype(np.int32), np.cumsum([len(one) for one in lists])


def split_arrays(data):
    """Return the arrays of `protocol.Split`."""
    ids = data.catalogue("test").item_id.numpy()
    user, item_id = data.shard("train").sequences()
    train = np.searchsorted(ids, item_id)
    found = {"items": np.array(len(ids))}
    lists = {"train": np.split(train, np.flatnonzero(np.diff(user)) + 1)}
    for split in ("val", "test"):
        shard = data.shard(split)
        rows = np.arange(len(shard))
        batch = shard.batch(rows)
        if batch.labels.shape[1] != 1 or not np.array_equal(data.catalogue(split).item_id.numpy(), ids):
            raise ValueError(f"{split} must have one positive per request, and all items as its catalogue")
        target = np.searchsorted(ids, batch.item_id[batch.candidates[:, 0]].numpy())
        for name, values in (("history", shard.earlier(rows)), ("excluded", shard.excluded(rows))):
            lists[f"{split}_{name}"] = [
                one[(one >= 0) & (one != own)] for one, own in zip(values.numpy(), target, strict=True)
            ]
        found[f"{split}_target"] = target.astype(np.int32)
    for name, values in lists.items():
        found[name], found[f"{name}_ends"] = flat(values)
    return found


def export(data, path=None):
    """Write the split of a prepared data module to a file, or to memory; return it."""
    path = io.BytesIO() if path is None else path
    np.savez_compressed(path, **split_arrays(data))
    if isinstance(path, io.BytesIO):
        path.seek(0)
    return path


if __name__ == "__main__":
    module = InteractionsDataModule(sys.argv[1], split="leave_last")
    module.prepare_data()
    export(module, sys.argv[2])
