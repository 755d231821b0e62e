"""Results as JSON lines, each written whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a file; none if the file is missing."""
    if not path.is_file():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def append(path: Path, line: dict[str, Any]) -> None:
    """Append a line, after removing the fragment that an interrupted writer may have left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        file.seek(0)
        content = file.read()
        if not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)
        file.write(json.dumps(line).encode() + b"\n")
