"""Checkpoint, export, index, recommendations, and one request to the service: `python examples/serving.py FOLDER`.

docs/serving.md has the commands for each step. Only training and export need torch.
"""

import json
import sys
import threading
import time
from pathlib import Path
from urllib.request import Request, urlopen

import uvicorn

from recsys_topk.runs import TrainingRun
from recsys_topk.runs.deploy import export_checkpoint
from recsys_topk.serving.index import build_index
from recsys_topk.serving.recommend import CascadeRecommender
from recsys_topk.serving.service import make_app

folder = Path(sys.argv[1])
world = {"users": 40, "items": 300, "days": 4, "requests": 120}
trainer = {"max_epochs": 1, "accelerator": "cpu", "enable_progress_bar": False}
data = {"world": world, "batch_size": 60, "eval_negatives": 40}
run = TrainingRun({"data": data, "trainer": trainer, "out": str(folder), "name": "trained"})
run.fit()

export, index = folder / "export", folder / "index"
report = export_checkpoint(run.directory.path / "checkpoints" / "best.ckpt", export, programs=False)
facts = build_index(export, index)
print(f"{facts.items} items, recall of the index {facts.recall:.2f}")
print("scores compared with the checkpoint on", report.agreement.requests, "requests")

found = CascadeRecommender.from_export(export, index).recommend([7], 5)[0]
print("recommended in Python:", *(one.item for one in found))

config = uvicorn.Config(make_app(export, index), host="127.0.0.1", port=0, log_level="warning")
server = uvicorn.Server(config)
socket = config.bind_socket()  # port 0 = any free port
thread = threading.Thread(target=server.run, args=([socket],))
thread.start()
try:
    while not server.started and thread.is_alive():
        time.sleep(0.05)
    address = f"http://127.0.0.1:{socket.getsockname()[1]}/recommend"
    body = json.dumps({"users": [7], "number": 5}).encode()
    with urlopen(Request(address, body, {"Content-Type": "application/json"}), timeout=60) as answer:
        content = json.load(answer)
    print("recommended over HTTP:", *(one["item"] for one in content["recommendations"][0]))
finally:
    server.should_exit = True
    thread.join()
