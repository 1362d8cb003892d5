"""Untrusted checkpoints, configs and run directories cannot execute code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from recsys_topk import trust
from recsys_topk.cascades.module import CascadeModule
from recsys_topk.cascades.stage import StageConfig
from recsys_topk.cli.arguments import parse_options
from recsys_topk.cli.main import main
from recsys_topk.losses import DFTopKLoss, RankingLoss
from recsys_topk.losses import registry as losses
from recsys_topk.registry import Registry, suggest
from recsys_topk.runs.checkpoint import describe_checkpoint
from recsys_topk.runs.config import merge, packaged_configs, read_config, resolve
from recsys_topk.runs.run import TrainingRun
from recsys_topk.spec import build
from recsys_topk.trust import UntrustedError, documents, inspect_names, is_allowed, load_class, reading
from recsys_topk.trust.own_runs import recall, remember
from recsys_topk.trust.typed import trusted_by
from tests.conftest import TINY_WORLD

FIXTURES = Path(__file__).parent / "fixtures" / "v0_1"
CHECKPOINT = FIXTURES / "plain" / "checkpoints" / "last.ckpt"
SOURCE = """
from pathlib import Path
from lightning.pytorch.callbacks import Callback
from recsys_topk.losses import DFTopKLoss

Path({marker!r}).write_text("imported")

class Evil(Callback):
    pass

class MyLoss(DFTopKLoss):
    name = "loss_of_untrusted_package"

def run(*args, **kwargs):
    Path({marker!r}).write_text("called")
"""


class Payload:
    """A module on sys.path that writes a marker file when it is imported."""

    def __init__(self, folder: Path, name: str) -> None:
        self.marker, self.name = folder / "marker", name
        (folder / f"{name}.py").write_text(SOURCE.format(marker=str(self.marker)))

    @property
    def ran(self) -> bool:
        return self.marker.exists() or self.name in sys.modules


@pytest.fixture
def payload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Payload]:
    folder = tmp_path / "path"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RECSYS_TOPK_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.delenv("RECSYS_TOPK_RUN", raising=False)
    yield Payload(folder, "evil_payload")
    sys.modules.pop("evil_payload", None)
    losses._classes.pop("loss_of_untrusted_package", None)
    trust.allowed._registered.discard("evil_payload.MyLoss")


@pytest.fixture
def assert_refused(payload: Payload, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must fail with status 2 and one line on stderr that contains `names`, without running code."""

    def run(*arguments: str, names: tuple[str, ...] = ("evil_payload", "--trust evil_payload")) -> str:
        capsys.readouterr()
        try:
            status = main(list(arguments))
        except SystemExit as stop:
            status = stop.code  # type: ignore[assignment]
        error = capsys.readouterr().err.strip()
        assert status == 2, error
        assert not payload.ran
        assert len(error.splitlines()) == 1, error
        for name in names:
            assert name in error
        assert not list(Path("runs").glob("*")), "a run was started"
        return error

    return run


def write_changed_checkpoint(path: Path, **hyper_parameters: Any) -> Path:
    """Write a copy of a checkpoint with other hyper-parameters."""
    content = torch.load(CHECKPOINT, weights_only=True)
    for name, value in hyper_parameters.items():
        part = "datamodule_hyper_parameters" if name == "data" else "hyper_parameters"
        content[part] = {**content[part], **(value if name == "data" else {name: value})}
    torch.save(content, path)
    return path


EVIL = {"class_path": "evil_payload.Evil", "init_args": {"x": 1}}
STAGE = {"kind": "two_tower", "name": "retrieval", "quota": 30, "options": {}}
LOSS = "recsys_topk.losses.HardTopKLoss"
IN_CHECKPOINTS: dict[str, dict[str, Any]] = {
    "stage kind": {"stages": [{**STAGE, "kind": "evil_payload.Evil"}]},
    "stage option": {"stages": [{**STAGE, "options": {"activation": "evil_payload.run"}}]},
    "loss": {"loss": EVIL},
    "object inside our package": {"loss": {"class_path": "recsys_topk.checks.torch.load", "init_args": {}}},
    "operator in a loss": {"loss": {"class_path": LOSS, "init_args": {"straight_through": "evil_payload.Evil"}}},
    "objective": {"objective": EVIL},
    "metric": {"metrics": ["evil_payload.Evil"]},
    "metric with options": {"metrics": [{"name": "evil_payload.Evil", "k": 5}]},
    "yaml text": {"optimizer_options": "{eps: {class_path: evil_payload.Evil}}"},
    "instantiator": {"_instantiator": "evil_payload.run"},
}


