"""Sentences computed from the numbers: the rank of a method here and in the paper."""

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


def standing(values: Mapping[str, float], name: str, smallest_first: bool = False) -> str:
    """Return the rank of a name by value, as text.

    Example:
        >>> standing({"a": 0.5, "b": 0.7}, "a")
        '2nd of 2'
    """
    return f"{ordinal(place(values, name, smallest_first))} of {len(values)}"


def best_first(values: Mapping[Any, float]) -> list[Any]:
    """Return the names by descending value."""
    return sorted(values, key=lambda name: -values[name])


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


def table_verdict(
    rows: Sequence[Mapping[str, Any]], subject: str, paper: Mapping[str, float], faulty: Sequence[str] = ()
) -> list[str]:
    """Return sentences about the rank of the subject of a table here and in the paper, and the agreement of the orders.

    Rows have ``run``, ``joint``, and if known ``+-`` and ``p`` (of a paired test against the first row). `faulty` has
    the runs of the paper from faulty code.
    """
    ours = {str(row["run"]): row["joint"] for row in rows}
    if subject not in ours:
        return [f"{subject} was not run here, so its rank is unknown."]
    by_name = {str(row["run"]): row for row in rows}
    spread = by_name[subject].get("+-")
    shown = f"{ours[subject]:.3f}" + ("" if spread is None else f" ± {spread:.3f}")
    text = f"{subject} ranks {standing(ours, subject)} by joint recall here ({shown})"
    shared = {name: value for name, value in ours.items() if name in paper}
    theirs = {name: paper[name] for name in shared}
    sentences = [f"{text}."]
    if subject in theirs and len(shared) > 1:
        sentences.append(
            f"Among the {len(shared)} methods that the paper also reports, {subject} ranks "
            f"{ordinal(place(shared, subject))} here and {ordinal(place(theirs, subject))} in the paper."
        )
    best = best_first(ours)[0]
    if best != subject:
        p = by_name[best].get("p") if next(iter(by_name)) == subject else None
        text = f"The best here is {best} with {ours[best]:.3f}, {ours[best] - ours[subject]:.3f} above {subject}"
        sentences.append(f"{text}." if p is None else f"{text} (p = {p:.3f}).")
    relatives = [name for name in ours if name.startswith(f"{subject} ")]
    sentences += [f"{name} ranks {standing(ours, name)} ({ours[name]:.3f})." for name in relatives]
    sound = {name: value for name, value in shared.items() if name not in faulty}
    agreement = kendall(sound, theirs)
    if agreement is not None and len(sound) > 2:
        without = " (without rows from faulty code)" if len(sound) < len(shared) else ""
        orders = [" > ".join(best_first({name: values[name] for name in sound})) for values in (ours, theirs)]
        sentences.append(
            f"Order here{without}: {orders[0]}; in the paper: {orders[1]} (Kendall's tau {agreement:+.2f})."
        )
    return sentences


def peak_verdict(curve: Mapping[float, float], paper: Mapping[float, float], subject: str, what: str) -> list[str]:
    """Return sentences about the peak of a curve over x (`what`) here and in the paper."""
    ranked = best_first(curve)
    here, low = ranked[0], ranked[-1]
    text = f"{subject} is best at {what} {here:g} here ({curve[here]:.3f}) and worst at {low:g} ({curve[low]:.3f})"
    if not paper:
        return [f"{text}."]
    there, *_, worst = best_first(paper)
    sentences = [
        f"{text}; in the paper best at {there:g} ({paper[there]:.3f}) and worst at {worst:g} ({paper[worst]:.3f})."
    ]
    if there in curve and there != here:
        loss = curve[here] - curve[there]
        sentences.append(f"The best {what} of the paper, {there:g}, gives {curve[there]:.3f} here, {loss:.3f} less.")
    agreement = kendall(curve, paper)
    if agreement is not None:
        sentences.append(f"Kendall's tau between the two orders of {what} is {agreement:+.2f}.")
    return sentences


