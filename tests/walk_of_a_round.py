"""Count the files that one round walks through: `python -m tests.walk_of_a_round`.

A federation of two clients runs two rounds in this process. Each file of ours is listed with its lines if one of its
functions ran between the strategy asking for a round and the new global model.
"""

import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from fedpriv.config import parse
from server.observer import LogObserver
from server.strategy import RuleStrategy
from simulations.engines import federation
from simulations.tiny_bert import make_tiny_bert
from tests.tiny import LABELS, WORDS

ROOT = Path(__file__).resolve().parents[1]
OURS = tuple(str(ROOT / package) + "/" for package in ("fedpriv", "clients", "server", "simulations"))


@contextmanager
def walked() -> Iterator[set[str]]:
    """The files of ours whose functions run during a round, in any thread, while the block runs."""
    files: set[str] = set()
    asked, made = RuleStrategy.configure_train, RuleStrategy._close_round

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name != "<module>" and frame.f_code.co_filename.startswith(OURS):
            files.add(frame.f_code.co_filename)

    def profile(function: Callable[..., Any] | None) -> None:
        threading.setprofile(function)  # type: ignore[arg-type]
        sys.setprofile(function)

    def ask(*arguments: Any) -> Any:
        profile(note)
        return asked(*arguments)

    def make(*arguments: Any) -> Any:
        try:
            return made(*arguments)
        finally:
            profile(None)

    RuleStrategy.configure_train, RuleStrategy._close_round = ask, make  # type: ignore[method-assign]
    try:
        yield files
    finally:
        RuleStrategy.configure_train, RuleStrategy._close_round = asked, made  # type: ignore[method-assign]
        profile(None)


def main() -> None:
    """Print each file with its lines, and how many they are together."""
    with tempfile.TemporaryDirectory() as folder, walked() as files:
        table = Path(folder) / "records.csv"
        rows = [
            f"{WORDS[i % len(WORDS)]} {WORDS[i * 7 % len(WORDS)]},{LABELS[i % len(LABELS)]},{i % 2}" for i in range(60)
        ]
        table.write_text("\n".join(["text,label,site", *rows, ""]))
        model = make_tiny_bert(Path(folder) / "tiny-bert", [*WORDS, *LABELS])
        values = {
            **{"model": str(model), "data": str(table), "client_column": "site", "layers": "last-1", "rank": 4},
            **{"rounds": 2, "local_steps": 2, "batch_size": 8, "noise_multiplier": 1.0},
            **{"simulate": True, "comparison": False, "out": str(Path(folder) / "run")},
        }
        federation.run(parse(values), LogObserver())
    lines = {str(Path(file).relative_to(ROOT)): len(Path(file).read_text().splitlines()) for file in files}
    for file, number in sorted(lines.items()):
        print(f"{number:5} {file}")
    print(f"{len(lines)} files, {sum(lines.values())} lines")


if __name__ == "__main__":
    main()
