"""Errors of jsonargparse as one line for the person who typed the option."""

from __future__ import annotations

import re


def plain_error(message: str) -> str:
    """Return what is wrong with which option, without the parser's types, unions and namespaces.

    Example:
        >>> plain_error("Parser key 'x': Expected a <class 'float'>. Got value: fast".replace("'x'", '"model.lr"'))
        '--model.lr: expected float, got fast'
    """
    text = " ".join(message.split())
    keys = re.findall(r'Parser key "([\w.+-]+)"', text)
    option = re.sub(r"^model\.(loss|objective)\b", r"\1", ".".join(keys))
    union = re.search(r"Union subtypes.*?Errors: (.*?) Given value type: .*? Given value: (.*)$", text)
    items, given = ([text], "") if union is None else (f" {union[1]}".split(" - "), union[2])
    items = [re.sub(r"Problem with given class_path '[^']*': |Parser key \"[^\"]*\": ", "", item) for item in items]
    items = [item.strip() for item in items if item.strip() and "NoneType" not in item]
    told = [item for item in items if not item.startswith("Expected a ") or "Got value" in item]
    if told or not items:
        text = re.sub(r"\.? Got value: ", ", got ", told[0] if told else text)
    else:
        text = f"{' or '.join(items).replace(' or Expected a ', ' or ')}, got {given}"
    text = re.sub(r"<class '(?:[\w.]+\.)?(\w+)'>", r"\1", text).replace("Expected a ", "expected ", 1)
    text = re.sub(r"(?:typing\.)?Literal\[([^],]*)\]", r"\1", text)
    text = re.sub(r"(?:typing\.)?Literal\[(.*?)\]", r"one of \1", text)
    return f"--{option}: {text}" if option else text
