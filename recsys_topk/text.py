"""Tables, sizes and untrusted strings as text."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping, Sequence

NARROWEST = 24  # characters of a column that is wrapped


def table(rows: Sequence[Mapping[str, object]], columns: Sequence[str] | None = None, width: int | None = None) -> str:
    """Return rows as aligned text; numbers to the right, missing cells as a dash.

    A table wider than `width` has its widest column wrapped; if that does not suffice, its last columns follow in a
    second table. The default is the width of the terminal; without a terminal there is no limit.

    Example:
        >>> print(table([{"loss": "dftopk", "recall": 0.51234}, {"loss": "listnet", "recall": 0.5}]))
        loss     recall
        -------  ------
        dftopk   0.5123
        listnet  0.5000
    """
    if not rows:
        return "(nothing)"
    names = list(columns) if columns is not None else list(dict.fromkeys(key for row in rows for key in row))
    cells = [[cell(row.get(name)) for name in names] for row in rows]
    numeric = [all(isinstance(row.get(name), (int, float, type(None))) for row in rows) for name in names]
    widths = [max(len(name), *(len(line[i]) for line in cells)) for i, name in enumerate(names)]
    width = shutil.get_terminal_size((0, 0)).columns if width is None else width
    over = sum(widths) + 2 * len(widths) - 2 - width if width else 0
    widest = widths.index(max(widths))
    if over > 0 and widths[widest] - over >= max(NARROWEST, len(names[widest])):
        widths[widest] -= over
    elif over > 0 and len(names) > 2:
        ends = [sum(widths[: i + 1]) + 2 * i for i in range(len(names))]
        cut = max(2, sum(end <= width for end in ends))
        cut -= cut == len(names)
        return table(rows, names[:cut], width) + "\n\n" + table(rows, [names[0], *names[cut:]], width)

    def align(line: Sequence[str]) -> str:
        padded = (c.rjust(w) if right else c.ljust(w) for c, w, right in zip(line, widths, numeric, strict=True))
        return "  ".join(padded).rstrip()

    def wrapped(line: list[str]) -> list[str]:
        parts = textwrap.wrap(line[widest], widths[widest]) or [""]
        blank = [""] * len(line)
        lines = [line, *(blank for _ in parts[1:])]
        return [align([*one[:widest], part, *one[widest + 1 :]]) for one, part in zip(lines, parts, strict=True)]

    return "\n".join(
        [align(names), align(["-" * w for w in widths]), *(text for line in cells for text in wrapped(line))]
    )


def cell(value: object) -> str:
    """Return a value as text: numbers with four digits after the point, None as a dash."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 1000 else f"{value:.3g}"
    return str(value)


def size_text(size: float) -> str:
    """Return a number of bytes with a unit in which it is at least 1.

    Example:
        >>> size_text(312), size_text(2048), size_text(7.4 * 2**20)
        ('312 B', '2.0 KB', '7.4 MB')
    """
    units = ["B", "KB", "MB", "GB", "TB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "B" or size >= 100 else f"{size:.1f} {units[0]}"


def printable(text: str, lines: bool = False) -> str:
    r"""Return text from a file with control characters escaped, so that it is safe to print on a terminal.

    With `lines`, line ends and tabs remain.

    Example:
        >>> printable("a" + chr(27) + "[2J")
        'a\\x1b[2J'
    """
    kept = "\n\t" if lines else ""
    return "".join(char if char.isprintable() or char in kept else repr(char)[1:-1] for char in text)
