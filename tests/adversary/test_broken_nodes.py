"""Nodes from which one protection was taken: what a coordinator learns from each, the harness sees."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from fedpriv.errors import InputError
from fedpriv.holder.vault import _charging, _records, answer, holder
from fedpriv.learning.data import federated
from fedpriv.learning.data.records import collate, num_tokens
from fedpriv.learning.data.text import some_of
from fedpriv.learning.training import private_sums, stacked
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.private_sums import PoissonSampler
from tests.adversary.exchanges import play
from tests.adversary.questions import ATTACKS

Break = Callable[[pytest.MonkeyPatch], None]


def tokenizing_before_the_check(patch):
    bench_of = answer.bench_of

    def tokenizing(config, own):
        bench = bench_of(config, own)
        bench.base.tokenizer(list(bench.data.clients[0].texts))
        return bench

    patch.setattr(answer, "bench_of", tokenizing)


def without_isolation(patch):
    patch.setattr(stacked, "isolated", lambda compute, positions: [(positions, compute(positions))])


def failing_loudly(patch):
    def refuse(*_):
        raise RuntimeError("training failed")

    without_isolation(patch)
    patch.setattr(answer, "_noise_alone", refuse)


def norms_in_float32(patch):
    def part_norms(rows, parts):
        return private_sums.torch.stack([rows[:, part].float().square().sum(dim=1) for part in parts]).sqrt().double()

    patch.setattr(private_sums, "part_norms", part_norms)


def shared_passes(patch):
    """As in a simulation: padded to the longest record, which changes shapes, and what some models compute."""
    patch.setattr(TrainingModel, "alone", property(lambda _: False, lambda *_: None), raising=False)


def free_retry(patch):
    charge = _charging.charge
    patch.setattr(_charging, "charge", lambda *args, **options: (True, charge(*args, **options)[1]))


def the_coordinators_labels(patch):
    """They take the place of the operator's, and decide which records there are before anything is paid for."""
    of_node, registered = holder._of_node, _records.registered

    def with_labels_of_run(run, settings, policy):
        return of_node(run, replace(settings, labels=run.labels), policy)

    def only_with_records(config, bench, own):
        if not len(federated.load_own(config, own.settings.source).clients[0]):
            raise InputError("no record has any of these labels")
        return registered(config, bench, own)

    patch.setattr(holder, "_of_node", with_labels_of_run)
    patch.setattr(_records, "registered", only_with_records)


def cap_by_realised_count(patch):
    def draw_persons(self, records, _most):
        included = self.draw(records.num_units)
        return self.some_of_each(records, included, 1 + len(included) % 2)

    patch.setattr(PoissonSampler, "draw_persons", draw_persons)


def shape_by_a_persons_size(patch):
    def batch(_, items):
        persons = [own for records in {records for records, _ in items} for _, own in records.by_person]
        most = max(map(len, persons), default=0)
        return collate(items, max(map(num_tokens, items)) + most)

    patch.setattr(TrainingModel, "_batch", batch)


def records_clipped_one_by_one(patch):
    drawn_of = stacked._drawn

    def drawn(clients):
        return [[[index] for person in each for index in person] for each in drawn_of(clients)]

    patch.setattr(stacked, "_drawn", drawn)


def choices_from_one_stream(patch):
    """Each person's records are drawn with what is left of a common stream."""

    def some_of_each(self, records, persons, most):
        return [some_of(*records.by_person[person], most, self.choices.words(4).tobytes()) for person in persons]

    patch.setattr(PoissonSampler, "some_of_each", some_of_each)


def the_coordinators_unit(patch):
    of_node = holder._of_node

    def with_unit_of_run(run, settings, policy):
        return of_node(run, settings if run.unit == "person" else replace(settings, person_column=""), policy)

    patch.setattr(holder, "_of_node", with_unit_of_run)


BROKEN: dict[str, tuple[Break, str]] = {
    "tokenizing before the check": (
        tokenizing_before_the_check,
        "a tokenizer that fails, for a request that is refused",
    ),
    "failing loudly": (failing_loudly, "a record on which the model fails"),
    "one failure for all": (without_isolation, "a record on which the model fails"),
    "norms in float32": (norms_in_float32, "gradients whose squares vanish"),
    "shared passes": (shared_passes, "padding by a long record, convolutions"),
    "free retry": (free_retry, "a process that ends within a round"),
    "cap by realised count": (cap_by_realised_count, "a person"),
    "shape by a person's size": (shape_by_a_persons_size, "persons padded by a long record"),
    "records clipped one by one": (records_clipped_one_by_one, "a person with a thousand records"),
    "choices from one stream": (choices_from_one_stream, "a person"),
    "the coordinator's unit": (the_coordinators_unit, "records, asked of persons"),
    "the coordinator's labels": (the_coordinators_labels, "labels that only one record has"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_node_without_one_protection_is_caught(approved, starts, tmp_path, monkeypatch, name):
    break_, attack = BROKEN[name]
    break_(monkeypatch)
    assert play(ATTACKS[attack](starts), approved, tmp_path).interferes
