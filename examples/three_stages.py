"""Configure three stages, on a small simulated data set: `python examples/three_stages.py FOLDER`."""

import sys

from recsys_topk.runs import TrainingRun

config = {
    "data": {
        "layout": "three-stage",  # the sample groups of the lists, and their labels
        "world": {"users": 40, "items": 300, "days": 4, "requests": 120},
        "batch_size": 60,
        "eval_negatives": 40,
    },
    "model": {
        "stages": [  # the number of stages is the length of this list
            {"kind": "two_tower", "name": "retrieval", "quota": 40},
            {"kind": "mlp", "name": "preranking", "quota": 30, "options": {"hidden": [32]}},
            {"kind": "din", "name": "ranking", "quota": 20},
        ],
        "k": 10,
    },
    "loss": {"class_path": "lapsum", "tau": 5.0},
    "trainer": {"max_epochs": 1, "accelerator": "cpu", "enable_progress_bar": False},
    "out": sys.argv[1],
    "name": "three",
}
run = TrainingRun(config)
run.fit()
for name, value in run.test().items():
    print(f"{name} {value:.3f}")
