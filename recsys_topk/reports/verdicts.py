"""Sentences computed from the numbers: where a competitor stands here, and where the paper has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """Return a number with three digits that matter, and never as a power of ten.

    Example:
        >>> short(1.0666), short(9612.3)
        ('1.07', '9,610')
    """
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{rounded:g}"


def place(values: Mapping[str, float], name: str, smallest_first: bool = False) -> int:
    """Return the place of a name when values are put in order; equal values share the better place.

    Example:
        >>> place({"a": 0.5, "b": 0.7, "c": 0.5}, "c")
        2
    """
    mine = values[name]
    return 1 + sum((value < mine) if smallest_first else (value > mine) for value in values.values())


def standing(values: Mapping[str, float], name: str, smallest_first: bool = False) -> str:
    """Return the place of a name among values, as text.

    Example:
        >>> standing({"a": 0.5, "b": 0.7}, "a")
        '2nd of 2'
    """
    return f"{ordinal(place(values, name, smallest_first))} of {len(values)}"


def best_first(values: Mapping[Any, float]) -> list[Any]:
    """Return the names from the largest value to the smallest."""
    return sorted(values, key=lambda name: -values[name])


def kendall(one: Mapping[Any, float], two: Mapping[Any, float]) -> float | None:
    """Return Kendall's tau of two orders over the names that both have; None with fewer than two.

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


def table_verdict(
    rows: Sequence[Mapping[str, Any]],
    subject: str,
    paper: Mapping[str, float],
    faulty: Sequence[str] = (),
) -> list[str]:
    """Say where the subject of a table stands, here and in the paper, and whether the orders agree.

    Args:
        rows: ``run``, ``joint``, and where known ``+-`` and ``p`` (of a paired test against the first row).
        subject: The run that the question is about.
        paper: The paper's joint recall, by run.
        faulty: Runs of the paper that came from faulty code.
    """
    ours = {str(row["run"]): row["joint"] for row in rows}
    if subject not in ours:
        return [f"{subject} has not been run here, so nothing can be said of its place."]
    by_name = {str(row["run"]): row for row in rows}
    spread = by_name[subject].get("+-")
    shown = f"{ours[subject]:.3f}" + ("" if spread is None else f" ± {spread:.3f}")
    text = f"Here {subject} is {standing(ours, subject)} by joint recall ({shown})"
    shared = {name: value for name, value in ours.items() if name in paper}
    theirs = {name: paper[name] for name in shared}
    said = [f"{text}."]
    if subject in theirs and len(shared) > 1:
        said.append(
            f"Among the {len(shared)} methods that the paper also reports, {subject} ranks "
            f"{ordinal(place(shared, subject))} here and {ordinal(place(theirs, subject))} in the paper."
        )
    best = best_first(ours)[0]
    if best != subject:
        p = by_name[best].get("p") if next(iter(by_name)) == subject else None
        text = f"Best here is {best} with {ours[best]:.3f}, {ours[best] - ours[subject]:.3f} above {subject}"
        said.append(f"{text}." if p is None else f"{text} (p = {p:.3f}).")
    relatives = [name for name in ours if name.startswith(f"{subject} ")]
    said += [f"{name} is {standing(ours, name)} ({ours[name]:.3f})." for name in relatives]
    sound = {name: value for name, value in shared.items() if name not in faulty}
    agreement = kendall(sound, theirs)
    if agreement is not None and len(sound) > 2:
        without = " without the rows of faulty code" if len(sound) < len(shared) else ""
        orders = [" > ".join(best_first({name: values[name] for name in sound})) for values in (ours, theirs)]
        said.append(f"Order here{without}: {orders[0]}; in the paper: {orders[1]} (Kendall's tau {agreement:+.2f}).")
    return said


def peak_verdict(curve: Mapping[float, float], paper: Mapping[float, float], subject: str, what: str) -> list[str]:
    """Say where a curve peaks, here and in the paper, and how much is lost elsewhere.

    Args:
        curve: Joint recall by x, here.
        paper: The same in the paper; may be empty.
        subject: The competitor.
        what: Name of x.
    """
    ranked = best_first(curve)
    here, low = ranked[0], ranked[-1]
    text = f"Here {subject} is best at {what} {here:g} ({curve[here]:.3f}) and worst at {low:g} ({curve[low]:.3f})"
    if not paper:
        return [f"{text}."]
    there, *_, worst = best_first(paper)
    said = [f"{text}; in the paper best at {there:g} ({paper[there]:.3f}) and worst at {worst:g} ({paper[worst]:.3f})."]
    if there in curve and there != here:
        loss = curve[here] - curve[there]
        said.append(f"The paper's best {what}, {there:g}, gives {curve[there]:.3f} here, {loss:.3f} less.")
    agreement = kendall(curve, paper)
    if agreement is not None:
        said.append(f"Kendall's tau between the two orders of {what} is {agreement:+.2f}.")
    return said


