"""Results as JSON lines: one is whole or not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a file; none where there is no file."""
    if not path.is_file():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def append(path: Path, line: dict[str, Any]) -> None:
    """Add a line, after what an interrupted writer left of one is cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        file.seek(0)
        found = file.read()
        if not found.endswith(b"\n"):
            file.truncate(found.rfind(b"\n") + 1)
        file.write(json.dumps(line).encode() + b"\n")
