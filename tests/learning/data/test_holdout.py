"""Records set aside for evaluation: a record's side depends on that record alone."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.learning.data.federated import held_out
from fedpriv.learning.data.text import TextData

RECORDS = st.lists(st.tuples(st.text(), st.sampled_from(["a", "b"]), st.text()), max_size=30)


def text_data(records: list[tuple[str, str, str]]) -> TextData:
    texts, labels, pairs = zip(*records, strict=True) if records else ((), (), ())
    return TextData(texts, labels, pairs)


def sides(records: list[tuple[str, str, str]], seed: int = 3, fraction: float = 0.4) -> tuple[list, list]:
    parts = held_out(text_data(records), fraction=fraction, key=str(seed).encode())
    return tuple(list(zip(p.texts, p.labels, p.pairs, strict=True)) for p in parts)


@settings(max_examples=200, derandomize=True)
@given(records=RECORDS.filter(bool), data=st.data())
def test_removing_a_record_moves_no_other(records, data):
    gone = data.draw(st.integers(0, len(records) - 1))
    training, evaluation = sides(records)
    left = sides(records[:gone] + records[gone + 1 :])
    side = training if records[gone] in training else evaluation
    # Of equal records all are on one side, so it does not matter which of them is taken out.
    side.reverse()
    side.remove(records[gone])
    side.reverse()
    assert [sorted(part) for part in left] == [sorted(training), sorted(evaluation)]


def test_every_record_is_on_one_side_in_its_order():
    records = [(f"text {n}", "ab"[n % 2], "") for n in range(100)]
    training, evaluation = sides(records)
    assert sorted(training + evaluation) == sorted(records)
    assert [r for r in records if r in evaluation] == evaluation
    assert [r for r in records if r in training] == training


def test_the_share_is_the_fraction_and_another_key_sets_others_aside():
    records = [(f"text {n}", "a", "") for n in range(10_000)]
    first, other = (set(sides(records, seed, 0.2)[1]) for seed in (1, 2))
    tolerance = 5 * math.sqrt(0.2 * 0.8 / 10_000)  # once in 1.7 million
    for aside in (first, other):
        assert abs(len(aside) / 10_000 - 0.2) < tolerance
    assert abs(len(first & other) / 10_000 - 0.04) < tolerance  # the two are independent
    assert len(set(sides(records, 1, 0.1)[1]) - first) == 0


def test_records_without_labels_or_second_texts_stay_without():
    training, evaluation = held_out(TextData(("one", "two", "three"), ()), fraction=0.5, key=b"0")
    assert len(training) + len(evaluation) == 3
    assert {training.labels, evaluation.labels} == {()}
    assert training.pairs is None
    assert held_out(TextData((), ()), fraction=0.5, key=b"0") == (TextData((), ()), TextData((), ()))
