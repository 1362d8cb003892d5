"""Every command in README and docs is run here, or parsed with a reason why it is not run."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from functools import lru_cache
from pathlib import Path

import pytest

from recsys_topk.cli.arguments import parse_options
from recsys_topk.cli.corpus_options import take_corpus_options
from recsys_topk.cli.main import COMMANDS, main
from recsys_topk.evaluation.baselines import make_baselines
from recsys_topk.runs import TrainingRun

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
TRAINING = ("fit", "validate", "test", "predict")
TAKE_FIT_OPTIONS = ("demo", "compare", "tune", "stream", "online", "experiment", "sweep", "prepare", "plan")
OTHER_PROGRAMS = ("make", "pip", "wandb", "torchrun", "python", "ln", ".")

# Commands that are run here, in this process: they are fast and need no files.
RUN = r"(losses|sweep|dashboard|experiment list|fit --help|fit --help_all|fit --loss\.help|--help)\b(?!.*path/to)"
# Why a command is only parsed: the first pattern that matches. The reason names tests that run it on a small world.
REASONS = {
    r".*--trainer\.accelerator gpu": "needs a GPU",
    r"(init|completion)\b": "run in tests/cli/test_init_completion.py",
    r"doctor": "run in tests/cli/test_doctor.py",
    r".*clicks\.csv|(test|predict) --ckpt_path runs/first": "run in tests/datamodules/test_own_data_page.py",
    r"(online|rollback|simulate --out log|recommend --export current|quotas .*runs/online)": "run in "
    "tests/experiments/test_online_page.py",
    r"(quotas|similar)\b": "run in tests/evaluation/test_quotas.py",
    r"(export|index|recommend|serve)\b": "run in tests/serving/conftest.py, on a small world",
    r".*(path/to/|/data/recflow|log\.parquet)": "needs the reader's data",
    r".*(runs/|theirs\.ckpt|--resume|--ckpt_path|mine\.yaml|\w+\.json|report )": "needs what another command wrote",
    r"plan\b": "run in tests/distributed/test_plan.py; the largest plan takes 16 s",
    r"(bench|fuzz|simulate|demo)\b": "measures or simulates at full size, for minutes; tests/bench runs small ones",
    r"(fit|compare|tune|stream|experiment)\b": "trains for minutes to hours; tests/runs and tests/experiments: small",
    r"(prepare|schema|predict|test|report|simulate)\b": "the name of a command in a sentence",
}


def lines_of(name: str) -> list[str]:
    """Return the lines of a page that may be commands: in blocks, indented, or code within a sentence."""
    text = re.sub(r"\\\n\s*", " ", (ROOT / name).read_text())
    text = re.sub(r"```(python|yaml|json|\{toctree\})\n.*?```", "", text, flags=re.DOTALL)
    fenced = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    lines = [line.strip() for block in fenced for line in block.splitlines()]
    lines += [line.strip() for line in text.splitlines() if line.startswith("    ")]
    lines += [" ".join(code.split()) for code in re.findall(r"`(recsys-topk [^`]+|python examples[^`]+)`", text)]
    return [re.sub(r"^[A-Z_]+=\S+ ", "", part) for line in lines for part in line.split(" && ")]


def commands_of(name: str) -> list[list[str]]:
    """Return the commands of the package on a page, as words; `recsys-topk fit: ...` is an error message."""
    found = [line for line in lines_of(name) if re.match(r"recsys-topk [\w-]+(\s|$)", line)]
    return [shlex.split(re.sub(r"\[(--[^]]*)\]", r"\1", line), comments=True)[1:] for line in found]


@lru_cache
def help_of(command: str, *suite: str) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        main([command, *suite, "--help"])
    return output.getvalue()


@lru_cache
def parse_as_fit(*arguments: str) -> None:
    """Parse options as `recsys-topk fit` does, without options that name files of the reader."""
    help_options = [text for text in arguments if text.endswith(("help", "help_all"))]
    if help_options or not arguments:
        return
    unfinished = arguments[-1].startswith("--") and arguments[-1] != "--corpus"
    config = parse_options([*arguments, "..."] if unfinished else arguments)
    corpus = take_corpus_options("test", config) or {}
    make_baselines(corpus.get("baselines", {}))
    for name in ("ckpt_path", "resume"):
        config.pop(name, None)
    if not config:
        return
    config["config"] = [given for given in config.pop("config", []) if not given.endswith(".yaml")]
    TrainingRun(config).options()


def parse(command: str, rest: list[str]) -> None:
    if command in TRAINING:
        parse_as_fit(*rest)
        return
    text = help_of(command, *(rest[:1] if command == "bench" else []))
    options = [word.partition("=")[0] for word in rest if word.startswith("--")]
    unknown = [option for option in options if not re.search(rf"{re.escape(option)}\b", text)]
    if command in TAKE_FIT_OPTIONS:
        chosen = [*unknown, "--data", "--config"]
        ends = {at: at + 1 + ("=" not in word) for at, word in enumerate(rest) if word.partition("=")[0] in chosen}
        parse_as_fit(*(word for at, end in ends.items() for word in rest[at:end]))
    else:
        assert unknown == [], (command, unknown)


@pytest.mark.parametrize("name", PAGES)
def test_commands_run_or_parse_with_a_reason(
    name: str, tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in ("HOME", "RECSYS_TOPK_CACHE"):
        monkeypatch.setenv(variable, environment[variable])
    for words in commands_of(name):
        line = shlex.join(words)
        if re.match(RUN, line):
            with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as output:
                assert main(words) == 0, line
            assert output.getvalue(), line
            continue
        command, *rest = words
        assert command in COMMANDS, line
        parse(command, rest)
        assert any(re.match(pattern, line) for pattern in REASONS), (
            f"add to REASONS why this command is not run: {line}"
        )


def test_files_named_in_reasons_exist() -> None:
    named = {path for reason in REASONS.values() for path in re.findall(r"tests/[\w/.]*\w", reason)}
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", PAGES)
def test_commands_of_other_programs_name_existing_targets_and_files(name: str) -> None:
    """Not run: they install packages, use W&B's server or several machines. Other tests run the examples."""
    for line in lines_of(name):
        program, *rest = shlex.split(line, comments=True) if line.split(" ")[0] in OTHER_PROGRAMS else [""]
        if program == "make":
            targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert set(rest) <= set(targets), line
        elif program == "pip":
            assert rest[0] == "install", line
            files = [word for word in rest if word.startswith("requirements/")]
            assert all((ROOT / file).is_file() for file in files), line
            extras = {extra for word in rest for part in re.findall(r"\[([\w,]+)\]", word) for extra in part.split(",")}
            offered = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
            assert all(re.search(rf"^{extra} = ", offered, re.MULTILINE) for extra in extras), line
        elif program == "wandb":
            from wandb.cli.cli import cli

            assert rest[0] in cli.commands, line
        elif program == "torchrun":
            at = rest.index("recsys_topk") + 1
            parse(rest[at], [word for word in rest[at + 1 :] if word != "..."])
        elif program == "python":
            assert (ROOT / rest[0]).is_file(), line
            run = "".join(path.read_text() for path in (ROOT / "tests" / "examples").glob("test_*.py"))
            assert f'"{Path(rest[0]).name}"' in run or "path/to/" in line, line


def test_commands_are_found() -> None:
    """The parser finds enough commands on the main pages."""
    found = {name: len(commands_of(name)) for name in PAGES}
    assert found["README.md"] > 15
    assert found["docs/tutorial.md"] > 8
    assert found["docs/wandb.md"] > 12
    assert ["fit", "--resume", "last"] in commands_of("docs/training.md")
    assert any(line.startswith("torchrun") for line in lines_of("docs/scale.md"))


def test_pages_for_newcomers_write_to_different_places() -> None:
    """Read in order, in one folder: no command finds the run or the export of an earlier page."""
    pages = [f"docs/{name}.md" for name in ("tutorial", "own-data", "cascade-for-your-log", "serving")]
    written = [
        (name, place)
        for page in pages
        for name, place in re.findall(r"^recsys-topk \w+ .*--(name|out) (\S+)", (ROOT / page).read_text(), re.MULTILINE)
        if not re.search(r"path/to|^s\d", place)
    ]
    assert ("name", "tutorial") in written
    assert ("out", "export-clicks") in written
    assert len(set(written)) == len(written), sorted(written)
