"""Short help for the training commands: what people use, on one screen; `--help_all` shows every option."""

from __future__ import annotations

import inspect

from recsys_topk.registry import Registry

PURPOSE = {
    "fit": "Train a cascade. With no --data.root a small world is simulated once and kept.",
    "validate": "Measure a checkpoint on the validation day; its options are restored, what is typed overrides them.",
    "test": "Measure a checkpoint on the test day; its options are restored, what is typed overrides them.",
    "predict": "Write every candidate's scores, fate and rank as Parquet, for the test days.",
}

OPTIONS = """
  --loss NAME                     a name (recsys-topk losses), a class name or a class path (default: dftopk)
  --loss.tau X, --loss.k N, ...   its options; --loss.help NAME lists them
  --objective NAME                joint, independent, bce, fs-ranknet, fs-lambdaloss, icc, rankflow
                                  (default: joint for losses with a top-k operator, independent for others)
  --config FILE|NAME              YAML; packaged: simulated, recflow-2stage, recflow-3stage, paper-online

data
  --data.root DIR                 RecFlow, or what recsys-topk simulate wrote
  --data.layout two-stage|three-stage
  --data.batch_size N             requests a batch (default: 1024)
  --data.train_negatives N        sampled negatives a list in training (default: 0)
  --data.eval_negatives N         and in evaluation, frozen (default: 160)
  --data.train_days A:B           also val_days, test_days; dates

model
  --model.k N                     items wanted in the end (default: 10)
  --model.dim N                   embedding dimension (default: 8)
  --model.lr X                    learning rate (default: 0.01)
  --model.optimizer NAME          adam, adamw, adagrad, sgd
  --model.embedding_optimizer NAME   rowwise_adagrad, adagrad or sgd inside backward; same = --model.optimizer
  --model.stages ...              in YAML: a list of {kind, name, quota, options}

run
  --trainer.max_epochs N          any option of Lightning's Trainer (default: 1)
  --trainer.accelerator cpu|gpu|auto, --trainer.devices N, --trainer.precision bf16-mixed
  --seed_everything N             (default: 42)
  --out DIR, --name NAME          where the run goes (default: runs/LOSS-...)
  --logger csv|wandb              metrics.csv is always written; W&B runs offline without a key
  --log_checkpoints true          upload the weights of best and last to W&B (no code, no optimizer state)
  --resume last|DIR|FILE          go on with a run that was stopped, in its directory and with its options
  --save_every_minutes X          how often last.ckpt is saved inside an epoch (default: 5); --save_every_n_steps N
  --ckpt_path FILE                the checkpoint to measure, or to begin a new run from
  --trust PACKAGE                 let files (config, checkpoint) name classes of this package; may be repeated
  --print_config                  the whole configuration, and stop
  --help_all                      every option"""


def command_help(command: str) -> str:
    """Return the help of a training command."""
    usage = f"usage: recsys-topk {command} [--config NAME] [--loss NAME] [--option value ...]"
    return f"{usage}\n\n{PURPOSE[command]}\n{OPTIONS}"


def class_help(table: Registry[object], name: str | None) -> str:
    """Return what a loss or objective is and takes, or the names there are."""
    if name is None:
        return f"{table.kind}: {', '.join(table.available())}\n--{table.kind}.help NAME tells more of one"
    cls = table.resolve(name)
    parameters = inspect.signature(cls).parameters.values()
    options = ", ".join(f"{p.name}={p.default!r}" for p in parameters if p.default is not inspect.Parameter.empty)
    return f"{cls.__name__}({options})\n\n{inspect.cleandoc(cls.__doc__ or '')}"
