"""Canaries: coins, directions, records, and a registered number that the coins do not change."""

import numpy as np
import pytest
import torch
from scipy import stats

from fedpriv.errors import InputError
from fedpriv.learning.adapters import read
from fedpriv.learning.training import canaries
from fedpriv.learning.training.canaries import CanaryPlan, audited_client
from fedpriv.learning.training.model import TrainingModel
from fedpriv.methods.audit import one_run_audit, scores_of
from fedpriv.methods.audit.black_box import record_losses
from fedpriv.privacy.mechanisms.sources import SeededSource
from simulations.studies.audit import harness


def client_of(records, plan, *, vocabulary=60, coins=2):
    sources = {"canary_source": SeededSource(1), "coins": SeededSource(coins)}
    return audited_client(records, plan, num_labels=3, vocabulary=vocabulary, **sources)


def test_coins_are_fair():
    included = canaries.inclusions(4000, SeededSource(1))
    assert stats.binomtest(int(included.sum()), 4000).pvalue > 1e-4


def test_directions_are_unit_vectors_and_orthogonal_where_promised():
    dense = harness.dense_directions(16, 16, SeededSource(1))
    for directions in (harness.coordinate_directions(8, range(8, 16), 16), dense):
        torch.testing.assert_close(directions @ directions.T, torch.eye(len(directions)))
    dense = harness.dense_directions(5, 64, SeededSource(1))
    assert torch.allclose(dense.abs(), torch.tensor(0.125))
    random = harness._random_directions(50, 30, SeededSource(1))
    torch.testing.assert_close(random.norm(dim=1), torch.ones(50))
    for num, dimension in ((3, 12), (17, 16), (0, 16)):  # of which there is no Hadamard matrix
        with pytest.raises(InputError):
            harness.dense_directions(num, dimension, SeededSource(1))


@pytest.mark.parametrize("kind", ["tokens", "mislabelled"])
def test_a_client_with_canaries_registers_one_number_whatever_the_coins_show(make_records, kind):
    records = make_records(40)
    plan = CanaryPlan(kind=kind, num=10, num_tokens=6)
    made = [client_of(records, plan, coins=coins) for coins in range(5)]
    own = 40 if kind == "tokens" else 30
    assert {one.num_registered for one in made} == {own + 10}
    assert len({len(one.records) for one in made}) > 1
    for one in made:
        assert len(one.records) == own + one.included.sum()
        inside = np.flatnonzero(one.included).tolist()
        kept = one.records.part(range(own, len(one.records)))
        expected = one.canaries.part(inside)
        assert all(map(torch.equal, kept.features["input_ids"], expected.features["input_ids"]))
        assert torch.equal(kept.labels, expected.labels)


def test_mislabelled_canaries_have_wrong_labels_only(make_records):
    records = make_records(300)
    changed = canaries.mislabelled_canaries(records, num_labels=3, source=SeededSource(1))
    assert (changed.labels != records.labels).all()
    assert set(changed.labels.tolist()) == {0, 1, 2}


def test_canaries_refuse_what_cannot_be(make_records):
    for bad in ({"kind": "other"}, {"num": 1}, {"num_tokens": 2}):
        with pytest.raises(InputError, match=next(iter(bad))):
            CanaryPlan(**bad)
    with pytest.raises(InputError, match="num_canaries = 1"):
        canaries.inclusions(1, SeededSource(1))
    with pytest.raises(InputError, match="mislabel"):
        client_of(make_records(5), CanaryPlan(kind="mislabelled", num=5))
    with pytest.raises(InputError, match="2 coins for 3"):
        canaries.inserted(make_records(4), make_records(3), np.array([True, False]))


def test_losses_of_records_are_those_of_each_alone(encoder, make_records):
    model = TrainingModel(encoder(layers="last-1"), memory_limit=2**30)
    adapter, records = read(model.peft_model), make_records(9)
    found = record_losses(model, adapter, records)
    with torch.no_grad():
        alone = [float(model.predictions([item], cached=False).losses) for item in records.items()]
    assert found == pytest.approx(alone, abs=1e-5)


def test_the_scores_of_a_run_find_its_canaries(encoder, make_records):
    """A final model that was moved along the included canaries' gradients is told from one that was not."""
    model = TrainingModel(encoder(), memory_limit=2**30)
    client = client_of(make_records(20), CanaryPlan(num=60, num_tokens=8), vocabulary=15)
    initial = read(model.peft_model)
    chosen = client.canaries.part(np.flatnonzero(client.included).tolist())
    optimizer = torch.optim.Adam(model.parameters.values(), lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        model.predictions(chosen.items(), cached=False).losses.mean().backward()
        optimizer.step()
    final = read(model.peft_model)
    found, unmoved = (
        one_run_audit(scores_of(model, initial, last, [client]), client.included, num_guesses=20, delta=1e-5)
        for last in (final, initial)
    )
    assert found.num_correct >= 17
    assert found.epsilon_lower > 0.5 > unmoved.epsilon_lower