def growth_verdict(ours: Curves, paper: Curves, subject: str, what: str) -> list[str]:
    """Say who gains from the smallest to the largest x, here and in the paper, and who is first at the largest.

    Args:
        ours: Joint recall by competitor and x.
        paper: The same in the paper.
        subject: The competitor that the question is about.
        what: Name of x.
    """
    low, high = (edge(x for curve in ours.values() for x in curve) for edge in (min, max))
    ends = {low, high}
    gains = {name: line[high] - line[low] for name, line in ours.items() if ends <= set(line)}
    theirs = {name: paper[name][high] - paper[name][low] for name in gains if ends <= set(paper.get(name, {}))}
    if low == high or not gains:
        return [f"There is no competitor here with two values of {what}, so nothing can be said of a gain."]
    up, up_there = (sum(gain > 0 for gain in found.values()) for found in (gains, theirs))
    text = f"From {low:g} to {high:g} {what}, joint recall rises for {up} of {len(gains)} methods here"
    said = [f"{text} and for {up_there} of {len(theirs)} in the paper." if theirs else f"{text}."]
    if subject in gains:
        text = f"{subject} changes by {gains[subject]:+.3f} here"
        said.append(f"{text} and by {theirs[subject]:+.3f} in the paper." if subject in theirs else f"{text}.")
    if len(gains) > 1:
        largest, *_, smallest = best_first(gains)
        said.append(f"Largest change: {largest} {gains[largest]:+.3f}; smallest: {smallest} {gains[smallest]:+.3f}.")
    if len(gains) > 1 and subject in gains:
        at_high = {name: ours[name][high] for name in gains}
        text = f"At {high:g}, {subject} is {standing(at_high, subject)} here"
        if subject in theirs:
            among = ordinal(place({name: at_high[name] for name in theirs}, subject))
            text += f"; among the {len(theirs)} methods that the paper also reports it is {among} here and "
            text += f"{ordinal(place({name: paper[name][high] for name in theirs}, subject))} in the paper"
        said.append(f"{text}.")
    return said


def runtime_verdict(here: Mapping[str, Curves], paper: Mapping[str, Curves], subject: str) -> list[str]:
    """Say how fast the subject is at the longest list, and how many times as long the others take.

    Args:
        here: Milliseconds by competitor and length, by what was timed.
        paper: The same in the paper, for what it timed too.
        subject: The competitor that the question is about.
    """
    said = []
    for what, curves in here.items():
        if subject not in curves:
            continue
        longest = max(curves[subject])
        times = {name: curve[longest] for name, curve in curves.items() if longest in curve}
        theirs = {n: curve[longest] for n, curve in paper.get(what, {}).items() if longest in curve and n in times}
        text = f"{what}, N = {longest:g}: {subject} takes {short(times[subject])} ms and is "
        text += f"{standing(times, subject, smallest_first=True)} here"
        if subject in theirs:
            text += f"; in the paper {short(theirs[subject])} ms and {standing(theirs, subject, smallest_first=True)}"
        said.append(f"{text}.")
        beside = {n: f" ({short(theirs[n] / theirs[subject])})" for n in theirs if subject in theirs}
        others = [name for name in reversed(best_first(times)) if name != subject]
        shown = [f"{name} {short(times[name] / times[subject])}{beside.get(name, '')}" for name in others]
        if shown:
            ratios = ", ".join(shown)
            said.append(
                f"Time of the others divided by that of {subject}{' (in the paper)' if beside else ''}: {ratios}."
            )
    return said


def stream_verdict(curves: Mapping[str, Mapping[str, float]], subject: str) -> list[str]:
    """Say where the subject stands on average over the days, and on how many it is ahead.

    Args:
        curves: Joint recall by competitor and day.
        subject: The competitor that the question is about.
    """
    days = sorted(set.intersection(*(set(curve) for curve in curves.values()))) if curves else []
    if subject not in curves or not days:
        return [f"There is no day that {subject} and all others were tested on."]
    means = {name: sum(curve[day] for day in days) / len(days) for name, curve in curves.items()}
    by_day = {day: {name: curve[day] for name, curve in curves.items()} for day in days}
    leads = {name: sum(place(values, name) == 1 for values in by_day.values()) for name in curves}
    best, (first, last) = best_first(means)[0], (days[0], days[-1])
    text = f"Over {len(days)} days {subject} is {standing(means, subject)} by mean joint recall ({means[subject]:.3f})"
    said = [f"{text}, and ahead on {leads[subject]}."]
    if best != subject:
        said.append(f"Best is {best} with {means[best]:.3f}, ahead on {leads[best]} of {len(days)} days.")
    text = (
        f"{subject} goes from {curves[subject][first]:.3f} on {first} to {curves[subject][last]:.3f} on {last}; it is "
    )
    text += f"{ordinal(place(by_day[first], subject))} on the first of these days and "
    return [*said, f"{text}{ordinal(place(by_day[last], subject))} on the last."]
