"""Print a script that completes commands, options and names in bash, zsh or fish.

bash: `recsys-topk completion bash >> ~/.bashrc`; zsh: `recsys-topk completion zsh >> ~/.zshrc`; fish: `recsys-topk
completion fish > ~/.config/fish/completions/recsys-topk.fish`. Print it again after an update.
"""

from __future__ import annotations

import contextlib
import io
import re
from importlib import resources

from recsys_topk.cli.console import echo, make_parser

ZSH = "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n"


def main(argv: list[str]) -> int:
    """Print the script."""
    from recsys_topk.cli.main import COMMANDS

    parser = make_parser("completion", __doc__)
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="your shell")
    shell = parser.parse_args(argv).shell
    from recsys_topk.losses import available
    from recsys_topk.runs.config import packaged_configs

    script = resources.files("recsys_topk.cli").joinpath("completion.bash").read_text(encoding="utf-8").rstrip()
    values = {"loss": list(available()), "config": packaged_configs()}
    options = {command: options_of(command) for command in COMMANDS}
    if shell == "fish":
        echo("complete -c recsys-topk -n __fish_use_subcommand -f")
        for command, (_, about) in COMMANDS.items():
            echo(f"complete -c recsys-topk -n __fish_use_subcommand -a {command} -d '{about.replace(chr(39), '')}'")
            for option in options[command]:
                names = f" -x -a '{' '.join(values[option])}'" if option in values else ""
                echo(f"complete -c recsys-topk -n '__fish_seen_subcommand_from {command}' -l {option}{names}")
        return 0
    cases = [
        f'    {command}) words="{" ".join(f"--{name}" for name in names)}";;' for command, names in options.items()
    ]
    named = [f'    --{option}) words="{" ".join(names)}";;' for option, names in values.items()]
    filled = {"commands": " ".join(COMMANDS), "values": "\n".join(named), "options": "\n".join(cases)}
    echo((ZSH if shell == "zsh" else "") + script % filled)
    return 0


def options_of(command: str) -> list[str]:
    """Return the options in the help of a command, without the dashes."""
    from recsys_topk.cli.main import main as run

    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        if command != "completion":
            run([command, "--help"])
    return sorted(set(re.findall(r"(?<![\w-])--([a-z][\w.]*\w)", output.getvalue())))
