"""Two walks through the house, traced in real runs: `python -m tests.walks [round|gradient] [--files]`.

`round` goes from the strategy asking for a round to the new global model, `gradient` from a CSV's path to a client's
noised step. A file of ours counts with its lines if one of its functions ran on the way.
"""

import argparse
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from fedpriv.config import RunConfig, parse
from fedpriv.learning.training.local_update import UpdateSpec, UpdateTask
from fedpriv.learning.training.stacked import execute_one_by_one
from fedpriv.learning.training.workbench import Workbench
from fedpriv.privacy.mechanisms.sources import SeededSource
from server.observer import LogObserver
from server.strategy import RuleStrategy
from simulations.engines import federation
from simulations.tiny_bert import make_tiny_bert
from tests.tiny import LABELS, WORDS, write_table

ROOT = Path(__file__).resolve().parents[1]
OURS = tuple(str(ROOT / package) + "/" for package in ("fedpriv", "clients", "server", "simulations"))


@dataclass
class Walk:
    """What a way enters, in any thread, while it is open."""

    codes: set[CodeType] = field(default_factory=set)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Note what runs while the block does."""
        self._note_by(self._note)
        try:
            yield
        finally:
            self._note_by(None)

    def _note_by(self, profile: Callable[[FrameType, str, Any], None] | None) -> None:
        threading.setprofile(profile)
        sys.setprofile(profile)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name != "<module>" and code.co_filename.startswith(OURS):
            self.codes.add(code)

    def between(self, owner: Any, first: str, last: str) -> None:
        """Be open from each call of one function to the return of another."""
        begin, end = getattr(owner, first), getattr(owner, last)

        def begins(*arguments: Any) -> Any:
            self._note_by(self._note)
            return begin(*arguments)

        def ends(*arguments: Any) -> Any:
            try:
                return end(*arguments)
            finally:
                self._note_by(None)

        setattr(owner, first, begins)
        setattr(owner, last, ends)

    @property
    def files(self) -> dict[str, int]:
        """{file: its lines}."""
        names = sorted({code.co_filename for code in self.codes})
        return {str(Path(name).relative_to(ROOT)): len(Path(name).read_text().splitlines()) for name in names}

    @property
    def num_functions(self) -> int:
        """The number of distinct functions, those within functions and comprehensions left out."""
        return len({code for code in self.codes if "<" not in code.co_qualname})


def _config(folder: Path) -> RunConfig:
    table = write_table(folder / "records.csv", 60)
    model = make_tiny_bert(folder / "tiny-bert", [*WORDS, *LABELS])
    values = {
        **{"model": str(model), "data": str(table), "client_column": "site", "layers": "last-1", "rank": 4},
        **{"rounds": 2, "local_steps": 2, "batch_size": 8, "noise_multiplier": 1.0},
        **{"simulate": True, "comparison": False, "out": str(folder / "run")},
    }
    return parse(values)


def _round(walk: Walk, folder: Path) -> None:
    walk.between(RuleStrategy, "configure_train", "_close_round")
    federation.run(_config(folder), LogObserver())


def _gradient(walk: Walk, folder: Path) -> None:
    config = _config(folder)
    bench, spec = Workbench(config), UpdateSpec.of(config)
    del bench.__dict__["data"]  # the classes were read for the model, which is no part of the way
    with walk.open():
        records = bench.client(0)
        sampler = spec.sampler(records.num_units, SeededSource(1), SeededSource(2))
        task = UpdateTask(
            adapter=bench.initial, data=records, spec=spec, round=1, sampler=sampler, noise=SeededSource(3)
        )
        (update,) = execute_one_by_one(bench.model, [task])
    if isinstance(update, Exception):
        raise update


WALKS = {"round": _round, "gradient": _gradient}


def main() -> None:
    """Print how many files, lines and functions a walk enters."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("walk", choices=WALKS, help="which")
    parser.add_argument("--files", action="store_true", help="print each file with its lines")
    wanted = parser.parse_args()
    walk = Walk()
    with tempfile.TemporaryDirectory() as folder:
        WALKS[wanted.walk](walk, Path(folder))
    for file, lines in walk.files.items() if wanted.files else ():
        print(f"{lines:5} {file}")
    print(f"{wanted.walk}: {len(walk.files)} files, {sum(walk.files.values())} lines, {walk.num_functions} functions")


if __name__ == "__main__":
    main()