@pytest.mark.parametrize("way", [*IN_CHECKPOINTS, "data"])
def test_checkpoint_cannot_run_code(way: str, assert_refused: Callable[..., str], tmp_path: Path) -> None:
    given = IN_CHECKPOINTS.get(way) or {"data": {"world": EVIL}}
    path = write_changed_checkpoint(tmp_path / "stranger.ckpt", **given)
    named = ("torch.load", "--trust recsys_topk") if "our package" in way else ("evil_payload", "--trust evil_payload")
    assert_refused("test", "--ckpt_path", str(path), names=(*named, "stranger.ckpt"))


@pytest.mark.parametrize("way", [way for way in IN_CHECKPOINTS if way not in ("yaml text", "stage option")])
def test_load_from_checkpoint_cannot_run_code(way: str, payload: Payload, tmp_path: Path) -> None:
    path = write_changed_checkpoint(tmp_path / "stranger.ckpt", **IN_CHECKPOINTS[way])
    if way == "instantiator":  # a key of Lightning, which is ignored
        assert CascadeModule.load_from_checkpoint(path).loss.name == "dftopk"
    else:
        with pytest.raises(UntrustedError, match=r"stranger\.ckpt.*(evil_payload|torch\.load).*trust="):
            CascadeModule.load_from_checkpoint(path)
    assert not payload.ran


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss", "evil_payload.MyLoss"),
        ("loss", EVIL),
        ("objective", "evil_payload.Evil"),
        ("objective", EVIL),
        ("stages", [{**STAGE, "kind": "evil_payload.Evil"}]),
        ("stages", [StageConfig("evil_payload.Evil", "retrieval", 30)]),
        ("metrics", ["evil_payload.Evil"]),
    ],
)
def test_hyper_parameters_of_a_checkpoint_cannot_run_code(name: str, value: Any, payload: Payload) -> None:
    hyper_parameters = torch.load(CHECKPOINT, weights_only=True)["hyper_parameters"]
    with pytest.raises(UntrustedError, match="evil_payload"):
        CascadeModule(**{**hyper_parameters, name: value})
    assert not payload.ran


def test_options_of_a_stage_cannot_run_code(payload: Payload, tmp_path: Path) -> None:
    options = {"stmt": "1", "setup": f"open({str(payload.marker)!r}, 'w')"}
    path = write_changed_checkpoint(
        tmp_path / "stranger.ckpt", stages=[{**STAGE, "kind": "timeit.Timer", "options": options}]
    )
    with pytest.raises(UntrustedError, match=r"timeit\.Timer"):
        CascadeModule.load_from_checkpoint(path)
    with pytest.raises(UntrustedError, match="Stage"):  # trusted, but not a stage
        CascadeModule.load_from_checkpoint(path, trust=["timeit"])
    with pytest.raises(UntrustedError, match=r"timeit\.Timer"):
        CascadeModule(**torch.load(path, weights_only=True)["hyper_parameters"])
    assert not payload.ran


def test_pickle_with_code_is_not_unpickled(
    assert_refused: Callable[..., str], payload: Payload, tmp_path: Path
) -> None:
    class Code:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {payload.marker}",)

    content = torch.load(CHECKPOINT, weights_only=True)
    torch.save({**content, "code": Code()}, tmp_path / "stranger.ckpt")
    assert_refused("test", "--ckpt_path", str(tmp_path / "stranger.ckpt"), names=("stranger.ckpt",))
    with pytest.raises(Exception, match=r"[Ww]eights"):
        CascadeModule.load_from_checkpoint(tmp_path / "stranger.ckpt")
    assert not payload.ran


IN_CONFIGS = {
    "loss": "loss: evil_payload.Evil",
    "loss with options": "model: {loss: {class_path: evil_payload.Evil, init_args: {x: 1}}}",
    "loss option": f"model: {{loss: {{class_path: {LOSS}, init_args: {{straight_through: evil_payload.Evil}}}}}}",
    "objective": "objective: {class_path: evil_payload.Evil}",
    "options by loss": "losses: {dftopk: {tau: evil_payload.Evil}}",
    "stage": "model: {stages: [{kind: evil_payload.Evil, name: a, quota: 30}]}",
    "model": "model: {class_path: evil_payload.Evil}",
    "data": "data: evil_payload.Evil",
    "data with options": "data: {class_path: evil_payload.Evil}",
    "metrics": "model: {metrics: [joint_recall, {name: evil_payload.Evil}]}",
    "flat keys": "model.loss.class_path: evil_payload.Evil",
    "callbacks": "trainer: {callbacks: [evil_payload.Evil]}",
    "appended callbacks": "trainer: {callbacks+: evil_payload.Evil}",
    "callback with options": "trainer: {callbacks: {class_path: evil_payload.Evil}}",
    "logger": "trainer: {logger: evil_payload.Evil}",
    "strategy": "trainer: {strategy: evil_payload.Evil}",
    "plugins": "trainer: {plugins: [{class_path: evil_payload.Evil}]}",
    "profiler": "trainer: {profiler: {class_path: evil_payload.Evil}}",
    "accelerator": "trainer: {accelerator: evil_payload.Evil}",
    "option of a harmless class": (
        "trainer: {strategy: {class_path: DDPStrategy, init_args: {ddp_comm_hook: evil_payload.run}}}"
    ),
    "dict_kwargs": "trainer: {logger: {class_path: CSVLogger, dict_kwargs: {f: evil_payload.run}}}",
    "yaml in a string": "trainer: {callbacks: '[{class_path: evil_payload.Evil}]'}",
    "quoted twice": """trainer: {callbacks: ["'evil_payload.Evil'"]}""",
    "padded": 'trainer: {callbacks: [" evil_payload.Evil\\n"]}',
    "yaml in yaml in a string": """trainer: {callbacks: '["{class_path: evil_payload.Evil}"]'}""",
}


