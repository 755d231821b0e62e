"""Texts for people and programs: names that data holders chose, sizes, risks, and JSON without NaN and infinities."""

import io
import json
import math
import re
import sys
from collections.abc import Mapping
from decimal import ROUND_CEILING, Decimal
from typing import Any

from fedpriv.errors import InputError

VERSION = "0.2.0"
"""The version of fedpriv, which files and messages name."""


def printable(text: object) -> str:
    """The text without control characters: names and reasons come from others, and must not control the terminal."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in str(text))


def escape_what_a_terminal_lacks() -> None:
    """Show what the encoding of standard output lacks, such as a name in Greek, as escapes instead of failing."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def visible(text: str) -> str:
    """The text, in quotes if a reader would miss a blank in it, or that it is empty."""
    return text if text and text.isprintable() and text == " ".join(text.split()) else repr(text)


def counted(number: int, noun: str) -> str:
    """The number with its noun, such as `1 line` and `1,200 lines`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def what_is_counted(unit: str | None) -> str:
    """The word for what N_k counts: `persons` where an epsilon is that of a person, else `records`."""
    return "persons" if unit == "person" else "records"


def of_whom(unit: str | None) -> str:
    """The words after an epsilon that is that of a person: ` of a person`; else none."""
    return " of a person" if unit == "person" else ""


def holder_label(client: int | str, name: str | None) -> str:
    """A data holder by its name with its partition id, such as `St. Anna (0)`; by its id alone if it has no name.

    The id stays, since another holder may have chosen the same name.
    """
    shown, plain = printable(name or ""), f"client {client}"
    return plain if shown in ("", plain, f"client-{client}") else f"{shown} ({client})"


_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_bytes(text: str) -> int:
    """Bytes of a size such as 80GB or 24GiB; InputError if the text is none."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS or float(match[1]) <= 0:
        raise InputError(f"memory = {text!r}: must be a size such as 80GB or 24GiB")
    return int(float(match[1]) * _UNITS[match[2]])


_CONSTANTS = {"NaN": None, "Infinity": "inf", "-Infinity": "-inf"}


def strict_json(value: Any, *, indent: int | None = None) -> str:
    """Standard JSON: an infinity is "inf" or "-inf", null stands for NaN; TypeError for what JSON cannot express."""
    text = json.dumps(value)
    if indent is None and "NaN" not in text and "Infinity" not in text:
        return text
    return json.dumps(json.loads(text, parse_constant=_CONSTANTS.__getitem__), indent=indent, allow_nan=False)


# Keys of what was spent, and neither of a limit nor of an estimate from below.
_COST = re.compile(r"(epsilon|mu)(?!\w*_(bound|lower))(_\w+)?")


def judged(value: Any) -> Any:
    """The value, in which each object with an infinite epsilon or mu also has `"is_private": False`.

    A word is above every number for jq, and compares with none in Python; a program that asks for a number finds this.
    """
    if isinstance(value, Mapping):
        costs = (each for key, each in value.items() if _COST.fullmatch(str(key)))
        verdict = {"is_private": False} if any(cost in (math.inf, "inf") for cost in costs) else {}
        return {key: judged(each) for key, each in value.items()} | verdict
    return list(map(judged, value)) if isinstance(value, (list, tuple)) else value


# What is outside, and what is found, by unit.
_FOUND: Mapping[str, tuple[str, str]] = {
    "record": ("outside records", "records"),
    "person": ("outsiders", "participants"),
    "client": ("outside clients", "clients"),
}


def risk_in_words(values: Mapping[str, Any], delta: float) -> list[str]:
    """The share found where 1 % is wrongly accused, and what delta means: sentences for people who read no curves.

    Args:
        values: with `tpr_at_fpr` and `unit`, as `fedpriv.privacy.accounting.risk.Risk.values` has them; the view, and
            `enforced_by`, if a rule bounds what a coordinator may choose.
        delta: beside it.
    """
    found, basis = values["tpr_at_fpr"]["0.01"], _basis(values)
    (outside, members), short = _FOUND[values["unit"]], f"{delta:g}".replace("e-0", "e-")
    if found >= 1:
        may_be = f"without one wrong accusation, it may be all of the {members}"
        return [f"Nothing bounds what an attacker finds{basis}: {may_be}."]
    return [
        f"An attacker who wrongly accuses 1 % of {outside} identifies at most {percent_up(found)} of the "
        f"{members}{basis}.",
        f"Delta, {short}, is the small probability that epsilon leaves out; the share identified includes it.",
    ]


def _basis(values: Mapping[str, Any]) -> str:
    """The view of a risk and the rule that bounds it, which one figure has in common with no other; empty if untold."""
    view, rule = values.get("view", values.get("privacy_view")), values.get("enforced_by")
    return f", on the {view} view, {f'under {rule}' if rule else 'for releases fixed in advance'}" if view else ""


def risk_in_short(values: Mapping[str, Any]) -> str:
    """The share found where 1 % is wrongly accused, in half a line."""
    found = values["tpr_at_fpr"]["0.01"]
    told = f"at most {percent_up(found)} of the {_FOUND[values['unit']][1]} found, where 1 % are wrongly accused"
    return f"{told}{_basis(values)}"


def risk_in_figures(values: Mapping[str, Any]) -> str:
    """The shares found, by those wrongly accused, the greatest advantage, and mu, in a line."""
    found = ", ".join(f"{percent_up(y)} at {100 * float(x):g} %" for x, y in values["tpr_at_fpr"].items())
    mu = values["mu"]
    told = "no mu" if mu in (None, math.inf) else f"mu {math.ceil(1000 * mu) / 1000:.3f}"
    return f"{found} wrongly accused; advantage {percent_up(values['advantage'])}; {told}"


def percent_up(share: float) -> str:
    """A share as a percentage with one decimal, rounded up: a bound must not be understated."""
    return f"{Decimal(repr(100 * float(share))).quantize(Decimal('0.1'), rounding=ROUND_CEILING)} %"
