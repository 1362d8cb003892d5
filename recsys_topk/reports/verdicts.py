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


def order(values: Mapping[str, float], smallest_first: bool = False) -> str:
    """Return the names from best to worst, as text."""
    return " > ".join(sorted(values, key=lambda name: values[name] if smallest_first else -values[name]))


def kendall(one: Mapping[str, float], two: Mapping[str, float]) -> float | None:
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
    said = [f"Here {subject} is {ordinal(place(ours, subject))} of {len(ours)} by joint recall ({shown})"]
    shared = {name: value for name, value in ours.items() if name in paper}
    theirs = {name: paper[name] for name in shared}
    if subject in theirs and len(shared) > 1:
        said[0] += (
            f", and {ordinal(place(shared, subject))} of the {len(shared)} that the paper has too; the paper has it "
            f"{ordinal(place(theirs, subject))} of those"
        )
    said[0] += "."
    best = max(ours, key=lambda name: ours[name])
    if best != subject:
        text = f"Best here is {best} with {ours[best]:.3f}, {ours[best] - ours[subject]:.3f} above {subject}"
        p = by_name[best].get("p")
        tested = p is not None and next(iter(by_name)) == subject
        said.append(text + (f" (p = {p:.3f})." if tested else "."))
    relatives = {name: value for name, value in ours.items() if name != subject and name.startswith(f"{subject} ")}
    for name in relatives:
        said.append(f"{name} is {ordinal(place(ours, name))} of {len(ours)} ({ours[name]:.3f}).")
    sound = {name: value for name, value in shared.items() if name not in faulty}
    agreement = kendall(sound, theirs)
    if agreement is not None and len(sound) > 2:
        without = " without the rows of faulty code" if len(sound) < len(shared) else ""
        said.append(
            f"Order here{without}: {order(sound)}; in the paper: {order({name: theirs[name] for name in sound})} "
            f"(Kendall's tau {agreement:+.2f})."
        )
    return said


def peak_verdict(curve: Mapping[float, float], paper: Mapping[float, float], subject: str, what: str) -> list[str]:
    """Say where a curve peaks, here and in the paper, and how much is lost elsewhere.

    Args:
        curve: Joint recall by x, here.
        paper: The same in the paper; may be empty.
        subject: The competitor.
        what: Name of x.
    """
    here = max(curve, key=lambda x: curve[x])
    low = min(curve, key=lambda x: curve[x])
    text = f"Here {subject} is best at {what} {here:g} ({curve[here]:.3f}) and worst at {low:g} ({curve[low]:.3f})"
    if not paper:
        return [f"{text}."]
    there = max(paper, key=lambda x: paper[x])
    worst = min(paper, key=lambda x: paper[x])
    said = [f"{text}; in the paper best at {there:g} ({paper[there]:.3f}) and worst at {worst:g} ({paper[worst]:.3f})."]
    if there in curve and there != here:
        said.append(
            f"The paper's best {what}, {there:g}, gives {curve[there]:.3f} here, {curve[here] - curve[there]:.3f} less."
        )
    shared = {x: value for x, value in curve.items() if x in paper}
    agreement = kendall({str(x): v for x, v in shared.items()}, {str(x): paper[x] for x in shared})
    if agreement is not None:
        said.append(f"The two curves rank the values of {what} alike to a Kendall's tau of {agreement:+.2f}.")
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
    whole = {name: curve for name, curve in ours.items() if low in curve and high in curve}
    gains = {name: curve[high] - curve[low] for name, curve in whole.items()}
    if low == high or not gains:
        return [f"There is no competitor here with two values of {what}, so nothing can be said of a gain."]
    theirs = {name: c[high] - c[low] for name, c in paper.items() if name in gains and low in c and high in c}
    up = sum(gain > 0 for gain in gains.values())
    text = f"From {low:g} to {high:g} {what}, {up} of {len(gains)} gain here"
    text += f"; in the paper {sum(gain > 0 for gain in theirs.values())} of {len(theirs)}." if theirs else "."
    said = [text]
    if subject in gains:
        said.append(
            f"{subject} changes by {gains[subject]:+.3f} here"
            + (f" and by {theirs[subject]:+.3f} in the paper." if subject in theirs else ".")
        )
    largest, smallest = (edge(gains, key=lambda name: gains[name]) for edge in (max, min))
    if len(gains) > 1:
        said.append(f"Most: {largest} {gains[largest]:+.3f}; least: {smallest} {gains[smallest]:+.3f}.")
    at_high = {name: curve[high] for name, curve in whole.items()}
    if subject in at_high and len(at_high) > 1:
        text = f"At {high:g}, {subject} is {ordinal(place(at_high, subject))} of {len(at_high)} here"
        shared = {name: paper[name][high] for name in at_high if name in paper and high in paper[name]}
        if subject in shared:
            among = {name: at_high[name] for name in shared}
            text += (
                f" ({ordinal(place(among, subject))} of the {len(shared)} shared), in the paper "
                f"{ordinal(place(shared, subject))} of {len(shared)}"
            )
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
        text = (
            f"{what}, N = {longest:g}: {subject} takes {short(times[subject])} ms and is "
            f"{ordinal(place(times, subject, smallest_first=True))} of {len(times)} here"
        )
        if subject in theirs:
            text += (
                f"; in the paper {short(theirs[subject])} ms and "
                f"{ordinal(place(theirs, subject, smallest_first=True))} of {len(theirs)}"
            )
        said.append(f"{text}.")
        ratios = {name: times[name] / times[subject] for name in times if name != subject}
        shown = []
        for name, ratio in sorted(ratios.items(), key=lambda pair: pair[1]):
            beside = f" ({short(theirs[name] / theirs[subject])})" if name in theirs and subject in theirs else ""
            shown.append(f"{name} {short(ratio)}{beside}")
        if shown:
            brackets = " (in the paper)" if subject in theirs else ""
            said.append(f"Times as long as {subject}{brackets}: {', '.join(shown)}.")
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
    ahead = sum(place(values, subject) == 1 for values in by_day.values())
    best = max(means, key=lambda name: means[name])
    said = [
        f"Over {len(days)} days {subject} is {ordinal(place(means, subject))} of {len(means)} by mean joint recall "
        f"({means[subject]:.3f}), and ahead on {ahead}."
    ]
    if best != subject:
        leads = sum(place(values, best) == 1 for values in by_day.values())
        said.append(f"Best is {best} with {means[best]:.3f}, ahead on {leads} of {len(days)} days.")
    first, last = days[0], days[-1]
    said.append(
        f"{subject} goes from {curves[subject][first]:.3f} on {first} to {curves[subject][last]:.3f} on {last}; it is "
        f"{ordinal(place(by_day[first], subject))} on the first of these days and "
        f"{ordinal(place(by_day[last], subject))} on the last."
    )
    return said
