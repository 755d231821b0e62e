"""Tab completion of `python -m simulations`: keys, their values, engines and recipes.

Typer completes programs by name, and this one's is python's; so the shell's side is a function of our own, which asks
click's as soon as a line begins with `python -m simulations`, and otherwise leaves python to the shell's default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import typer

from fedpriv.config import KEYS, RECIPES, schema

VARIABLE = "_SIMULATIONS_COMPLETE"
"""The environment variable by which the shell asks."""

# The answers are lines of `type,value`. `=` ends a word in bash, so the line up to the cursor is split at blanks alone,
# and what is before a `=` is cut off the answers.
_SCRIPT = """\
_simulations_completion() {
    local line="${COMP_LINE:0:$COMP_POINT}" words cur reply
    COMPREPLY=()
    [[ "$line" =~ ^[^[:space:]]*python[0-9.]*[[:space:]]+-m[[:space:]]+simulations[[:space:]] ]] || return 0
    words="simulations ${line#"${BASH_REMATCH[0]}"}"
    cur="${line##*[[:space:]]}"
    while IFS= read -r reply; do
        [[ "$reply" == plain,* ]] && reply="${reply#plain,}" || continue  # files are the shell's
        [[ "$reply" == "$cur"* ]] || continue
        [[ "$reply" == *= ]] && compopt -o nospace 2>/dev/null
        [[ "$cur" == *=* ]] && reply="${reply#*=}"
        COMPREPLY+=("$reply")
    done < <(COMP_WORDS="$words" COMP_CWORD=$(($(wc -w <<<"$words") - $([ -n "$cur" ] && echo 1 || echo 0))) \
        VARIABLE=complete_bash "${line%%[[:space:]]*}" -m simulations 2>/dev/null)
}
complete -o default -F _simulations_completion python python3
""".replace("VARIABLE", VARIABLE)


def show(value: bool) -> None:
    """Print the shell's side of the completion, and end."""
    if value:
        typer.echo(_SCRIPT, nl=False)
        raise typer.Exit


def overrides(incomplete: str) -> list[str]:
    """`key=` of the keys that begin so; or after a `=` the key with each of its values, where those have names."""
    key, sign, _ = incomplete.partition("=")
    found = [f"{name}={value}" for name in KEYS if name == key for value in _names(name)] if sign else _keys()
    return [name for name in found if name.startswith(incomplete)]


def engines(incomplete: str) -> list[str]:
    """The engines that begin so, less Flower's own."""
    return [name for name in _names("engine") if name.startswith(incomplete) and name != "flower"]


def recipes(incomplete: str) -> list[str]:
    """The recipes that begin so."""
    return [name for name in RECIPES if name.startswith(incomplete)]


def _keys() -> list[str]:
    return [f"{key}=" for key in KEYS]


def _names(key: str) -> list[str]:
    """The values of a key that are names, or true and false."""
    return list(_allowed(schema()["properties"][key]))


def _allowed(form: Mapping[str, Any]) -> Iterator[str]:
    if form.get("type") == "boolean":
        yield from ("true", "false")
    yield from (str(value) for value in (*form.get("enum", ()), form.get("const", "")) if value != "")
    for inner in form.get("anyOf", ()):
        yield from _allowed(inner)