@pytest.mark.parametrize("as_text", [False, True], ids=["file", "text"])
@pytest.mark.parametrize("way", IN_CONFIGS)
def test_config_cannot_run_code(way: str, as_text: bool, assert_refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "stranger.yaml").write_text(IN_CONFIGS[way])
    error = assert_refused("fit", "--config", IN_CONFIGS[way] if as_text else "stranger.yaml")
    assert as_text or "stranger.yaml" in error


@pytest.mark.parametrize("text", ["{class_path: evil_payload.X, d: 2024-99-99}", "{class_path: evil_payload.X"])
def test_invalid_yaml_text_with_a_class_path_is_refused(text: str, assert_refused: Callable[..., str]) -> None:
    assert_refused(
        "fit", "--config", yaml.safe_dump({"trainer": {"callbacks": [text]}}), names=("refused", "class_path")
    )


def test_lambda_callback_is_refused_by_any_name(assert_refused: Callable[..., str]) -> None:
    for name in ("LambdaCallback", "lightning.pytorch.callbacks.LambdaCallback"):
        assert_refused("fit", "--config", f"trainer: {{callbacks: [{{class_path: {name}}}]}}", names=(name, "--trust"))


@pytest.mark.parametrize("text", ["callbacks: [{name: x}]", "callbacks: [{evil.X: null}]", "logger: {name: x}"])
def test_missing_class_path_is_reported(text: str, assert_refused: Callable[..., str]) -> None:
    error = assert_refused("fit", "--config", f"trainer: {{{text}}}", names=("class_path is missing",))
    assert "--trust" not in error


def test_error_suggests_trusting_one_class_of_a_broad_package() -> None:
    for path in ("lightning.pytorch.callbacks.LambdaCallback", "os.system", "recsys_topk.runs.run.TrainingRun"):
        with pytest.raises(UntrustedError, match=rf"--trust {path} \(in Python: trust=\['{path}'\]\)"):
            trust.check_name(path, where="it")


@pytest.mark.parametrize(
    ("option", "path"),
    [
        ("callbacks", "recsys_topk.callbacks.predictions.PredictionWriter"),
        ("callbacks", "PredictionWriter"),
        ("callbacks", "recsys_topk.runs.lightning_cli.PredictionWriter"),
        ("callbacks", "recsys_topk.callbacks.resume_point.ResumePoint"),
        ("logger", "recsys_topk.runs.metrics_file.MetricsFile"),
        ("plugins", "recsys_topk.callbacks.resume_point.WholeFileIO"),
    ],
)
def test_config_cannot_name_classes_of_the_package_that_write_files(
    option: str, path: str, assert_refused: Callable[..., str]
) -> None:
    protected = Path("protected")
    protected.write_text("unchanged")
    spec = {"class_path": path, "init_args": {"path": str(protected)}}
    assert_refused("fit", "--config", yaml.safe_dump({"trainer": {option: [spec]}}), names=(path, "--trust"))
    assert protected.read_text() == "unchanged"


def test_config_can_name_classes_that_configure_a_run() -> None:
    for path in (
        "recsys_topk.callbacks.diagnostics.Diagnostics", "recsys_topk.cascades.stage.StageConfig",
        "recsys_topk.datamodules.simulator.world.WorldConfig", "recsys_topk.reference.PublishedARF",
        "recsys_topk.operators.DFTopK", *(trust.class_path(cls) for cls in losses.classes().values()),
    ):  # fmt: skip
        assert is_allowed(path), path


@pytest.mark.parametrize("content", ["class_path: evil_payload.Evil", "evil_payload.Evil", "'[evil_payload.Evil]'"])
@pytest.mark.parametrize("option", ["trainer.callbacks", "trainer.logger", "model.loss"])
def test_config_named_in_a_config_cannot_run_code(
    content: str, option: str, assert_refused: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "inner.yaml").write_text(content)
    (tmp_path / "sub" / "middle.yaml").write_text("inner.yaml")
    part, name = option.split(".")
    for path in ("sub/inner.yaml", "sub/middle.yaml"):
        assert_refused(
            "fit", "--config", f"{part}: {{{name}: {path}}}", names=("evil_payload", "inner.yaml", "--trust")
        )


