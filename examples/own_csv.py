"""Train and test a cascade on a CSV file with user, item and time columns.

`python examples/own_csv.py FOLDER` writes a small made-up clicks.csv to a folder, trains on it, and tests the best
checkpoint. For your own file, replace `root` in the config below.
"""

import random
import sys
from pathlib import Path

from recsys_topk.runs import TrainingRun

if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
    sys.exit(f"{__doc__}\nGive an existing folder, e.g.: mkdir try && python examples/own_csv.py try")
folder = Path(sys.argv[1])
random.seed(0)
rows = [
    (user, item) for user in range(60) for item in random.sample(range(user % 3, 90, 3), 24)
]  # each user likes a third
random.shuffle(rows)  # the time of a click is its position in the file
lines = [f"u{user},i{item},{1_700_000_000 + 60 * second}" for second, (user, item) in enumerate(rows)]
(folder / "clicks.csv").write_text("user_id,item_id,timestamp\n" + "\n".join(lines) + "\n")

config = {
    "data": {
        "class_path": "interactions",
        "init_args": {"root": str(folder / "clicks.csv"), "batch_size": 16, "cache_dir": str(folder / "cache")},
    },
    "loss": "softmax",
    "trainer": {"max_epochs": 3, "accelerator": "cpu", "enable_progress_bar": False},
    "out": str(folder / "runs"),
    "name": "clicks",
}
run = TrainingRun(config)
run.fit()
best = run.directory.path / "checkpoints" / "best.ckpt"
for name, value in TrainingRun({"ckpt_path": str(best), "out": str(folder / "runs")}).test().items():
    print(f"{name} {value:.3f}")
