"""What lies between two requests: other data registered, files replaced, another configuration for the same round."""

import shutil
from functools import partial

import pytest

from fedpriv.config import RunConfig, to_flower
from fedpriv.holder.vault import _reply_times
from fedpriv.holder.wire import frame, kinds
from fedpriv.learning.training.private_evaluation import EvaluationSpec
from tests.adversary.exchanges import N_K, ROWS
from tests.adversary.nodes import (
    Question,
    ask,
    make_node,
    num_charges,
    register_data,
    restart,
    run_config,
    spent,
    training,
    write_rows,
)
from tests.adversary.stand_ins import StandIns, standing_in
from tests.tiny import LABELS

EVERYONE = partial(StandIns, watched=len(ROWS))


@pytest.fixture
def node(approved, tmp_path):
    made = make_node(tmp_path / "node", ROWS, num_registered=N_K, models=approved)
    restart()
    return made


def evaluating(config: RunConfig, adapter: dict, round_: int = 4) -> Question:
    return Question(
        kind=frame.EVALUATE,
        config=to_flower(config),
        fields=kinds.pack_instruction("run", round_, EvaluationSpec(noise_multiplier=1.0)),
        arrays={kinds.ADAPTER: adapter},
    )


def asked(node, question: Question) -> tuple[int, bool]:
    """The code of the answer, and whether any record was in what was noised."""
    with standing_in(EVERYONE()) as seen:
        code = ask(node, question).code
    return code, any(bool(total.values.any()) for total in seen.sums)


def test_what_is_charged_to_a_new_data_set_is_computed_from_it(node, starts):
    """Without a restart of the node, which still holds the records of the old one."""
    assert asked(node, training(run_config(), starts["tiny"])) == (0, True)
    write_rows(node.records, [("a cough", "no such label")] * N_K)
    register_data(node, N_K, note="other patients")
    assert spent(node) == 0
    assert asked(node, training(run_config(), starts["tiny"], round_=2)) == (0, False)
    assert spent(node) > 0


def test_data_registered_between_the_checks_and_the_charge_are_not_used(node, starts, monkeypatch):
    honest = _reply_times.rehearse

    def rehearse(*arguments, **named):
        rehearsed = honest(*arguments, **named)
        write_rows(node.records, [("a cough", LABELS[2])] * N_K)
        register_data(node, N_K, note="other patients")
        return rehearsed

    monkeypatch.setattr(_reply_times, "rehearse", rehearse)
    assert asked(node, training(run_config(), starts["tiny"])) == (frame.REFUSED, False)
    assert num_charges(node) == 0


def test_the_same_round_under_another_configuration_is_another_release(node, starts):
    first = ask(node, training(run_config(), starts["tiny"]))
    other = ask(node, training(run_config(alpha=1.0, seed=3, max_length=8), starts["tiny"]))
    assert first != other
    assert num_charges(node) == 2


def test_a_model_that_changes_after_the_first_look_is_not_run(approved, starts, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(approved["tiny"], folder)
    node = make_node(tmp_path / "node", ROWS, num_registered=N_K, models={"tiny": folder})
    restart()
    assert ask(node, training(run_config(), starts["tiny"])).code == 0
    file = folder / "tokenizer_config.json"
    file.write_text(file.read_text() + " ")
    # Another seed loads the model anew.
    assert ask(node, training(run_config(seed=5), starts["tiny"], round_=2)).code == frame.REFUSED


def test_records_that_the_model_cannot_read_add_nothing_to_an_evaluation(approved, starts, tmp_path):
    node = make_node(tmp_path / "node", [("jane", LABELS[0])] * 50, num_registered=50, models=approved)
    restart()
    config = run_config(model="beyond", test_data="", evaluation_noise_multiplier=1.0, test_fraction=0.999)
    assert asked(node, evaluating(config, starts["tiny"])) == (0, False)


@pytest.mark.parametrize("noise", [1.1e6, 1e38, 1e300, 1.7e308])
@pytest.mark.parametrize("codec", ["float32", "int8", "ternary"])
def test_noise_that_no_upload_could_hold_is_refused_before_its_charge(node, starts, noise, codec):
    question = training(run_config(noise_multiplier=noise, upload_codec=codec), starts["tiny"])
    assert ask(node, question).code == frame.REFUSED
    assert num_charges(node) == 0