def growth_verdict(ours: Curves, paper: Curves, subject: str, what: str) -> list[str]:
    """Return sentences about the gains from the smallest to the largest x (`what`), and the ranks at the largest x."""
    low, high = (edge(x for curve in ours.values() for x in curve) for edge in (min, max))
    ends = {low, high}
    gains = {name: line[high] - line[low] for name, line in ours.items() if ends <= set(line)}
    theirs = {name: paper[name][high] - paper[name][low] for name in gains if ends <= set(paper.get(name, {}))}
    if low == high or not gains:
        return [f"No method here has two values of {what}, so no gain can be computed."]
    up, up_there = (sum(gain > 0 for gain in one.values()) for one in (gains, theirs))
    text = f"From {low:g} to {high:g} {what}, joint recall rises for {up} of {len(gains)} methods here"
    sentences = [f"{text} and for {up_there} of {len(theirs)} in the paper." if theirs else f"{text}."]
    if subject in gains:
        text = f"{subject} changes by {gains[subject]:+.3f} here"
        sentences.append(f"{text} and by {theirs[subject]:+.3f} in the paper." if subject in theirs else f"{text}.")
    if len(gains) > 1:
        largest, *_, smallest = best_first(gains)
        sentences.append(
            f"Largest change: {largest} {gains[largest]:+.3f}; smallest: {smallest} {gains[smallest]:+.3f}."
        )
    if len(gains) > 1 and subject in gains:
        at_high = {name: ours[name][high] for name in gains}
        text = f"At {high:g}, {subject} ranks {standing(at_high, subject)} here"
        if subject in theirs:
            among = ordinal(place({name: at_high[name] for name in theirs}, subject))
            text += f"; among the {len(theirs)} methods that the paper also reports it ranks {among} here and "
            text += f"{ordinal(place({name: paper[name][high] for name in theirs}, subject))} in the paper"
        sentences.append(f"{text}.")
    return sentences


def runtime_verdict(here: Mapping[str, Curves], paper: Mapping[str, Curves], subject: str) -> list[str]:
    """Return sentences about the time of the subject for the longest list, and the time of the others relative to it.

    Both mappings have milliseconds by method and length, for each measurement.
    """
    sentences = []
    for what, curves in here.items():
        if subject not in curves:
            continue
        longest = max(curves[subject])
        times = {name: curve[longest] for name, curve in curves.items() if longest in curve}
        theirs = {n: curve[longest] for n, curve in paper.get(what, {}).items() if longest in curve and n in times}
        text = f"{what}, N = {longest:g}: {subject} takes {short(times[subject])} ms and ranks "
        text += f"{standing(times, subject, smallest_first=True)} here"
        if subject in theirs:
            text += f"; in the paper it takes {short(theirs[subject])} ms and ranks "
            text += standing(theirs, subject, smallest_first=True)
        sentences.append(f"{text}.")
        paper_ratios = {n: f" ({short(theirs[n] / theirs[subject])})" for n in theirs if subject in theirs}
        others = [name for name in reversed(best_first(times)) if name != subject]
        shown = [f"{name} {short(times[name] / times[subject])}{paper_ratios.get(name, '')}" for name in others]
        if shown:
            ratios = ", ".join(shown)
            sentences.append(
                f"Time of the other methods divided by the time of {subject}"
                f"{' (in the paper)' if paper_ratios else ''}: {ratios}."
            )
    return sentences


def stream_verdict(curves: Mapping[str, Mapping[str, float]], subject: str) -> list[str]:
    """Return sentences about the mean of the subject over the days, and the number of days on which it is first."""
    days = sorted(set.intersection(*(set(curve) for curve in curves.values()))) if curves else []
    if subject not in curves or not days:
        return [f"There is no day on which {subject} and all other methods were tested."]
    means = {name: sum(curve[day] for day in days) / len(days) for name, curve in curves.items()}
    by_day = {day: {name: curve[day] for name, curve in curves.items()} for day in days}
    leads = {name: sum(place(values, name) == 1 for values in by_day.values()) for name in curves}
    best, (first, last) = best_first(means)[0], (days[0], days[-1])
    text = (
        f"{subject} ranks {standing(means, subject)} by mean joint recall over {len(days)} days ({means[subject]:.3f})"
    )
    sentences = [f"{text}, and is first on {leads[subject]} of them."]
    if best != subject:
        sentences.append(f"The best is {best} with {means[best]:.3f}, first on {leads[best]} of {len(days)} days.")
    text = f"{subject} goes from {curves[subject][first]:.3f} on {first} to {curves[subject][last]:.3f} on {last}; it "
    text += f"ranks {ordinal(place(by_day[first], subject))} on the first of these days and "
    return [*sentences, f"{text}{ordinal(place(by_day[last], subject))} on the last day."]
