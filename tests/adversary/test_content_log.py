"""What a node notes of its records' content never decides about an upload: one record would decide for all."""

import pytest

from fedpriv.errors import LedgerError
from fedpriv.holder.wire import frame
from fedpriv.privacy.ledger.entries import CHANGED
from fedpriv.privacy.ledger.ledger import Ledger
from tests.adversary.exchanges import N_K, ROWS
from tests.adversary.nodes import ask, make_node, register_data, restart, run_config, training, write_rows
from tests.adversary.stand_ins import StandIns, Sum, standing_in
from tests.adversary.test_over_time import evaluating
from tests.tiny import LABELS

# A second data set of one world equals the first one's records; in the other world it has one record more.
MORE = ("jane doe coughs", LABELS[0])


def distance(one: list[Sum], other: list[Sum], *, clip_norm: float) -> float:
    """By how much two nodes' sums differ, in units of C."""
    ((first,), (second,)) = one, other
    return float((first.values - second.values).norm()) / clip_norm


def second_sums(approved, start, folder, rows, *, kind=frame.TRAIN):
    """What the noise was about to be added to, for a second data set of these rows; the first one was of ROWS."""
    node = make_node(folder, ROWS, num_registered=N_K, models=approved)
    config = run_config(test_data="", evaluation_noise_multiplier=1.0, test_fraction=0.5)
    restart()
    assert ask(node, training(config, start)).code == 0
    write_rows(node.records, rows)
    register_data(node, N_K, note="other patients, says the operator")
    restart()
    question = training(config, start, round_=2) if kind == frame.TRAIN else evaluating(config, start)
    with standing_in(StandIns(watched=len(ROWS))) as seen:
        assert ask(node, question).code == 0
    return seen.sums


@pytest.mark.parametrize("kind", [frame.TRAIN, frame.EVALUATE])
def test_neighbours_of_which_one_equals_an_earlier_data_set_are_told_apart_by_one_record_alone(
    approved, starts, tmp_path, kind
):
    """Before, the world whose records were known dropped all of them."""
    one, other = (
        second_sums(approved, starts["tiny"], tmp_path / str(len(rows)), rows, kind=kind)
        for rows in (ROWS, [*ROWS, MORE])
    )
    assert distance(one, other, clip_norm=run_config().clip_norm if kind == frame.TRAIN else 1.0) <= 1 + 1e-9


@pytest.mark.parametrize("reason", ["the disk is full or fails", "cannot be written (read-only?)"])
def test_a_disk_that_cannot_take_the_note_loses_the_note_alone(approved, starts, tmp_path, monkeypatch, reason):
    """Content that changed needs a note, and content that did not needs none: that is one record's doing."""
    append = Ledger._append

    def full(self, lines):
        if any(line["phase"] == CHANGED for line in lines):
            raise LedgerError(f"{self.path}: {reason}; nothing is released")
        append(self, lines)

    sums = []
    for rows in (ROWS, [*ROWS, MORE]):
        node = make_node(tmp_path / str(len(rows)), ROWS, num_registered=N_K, models=approved)
        restart()
        assert ask(node, training(run_config(), starts["tiny"])).code == 0
        write_rows(node.records, rows)
        restart()
        with monkeypatch.context() as patch, standing_in(StandIns(watched=len(ROWS))) as drawn:
            patch.setattr(Ledger, "_append", full)
            assert ask(node, training(run_config(), starts["tiny"], round_=2)).code == 0
        sums.append(drawn.sums)
    assert distance(*sums, clip_norm=run_config().clip_norm) <= 1 + 1e-9
