"""A whole run loses a node, stops for lack of another, and goes on without the first at no charge to it."""

import json

import pandas as pd
import pytest

from fedpriv.config import parse
from fedpriv.errors import TooFewClientsError
from fedpriv.privacy.ledger.reader import reading
from fedpriv.runs._folder import RunFolder
from fedpriv.runs._status import status_of
from server.exchange import set_message_id
from simulations.engines import federation
from simulations.engines.grid import LocalGrid
from tests.notes import Notes

pytestmark = pytest.mark.slow

# A sum needs three holders, so a fourth replaces the one that is lost.
SECURE = {
    "client_column": "",
    "partition": "iid",
    "num_clients": 4,
    "min_clients": 3,
    "secure_aggregation": True,
    "local_steps": 1,
    "optimizer": "sgd",
    "noise_multiplier": 4.0,
    "secure_masks": True,
}
FIRST_NODE_ID = 2


def link(gone) -> type[LocalGrid]:
    """Links on which `gone(client, round)` says whose messages are lost."""

    class Lossy(LocalGrid):
        round = 0

        def get_node_ids(self):
            return [each for each in super().get_node_ids() if not gone(each - FIRST_NODE_ID, self.round)]

        def push_messages(self, messages):
            arriving = []
            for message in messages:
                self.round = max(self.round, int(message.metadata.group_id))
                if gone(message.metadata.dst_node_id - FIRST_NODE_ID, self.round):
                    set_message_id(message, f"lost {id(message)}")
                else:
                    arriving.append(message)
            return super().push_messages(arriving)

    return Lossy


def rounds_charged(out, client: int) -> list[int]:
    with reading(out / "ledger.sqlite") as db:
        return [e.round for e in db.entries() if e.phase == "charged" and e.client == str(client)]


def lived_through(small_run, out, monkeypatch, **changes) -> None:
    values = {**small_run, "rounds": 6, "min_clients": 2, "round_seconds": 0.1, "evaluate_every": 100, **changes}
    values |= {"out": str(out)}
    # Client 2 dies in round 2 and client 1 in round 4, after which only the latter comes back.
    monkeypatch.setattr(federation, "LocalGrid", link(lambda c, t: (c == 2 and t >= 2) or (c == 1 and t >= 4)))
    first = Notes()
    with pytest.raises(TooFewClientsError, match="round 4"):
        federation.run(parse(values), first)
    name = "2" if changes else "site-2 (2)"
    assert any(f"{name} gave no answer in 2 rounds up to round 3" in text for text in first.notes)
    (client,) = [each for each in status_of(RunFolder(out, now=0.0)).clients if each.skipped]
    assert client.client == 2

    monkeypatch.setattr(federation, "LocalGrid", link(lambda c, t: c == 2))
    federation.run(parse({**values, "resume": str(out)}), second := Notes())
    assert name in next(text for text in second.notes if "resumes after round" in text)


@pytest.mark.parametrize("changes", [{}, SECURE], ids=["uploads", "secure aggregation"])
def test_who_is_skipped_stays_so_over_a_resume_and_pays_for_nothing(small_run, tmp_path, monkeypatch, changes):
    out = tmp_path / "run"
    lived_through(small_run, out, monkeypatch, **changes)
    # Under secure aggregation a node that shows no keys is left out, which costs nothing either.
    assert rounds_charged(out, 2) == ([1] if changes else [1, 2, 3])
    assert rounds_charged(out, 0) == [1, 2, 3, 4, 5, 6]
    rows = pd.read_csv(out / "clients.csv")
    assert list(rows.query("client == 2")["round"]) == [1, 2, 3]
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert [(e["round"], e["client"]) for e in events if e["event"] == "skipped"] == [(3, 2)]
    summary = json.loads((out / "summary.json").read_text())
    assert {c["client"]: c["rounds"] for c in summary["clients"]}[2] == (1 if changes else 3)
