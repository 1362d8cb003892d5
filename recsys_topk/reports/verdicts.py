"""Sentences computed from the numbers: the rank of a method here and in the paper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Curves = Mapping[str, Mapping[float, float]]


def ordinal(number: int) -> str:
    """Return 1st, 2nd, 3rd, ...

    Example:
        >>> [ordinal(n) for n in (1, 2, 3, 4, 11, 21)]
        ['1st', '2nd', '3rd', '4th', '11th', '21st']
    """
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def short(value: float) -> str:
    """Return a number with three significant digits, without an exponent.

    Example:
        >>> short(1.0666), short(9612.3)
        ('1.07', '9,610')
    """
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{rounded:g}"


def place(values: Mapping[str, float], name: str, smallest_first: bool = False) -> int:
    """Return the rank of a name by value; equal values share the better rank.

    Example:
        >>> place({"a": 0.5, "b": 0.7, "c": 0.5}, "c")
        2
    """
    mine = values[name]
    return 1 + sum((value < mine) if smallest_first else (value > mine) for value in values.values())


def kendall(one: Mapping[Any, float], two: Mapping[Any, float]) -> float | None:
    """Return Kendall's tau of two orders over the common names; None if there are fewer than two.

    Example:
        >>> kendall({"a": 1.0, "b": 2.0, "c": 3.0}, {"a": 1.0, "b": 3.0, "c": 2.0})
        0.3333333333333333
    """
    names = [name for name in one if name in two]
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    if not pairs:
        return None
    signs = [(one[a] - one[b]) * (two[a] - two[b]) for a, b in pairs]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(pairs)


def _agreement(one: Mapping[Any, float], two: Mapping[Any, float]) -> str:
    tau = kendall(one, two)
    return "" if tau is None else f" (Kendall's tau of the two orders {tau:+.2f})"


def verdict(
    here: Mapping[str, float], paper: Mapping[str, float], subject: str, what: str, smallest_first: bool = False
) -> list[str]:
    """Return sentences about the rank of a subject by a value (`what`), here and in the paper.

    Example:
        >>> verdict({"a": 0.5, "b": 0.7, "c": 0.1}, {"a": 0.9, "b": 0.8}, "a", "recall")[0]
        'a ranks 2nd of 3 by recall here (0.5); the best is b with 0.7.'
    """
    if subject not in here:
        return [f"{subject} was not run here, so its rank is unknown."]
    text = f"{subject} ranks {ordinal(place(here, subject, smallest_first))} of {len(here)} by {what} here"
    best = (min if smallest_first else max)(here, key=lambda name: here[name])
    others = "" if best == subject else f"; the best is {best} with {short(here[best])}"
    sentences = [f"{text} ({short(here[subject])}){others}."]
    shared = {name: value for name, value in here.items() if name in paper}
    if subject in shared and len(shared) > 1:
        ranks = [
            ordinal(place({name: values[name] for name in shared}, subject, smallest_first)) for values in (here, paper)
        ]
        sentences.append(
            f"Among the {len(shared)} methods that the paper also reports, {subject} ranks {ranks[0]} here and "
            f"{ranks[1]} in the paper{_agreement(shared, paper)}."
        )
    return sentences


def curve_verdict(ours: Curves, paper: Curves, subject: str, what: str) -> list[str]:
    """Return sentences about the largest value of a curve over x (`what`), or about the methods at the largest x."""
    if len(ours) == 1:
        ((name, line),) = ours.items()
        theirs = paper.get(name, {})
        best, their_best = (max(values, key=lambda x: values[x], default=None) for values in (line, theirs))
        text = f"{name} is best at {what} {best:g} here ({short(line[best])})" if best is not None else ""
        if their_best is None:
            return [f"{text}."]
        return [f"{text} and at {their_best:g} in the paper{_agreement(line, theirs)}."]
    low, high = (edge(x for line in ours.values() for x in line) for edge in (min, max))
    lines = {f"{subject} changes by {{:+.3f}} here": ours, "by {:+.3f} in the paper": paper}
    gains = [
        text.format(curves[subject][high] - curves[subject][low])
        for text, curves in lines.items()
        if {low, high} <= set(curves.get(subject, ()))
    ]
    here, there = ({name: line[high] for name, line in curves.items() if high in line} for curves in (ours, paper))
    found = verdict(here, there, subject, f"joint recall at {high:g} {what}")
    return [*found, f"From {low:g} to {high:g} {what}, {' and '.join(gains)}."] if gains else found
