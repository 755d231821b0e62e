"""What leaves a client when something goes wrong: nothing that a record, a label or a path could be in."""

import pytest
from flwr.app import Context, Message, RecordDict

from clients.app import app
from clients.node import TRUST_KEY, TRUST_VARIABLE
from fedpriv.config import parse, to_flower
from fedpriv.holder.wire.frame import FAILED, REFUSED, REGISTER, TRAIN
from fedpriv.holder.wire.kinds import answer_of
from tests.wire import asked, response_in

pytestmark = pytest.mark.usefixtures("as_a_task")


def ask(values: dict[str, object], kind: str, **node_config: object) -> Message:
    context = Context(1, 7, {"partition-id": 0, **node_config}, RecordDict(), to_flower(parse(values)))
    return app(asked(kind), context)


def test_registration_states_public_numbers_alone(small_run):
    reply = ask(small_run, REGISTER, **{TRUST_KEY: True})
    response = response_in(reply)
    registration = answer_of(REGISTER, response)
    assert (registration.client, registration.name) == (0, "site-0")
    assert not response.arrays


@pytest.mark.parametrize("kind", [TRAIN, REGISTER])
def test_a_failure_is_told_without_its_cause(small_run, tmp_path, kind):
    secret = tmp_path / "secret.csv"
    secret.write_text("text,label,site\nJane Doe has a rash,only-one-label,s\n")
    reply = ask({**small_run, "data": str(secret)}, kind, **{TRUST_KEY: True})
    assert reply.error.code == FAILED
    assert "log" in reply.error.reason
    assert not any(word in reply.error.reason for word in ("secret", "label", "Jane", "Traceback"))


@pytest.mark.parametrize("kind", [TRAIN, REGISTER])
def test_a_node_takes_no_data_path_from_the_coordinator(small_run, monkeypatch, kind):
    monkeypatch.delenv(TRUST_VARIABLE, raising=False)
    reply = ask(small_run, kind)
    assert reply.error.code == REFUSED
    assert "takes no data from a run's configuration" in reply.error.reason
    monkeypatch.setenv(TRUST_VARIABLE, "1")
    assert not ask(small_run, REGISTER).has_error()


def test_a_node_without_data_in_this_run_says_so(small_run):
    reply = ask(small_run, REGISTER, **{TRUST_KEY: True, "partition-id": 9})
    assert reply.error.code == REFUSED
    assert "partition-id = 9: must lie in 0..2" in reply.error.reason