@pytest.mark.parametrize("option", ["--trainer.callbacks", "--trainer.callbacks+", "--trainer.logger", "--trainer"])
def test_config_typed_for_one_option_cannot_run_code(
    option: str, assert_refused: Callable[..., str], tmp_path: Path
) -> None:
    inner = {"class_path": "evil_payload.Evil"}
    (tmp_path / "inner.yaml").write_text(yaml.safe_dump({"logger": inner} if option == "--trainer" else inner))
    assert_refused("fit", f"{option}=inner.yaml", names=("evil_payload", "inner.yaml", "--trust"))


@pytest.mark.parametrize(
    "text",
    [
        "trainer: {callbacks: [{class_path: evil_payload.Evil}]}",
        "trainer: {logger: evil_payload.Evil}",
        "model: {objective: evil_payload.run}",
        "trainer: {strategy: {class_path: DDPStrategy, init_args: {ddp_comm_hook: evil_payload.run}}}",
        "trainer: {callbacks: [LambdaCallback]}",
        "trainer: {callbacks: [{class_path: PredictionWriter, init_args: {path: protected}}]}",
        "trainer: {callbacks: inner.yaml}",
    ],
)
def test_parser_itself_refuses_untrusted_classes(
    text: str, assert_refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parser refuses even if the inspection of the config before it is switched off."""
    (tmp_path / "inner.yaml").write_text("evil_payload.Evil")
    monkeypatch.setattr("recsys_topk.runs.config.inspect_config", lambda *_: None)
    unresolved = merge(resolve({}), yaml.safe_load(text))
    monkeypatch.setattr("recsys_topk.runs.run.resolve", lambda config: unresolved)
    name = next((name for name in ("LambdaCallback", "PredictionWriter") if name in text), "evil_payload")
    assert_refused("fit", "--config", text, names=(name, "--trust"))


def test_guard_restores_the_settings_of_jsonargparse() -> None:
    from jsonargparse import _common, get_loader

    from recsys_topk.trust.guard import guarded

    before = dict(_common.parsing_settings), get_loader("yaml")
    with guarded():
        assert (dict(_common.parsing_settings), get_loader("yaml")) != before
    assert (dict(_common.parsing_settings), get_loader("yaml")) == before


def test_command_in_a_new_process_refuses(
    payload: Payload,
    recsys_topk: Callable[..., Any],
    environment: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths = os.pathsep.join([str(payload.marker.parent), environment.get("PYTHONPATH", "")])
    monkeypatch.setitem(environment, "PYTHONPATH", paths)
    path = write_changed_checkpoint(tmp_path / "stranger.ckpt", loss=EVIL)
    done = recsys_topk("test", "--ckpt_path", str(path))
    assert done.returncode == 2
    assert "loading torch" in done.stdout  # the first line of commands that need torch
    assert len(done.stdout.splitlines()) == 1
    (line,) = done.stderr.splitlines()
    assert "stranger.ckpt" in line
    assert "'evil_payload.Evil'" in line
    assert "--trust evil_payload" in line
    assert not payload.ran


def run_directory(path: Path, **facts: Any) -> Path:
    shutil.copytree(FIXTURES / "plain", path)
    (path / "run.json").write_text(json.dumps({**json.loads((path / "run.json").read_text()), **facts}))
    return path


def test_config_of_a_run_directory_cannot_run_code(assert_refused: Callable[..., str], tmp_path: Path) -> None:
    run = run_directory(tmp_path / "stranger")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["trainer"]["callbacks"] = [EVIL]
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert_refused("fit", "--resume", "stranger", names=("evil_payload", "stranger/config.yaml", "--trust"))


def test_checkpoint_of_a_run_directory_cannot_run_code(assert_refused: Callable[..., str], tmp_path: Path) -> None:
    run = run_directory(tmp_path / "stranger")
    write_changed_checkpoint(run / "checkpoints" / "last.ckpt", loss=EVIL)
    assert_refused("fit", "--resume", "stranger", names=("evil_payload", "last.ckpt", "--trust"))


@pytest.mark.parametrize("forgery", ["entries", "invented token", "token of another run"])
def test_run_directory_cannot_declare_itself_trusted(
    forgery: str, assert_refused: Callable[..., str], tmp_path: Path
) -> None:
    """Not with entries in run.json, with an invented token or with the token of another run of the user."""
    mine = run_directory(tmp_path / "mine")
    facts = remember(mine, ["evil_payload"])
    (mine / "run.json").write_text(json.dumps(facts))
    assert recall(mine) == recall(mine / "checkpoints" / "last.ckpt") == ("evil_payload",)
    forged = {
        "entries": {"trusted": ["evil_payload"]},
        "invented token": {**facts, "trust_token": "0" * 32},
        "token of another run": facts,
    }[forgery]
    run = mine if forgery == "invented token" else tmp_path / "stranger"
    if forgery != "invented token":
        run_directory(run)
    (run / "run.json").write_text(json.dumps({"status": "interrupted", **forged}))
    write_changed_checkpoint(run / "checkpoints" / "last.ckpt", loss=EVIL)
    assert_refused("fit", "--resume", str(run), names=("evil_payload", "--trust"))


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, world_cache: Path) -> dict[str, Any]:
    """The arguments with which Lightning's trainer is called; no training takes place."""
    found: dict[str, Any] = {}

    def note(trainer: Any, model: Any, *, ckpt_path: Any = None, weights_only: Any = None, **_: Any) -> None:
        found.update(ckpt_path=ckpt_path, weights_only=weights_only)

    monkeypatch.setenv("RECSYS_TOPK_CACHE", str(world_cache))
    for command in ("fit", "test"):
        monkeypatch.setattr(f"lightning.pytorch.Trainer.{command}", note)
    return found


@pytest.mark.parametrize("plugin", ["TorchCheckpointIO", "lightning.pytorch.plugins.AsyncCheckpointIO"])
def test_config_cannot_choose_the_checkpoint_reader(plugin: str, assert_refused: Callable[..., str]) -> None:
    assert_refused("fit", "--config", f"trainer: {{plugins: [{plugin}]}}", names=(plugin, "--trust"))


def test_checkpoint_is_not_downloaded(assert_refused: Callable[..., str], tmp_path: Path) -> None:
    """`Path` turns the URL into the path of an existing local file, but Lightning would download it."""
    decoy = tmp_path / "http:" / "127.0.0.1:9" / "x.ckpt"
    decoy.parent.mkdir(parents=True)
    shutil.copy(CHECKPOINT, decoy)
    url = "http://127.0.0.1:9/x.ckpt"
    parse_options = ["--config", str(FIXTURES / "small.yaml"), "--ckpt_path", url]
    for arguments in (
        ["fit", *parse_options],
        ["test", *parse_options],
        ["test", "--config", f"ckpt_path: {url}", *parse_options[2:]],
    ):
        assert_refused(*arguments, names=(url, "local file"))


def test_lightning_loads_the_file_that_was_checked(payload: Payload, loaded: dict[str, Any], tmp_path: Path) -> None:
    """Lightning downloads paths that begin with http, so it must get an absolute path."""
    file = run_directory(tmp_path / "httprun") / "checkpoints" / "last.ckpt"
    for arguments in (["fit", "--resume", "httprun"], ["test", "--ckpt_path", "httprun/checkpoints/last.ckpt"]):
        loaded.clear()
        assert main(arguments) == 0
        assert loaded == {"ckpt_path": str(file.resolve()), "weights_only": True}


@pytest.mark.parametrize("address", ["ftp://127.0.0.1:9/x", "simplecache::ftp", "{a: 'ftp://127.0.0.1:9/x'}"])
@pytest.mark.parametrize(
    "text",
    [
        "trainer: {callbacks: [{class_path: ModelCheckpoint, init_args: {dirpath: ADDRESS}}]}",
        "trainer: {callbacks: {class_path: OnExceptionCheckpoint, init_args: {dirpath: ADDRESS}}}",
        "trainer: {logger: {class_path: CSVLogger, init_args: {save_dir: ADDRESS}}}",
        "trainer: {profiler: {class_path: SimpleProfiler, init_args: {dirpath: ADDRESS, filename: a}}}",
        "data: {root: ADDRESS}",
        "out: ADDRESS",
    ],
)
def test_config_cannot_name_a_network_address(text: str, address: str, assert_refused: Callable[..., str]) -> None:
    assert_refused(
        "fit", "--config", text.replace("ADDRESS", json.dumps(address)), names=("address", "local paths only")
    )


def test_checkpoint_cannot_name_a_network_address(assert_refused: Callable[..., str], tmp_path: Path) -> None:
    path = write_changed_checkpoint(tmp_path / "stranger.ckpt", data={"root": "s3://theirs/x"})
    assert_refused(
        "test", "--ckpt_path", str(path), names=("stranger.ckpt' (data.root)", "s3://theirs/x", "local paths only")
    )


def test_checkpoint_cannot_delete_files_outside_the_run(
    payload: Payload, world_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`ModelCheckpoint` deletes the file that its state names as the previous best."""
    monkeypatch.setenv("RECSYS_TOPK_CACHE", str(world_cache))
    fit = ["fit", *TINY_WORLD, "--trainer.limit_train_batches=1", "--trainer.limit_val_batches=1"]
    fit += ["--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint"]
    assert main([*fit, "--name=first"]) == 0
    content = torch.load("runs/first/checkpoints/last.ckpt", weights_only=True)
    (key,) = [key for key in content["callbacks"] if key.startswith("ModelCheckpoint{")]
    protected = tmp_path / "protected"
    protected.mkdir()
    folder = content["callbacks"][key]["dirpath"].replace("first", "second")
    for number, path in enumerate((f"local://{protected}", f"{folder}/{'../' * 20}{str(protected)[1:]}")):
        content["callbacks"][key] |= {"best_model_path": path, "last_model_path": path}
        torch.save(content, "evil.ckpt")
        name = "second" if number else "local"
        assert main([*fit, f"--name={name}", "--ckpt_path=evil.ckpt", "--trainer.max_epochs=2"]) == 0
        assert protected.is_dir(), path


def test_config_cannot_turn_off_safe_loading(assert_refused: Callable[..., str]) -> None:
    for text in ("weights_only: false", "fit.weights_only: 'false'"):
        assert_refused("fit", "--config", f"{text}\n", names=("weights_only",))


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)
)
TOO_MUCH = {
    "aliases": BOMB,
    "aliases in a string": "model: {lr: " + json.dumps(BOMB) + "}",
    "depth": "a: " + "[" * 5000 + "]" * 5000,
    "itself": "a: &a [*a]",
    "length": "# " + "x" * 50_000_000,
    "values": "a: [" + "1, " * 200_000 + "]",
    "number": "a: " + ":".join(["59"] * 50_000),
}


@pytest.mark.parametrize("way", TOO_MUCH)
def test_documents_that_exhaust_time_or_memory_are_refused_quickly(
    way: str, assert_refused: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "stranger.yaml").write_text(TOO_MUCH[way])
    start = time.monotonic()
    assert_refused("fit", "--config", "stranger.yaml", names=("refused",))
    assert time.monotonic() - start < 3


def test_yaml_bomb_in_a_nested_config_is_refused(assert_refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "inner.yaml").write_text(BOMB)
    assert_refused("fit", "--config", "trainer: {callbacks: inner.yaml}", names=("refused",))


def test_limits_do_not_affect_ordinary_documents() -> None:
    text = "a: &a {x: [1, 2.5, '3']}\nb: *a\nc: {<<: *a, y: 2024-01-13}\n"
    assert documents.read_yaml(text, "it") == yaml.safe_load(text)
    with pytest.raises(ValueError, match="it is not valid YAML"):
        documents.read_yaml("a: [", "it")
    with pytest.raises(ValueError, match="not valid YAML"):
        documents.read_yaml("a: !!python/object/apply:os.system [ls]", "it")


@pytest.mark.parametrize(
    "text",
    [
        "model: x\n", "loss: [1]\n", "data: 3\n", "losses: 3\n", "trainer: 4\n", "losses: {dftopk: 3}\n", "1: 2\n",
        "trainer: {1: 2}\n", "model: {1: 2}\n", "data: {1: 2}\n",
        "model: {loss: {class_path: dftopk, init_args: 3}}\n", "model: {loss: {class_path: '..'}}\n", "trust: [os]\n",
    ],
)  # fmt: skip
def test_config_with_values_of_the_wrong_type_fails_with_one_line(
    text: str, assert_refused: Callable[..., str]
) -> None:
    assert_refused("fit", "--config", text, names=())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"loss": 5}, "loss must be a mapping of options or a name, got 5"),
        ({"model": 3}, "model must be a mapping of options, got 3"),
        ({"config": 5}, "config must be a name, a file, a mapping or a list of them, got 5"),
        ({"config": [{"trainer": {1: 2}}]}, "the name of an option must be text, got 1"),
    ],
)
def test_dict_with_values_of_the_wrong_type_raises(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingRun(config).options()


@pytest.mark.parametrize(
    "text",
    ['"\\e[2Jx": 1', 'trainer: {"\\e[2Jx": 1}', 'loss: {"\\e[2Jx": 1}', '"\\e[2Jx": {class_path: evil_payload.X}'],
)
def test_control_characters_of_a_file_do_not_reach_the_terminal(text: str, assert_refused: Callable[..., str]) -> None:
    assert "\x1b" not in assert_refused("fit", "--config", text, names=("\\x1b[2Jx",))


def test_control_characters_of_a_checkpoint_do_not_reach_the_terminal() -> None:
    content = torch.load(CHECKPOINT, weights_only=True)
    content["hyper_parameters"]["stages"][0]["name"] = "a\x1b[2J\nb"
    lines = describe_checkpoint("it", content)
    assert all(line.isprintable() for line in lines)
    assert any("a\\x1b[2J\\nb" in line for line in lines)


def test_options_with_numeric_keys_are_merged() -> None:
    assert merge({"scheduling": {0: 1}}, {"scheduling": {4: 2}}) == {"scheduling": {0: 1, 4: 2}}


@pytest.mark.parametrize("arguments", [["--config", "binary.yaml"], ["--config", "trainer: {callbacks: binary.yaml}"]])
def test_error_for_a_binary_config_names_the_file(arguments: list[str], assert_refused: Callable[..., str]) -> None:
    Path("binary.yaml").write_bytes(b"\xff\xfe\x00a")
    assert_refused("fit", *arguments, names=("binary.yaml is not a text file in UTF-8",))


# Allowed names.


def test_typed_classes_are_trusted_and_resuming_needs_no_flag(
    payload: Payload, capsys: pytest.CaptureFixture[str], world_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECSYS_TOPK_CACHE", str(world_cache))
    quick = [*TINY_WORLD, "--trainer.limit_train_batches=2", "--trainer.limit_val_batches=0", "--name=mine"]
    parse_options = ["--loss", "evil_payload.MyLoss", "--trainer.callbacks+=evil_payload.Evil"]
    assert main(["fit", *parse_options, *quick]) == 0
    facts = json.loads(Path("runs/mine/run.json").read_text())
    assert facts["trusted"] == ["evil_payload"]
    monkeypatch.delenv("RECSYS_TOPK_RUN", raising=False)
    assert main(["fit", "--resume", "runs/mine", "--trainer.max_epochs=2"]) == 0
    assert json.loads(Path("runs/mine/run.json").read_text())["epochs"] == 2
    config = yaml.safe_load(Path("runs/mine/config.yaml").read_text())
    assert config["trainer"]["callbacks"][0]["class_path"] == "evil_payload.Evil"

    # A moved directory is untrusted, unless the package is trusted.
    trust.allowed._registered.discard("evil_payload.MyLoss")
    shutil.move("runs/mine", "moved")
    capsys.readouterr()
    assert main(["fit", "--resume", "moved", "--trainer.max_epochs=3"]) == 2
    assert "--trust evil_payload" in capsys.readouterr().err
    with pytest.raises(UntrustedError, match="evil_payload"):
        CascadeModule.load_from_checkpoint("moved/checkpoints/last.ckpt")
    model = CascadeModule.load_from_checkpoint("moved/checkpoints/last.ckpt", trust=["evil_payload"])
    assert type(model.loss).__module__ == "evil_payload"
    monkeypatch.delenv("RECSYS_TOPK_RUN", raising=False)
    assert main(["fit", "--resume", "moved", "--trainer.max_epochs=3", "--trust", "evil_payload"]) == 0


def test_names_given_in_python_are_imported_and_must_be_of_the_right_kind(payload: Payload) -> None:
    assert losses.resolve("evil_payload.MyLoss").__name__ == "MyLoss"
    for path in ("os.system", "timeit.Timer", "recsys_topk.operators.DFTopK"):
        with pytest.raises(ValueError, match=r"not a subclass of recsys_topk\.losses\.base\.RankingLoss"):
            losses.get(path)
    with reading(), pytest.raises(UntrustedError, match=r"evil_payload\.Other"):
        losses.resolve("evil_payload.Other")


def test_trust_covers_a_package_but_not_its_imports(payload: Payload) -> None:
    spec = {"class_path": "evil_payload.MyLoss", "init_args": {"tau": 2.0}}
    with pytest.raises(UntrustedError):
        build(spec, base=RankingLoss)
    assert not payload.ran
    assert build(spec, base=RankingLoss, trust=["evil_payload"]).operator.tau == 2.0
    assert (
        load_class("evil_payload.DFTopKLoss", RankingLoss, trust=["evil_payload"]) is DFTopKLoss
    )  # a class of this package
    with pytest.raises(UntrustedError, match=r"names 'pathlib.*Path'"):
        load_class("evil_payload.Path", object, trust=["evil_payload"])


def test_harmless_classes_and_packaged_configs_are_allowed() -> None:
    text = """
    trainer:
      callbacks:
        - {class_path: lightning.pytorch.callbacks.EarlyStopping, init_args: {monitor: a.b, patience: 3}}
        - {class_path: lightning.pytorch.callbacks.lr_monitor.LearningRateMonitor}
        - ModelCheckpoint
      logger: {class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: logs.old}}
      strategy: ddp
    """
    assert read_config(textwrap.dedent(text))["trainer"]["strategy"] == "ddp"
    for name in packaged_configs():
        assert resolve({"config": name})["model"]["loss"]["class_path"].startswith("recsys_topk.losses.")


def test_every_harmless_class_exists_and_takes_no_callable() -> None:
    import importlib
    import inspect

    for home, names in trust.HARMLESS.items():
        for name in names:
            cls = getattr(importlib.import_module(home), name)
            assert is_allowed(trust.class_path(cls)), name
            takes = [p for p in inspect.signature(cls).parameters.values() if "Callable" in str(p.annotation)]
            assert not takes or name in ("DDPStrategy",), (name, takes)


def test_config_with_harmless_callbacks_trains(
    payload: Payload, world_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECSYS_TOPK_CACHE", str(world_cache))
    text = """
    trainer:
      limit_train_batches: 2
      callbacks:
        - {class_path: EarlyStopping, init_args: {monitor: train/loss}}
        - class_path: lightning.pytorch.callbacks.LearningRateMonitor
      profiler: {class_path: lightning.pytorch.profilers.SimpleProfiler}
    """
    Path("mine.yaml").write_text(textwrap.dedent(text))
    assert main(["fit", "--config", "mine.yaml", *TINY_WORLD, "--name=callbacks"]) == 0
    written = yaml.safe_load(Path("runs/callbacks/config.yaml").read_text())["trainer"]["callbacks"]
    assert [entry["class_path"] for entry in written] == [
        "lightning.pytorch.callbacks.EarlyStopping",
        "lightning.pytorch.callbacks.LearningRateMonitor",
    ]
    assert "trusted" not in json.loads(Path("runs/callbacks/run.json").read_text())


def test_modules_of_installed_plugins_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    points = EntryPoints([EntryPoint("margin", "plugin_of_mine.margin", "recsys_topk.losses")])
    monkeypatch.setattr(trust.allowed, "entry_points", lambda: points)
    trust.allowed._plugin_modules.cache_clear()
    try:
        assert is_allowed("plugin_of_mine.margin.MarginLoss")
        assert not is_allowed("plugin_of_mine.other.Thing")
    finally:
        trust.allowed._plugin_modules.cache_clear()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--loss", "mine.a.Loss"], ("mine",)),
        (
            ["--trainer.callbacks+=mine.Callback", "--trust=theirs,others", "--trust", "x"],
            ("mine", "theirs", "others", "x"),
        ),
        (["--trainer.logger", "{class_path: mine.Logger, init_args: {f: torch.relu}}"], ("mine", "torch.relu")),
        (["--out", "runs.old", "--name=a.b", "--data.root", "x.y", "--config", "loss: mine.Loss"], ()),
        (["--model.lr", "1.5", "--loss.tau=2"], ()),
    ],
)
def test_typed_options_name_the_trusted_packages(arguments: list[str], expected: tuple[str, ...]) -> None:
    assert sorted(trusted_by(parse_options(arguments))) == sorted(expected)


def test_cycles_and_wrong_class_paths_in_a_checkpoint_are_refused() -> None:
    cycle: dict[str, Any] = {}
    cycle["again"] = cycle
    with pytest.raises(UntrustedError, match="deeper"):
        inspect_names(cycle, "it")
    with pytest.raises(UntrustedError, match="class_path must be a string"):
        inspect_names({"class_path": ["os.system"]}, "it")
    inspect_names({"a": torch.ones(2), 3: None}, "it")


# The registry.


def test_broken_plugin_warns_and_other_plugins_load(monkeypatch: pytest.MonkeyPatch, payload: Payload) -> None:
    (payload.marker.parent / "broken_plugin.py").write_text("raise RuntimeError('no such GPU')")
    points = [EntryPoint("broken", "broken_plugin", "g"), EntryPoint("good", "evil_payload", "g")]
    monkeypatch.setattr("recsys_topk.registry.entry_points", lambda group: points)
    table: Registry[Any] = Registry("loss", "recsys_topk.losses", "g")
    with pytest.warns(RuntimeWarning, match=r"'broken' \(broken_plugin.*no such GPU"):
        table.discover()
    assert payload.ran


def test_old_spellings_and_moved_classes_resolve() -> None:
    name = next(name for name in losses.available() if "_" in name or "-" in name)
    assert losses.resolve(name.replace("_", "-")) is losses.resolve(name)
    with reading():
        assert losses.resolve("recsys_topk.losses.where_it_was.DFTopKLoss") is DFTopKLoss
    assert suggest("dftpk", losses.available()) == "did you mean 'dftopk'? "


def test_names_for_the_parser_import_nothing() -> None:
    from recsys_topk.trust.allowed import names_for_parser

    code = """
import sys
import recsys_topk
from recsys_topk.trust.allowed import names_for_parser
before = set(sys.modules)
names = names_for_parser()
assert "recsys_topk.losses" in names
assert not [name for name in set(sys.modules) - before if name.startswith("recsys_topk")]
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert "recsys_topk.CascadeRecommender" not in names_for_parser()
