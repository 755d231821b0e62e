"""Every partition shares out each record once, by the rule, and the seed alone decides how.

Of records that are set aside for evaluation, a record's side depends on that record alone.
"""

import math

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.config import parse
from fedpriv.errors import InputError
from fedpriv.learning.data._tables import Table
from fedpriv.learning.data.federated import _partition, held_out
from fedpriv.learning.data.text import TextData

NUM = 90
COLUMNS = {
    "text": [f"r{i}" for i in range(NUM)],
    "label": ["ab"[i % 2] for i in range(NUM)],
    "site": [("north", "east", "south")[min(i // 20, 2)] for i in range(NUM)],
}
TABLE = Table("rows", COLUMNS)
RULES = {
    "natural": {"client_column": "site"},
    "iid": {"partition": "iid", "num_clients": 4},
    "dirichlet": {"partition": "dirichlet", "num_clients": 3, "dirichlet_alpha": 5.0},
    "sizes": {"partition": "sizes", "client_sizes": [50, 30, 10]},
}

RECORDS = st.lists(st.tuples(st.text(), st.sampled_from(["a", "b"]), st.text()), max_size=30)


def texts(rule, table=TABLE, **changes):
    parts, names = _partition(table, range(len(table)), parse(RULES[rule] | changes))
    assert len(names) == len(parts)
    return [[table.columns["text"][row] for row in part] for part in parts], names


@pytest.mark.parametrize("rule", RULES)
def test_parts_are_disjoint_and_complete(rule):
    parts, names = texts(rule)
    assert sorted(text for part in parts for text in part) == sorted(COLUMNS["text"])
    assert len(set(names)) == len(names)
    if rule == "iid":
        assert {len(part) for part in parts} == {22, 23}
    if rule == "sizes":
        parts, _ = texts(rule, client_sizes=[7, 5])
        assert [len(part) for part in parts] == [7, 5]
        assert len({text for part in parts for text in part}) == 12


@pytest.mark.parametrize("rule", ["iid", "dirichlet", "sizes"])
def test_the_seed_decides(rule):
    assert texts(rule, seed=3) == texts(rule, seed=3)
    assert texts(rule, seed=3) != texts(rule, seed=4)


def test_natural_partition_ignores_seed_and_order_of_rows():
    parts, names = texts("natural")
    assert names == ["east", "north", "south"]
    rows = list(zip(COLUMNS["text"], COLUMNS["site"], strict=True))
    assert parts == [[text for text, site in rows if site == name] for name in names]
    assert texts("natural", seed=9) == (parts, names)
    turned, same_names = texts("natural", Table("rows", {name: values[::-1] for name, values in COLUMNS.items()}))
    assert same_names == names
    assert [sorted(part) for part in turned] == [sorted(part) for part in parts]


def mixing(alpha):
    """Mean distance of a client's share of label a from one half, over 8 seeds."""
    distances = []
    for seed in range(8):
        parts, _ = _partition(TABLE, range(NUM), parse(RULES["dirichlet"] | {"dirichlet_alpha": alpha, "seed": seed}))
        distances += [abs(sum(COLUMNS["label"][row] == "a" for row in part) / len(part) - 0.5) for part in parts]
    return sum(distances) / len(distances)


# A small alpha gives each client mostly one label, a large one the mixture of the whole; 24 shares each.
def test_dirichlet_alpha_sets_how_alike_clients_are():
    assert mixing(0.3) > 2 * mixing(100.0)


@pytest.mark.parametrize(
    ("rule", "changes", "message"),
    [
        ("iid", {"num_clients": 91}, "num_clients = 91: only 90"),
        ("sizes", {"client_sizes": [90, 1]}, "sum to 91, but there are 90"),
        ("dirichlet", {"num_clients": 60, "dirichlet_alpha": 0.001}, "partition = dirichlet"),
    ],
)
def test_impossible_split_is_one_line(rule, changes, message):
    with pytest.raises(InputError, match=message) as caught:
        texts(rule, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rule", "peer"), [("iid", {"num_partitions": 4}), ("sizes", {"partition_sizes": [50, 30, 10]})]
)
def test_parts_are_those_of_flowers_own_partitioners(rule, peer):
    partitioners = pytest.importorskip("flwr_datasets.partitioner")
    partitioner = {"iid": partitioners.IidPartitioner, "sizes": partitioners.SizePartitioner}[rule](**peer)
    partitioner.dataset = datasets.Dataset.from_dict(COLUMNS).shuffle(seed=7)
    parts, _ = texts(rule, seed=7)
    assert parts == [partitioner.load_partition(k)["text"][:] for k in range(len(parts))]


def text_data(records: list[tuple[str, str, str]]) -> TextData:
    texts, labels, pairs = zip(*records, strict=True) if records else ((), (), ())
    return TextData(texts, labels, pairs)


def sides(records: list[tuple[str, str, str]], seed: int = 3, fraction: float = 0.4) -> tuple[list, list]:
    parts = held_out(text_data(records), fraction=fraction, key=str(seed).encode())
    return tuple(list(zip(p.texts, p.labels, p.pairs, strict=True)) for p in parts)


@settings(max_examples=60, derandomize=True)
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


def test_the_share_is_the_fraction_and_another_key_sets_others_aside():
    num = 10_000
    records = [(f"text {n}", "a", "") for n in range(num)]
    first, other = (set(sides(records, seed, 0.2)[1]) for seed in (1, 2))
    tolerance = 5 * math.sqrt(0.2 * 0.8 / num)  # once in 1.7 million
    for aside in (first, other):
        assert abs(len(aside) / num - 0.2) < tolerance
    assert abs(len(first & other) / num - 0.04) < tolerance  # the two are independent: one set alone would be 0.2
    assert len(set(sides(records, 1, 0.1)[1]) - first) == 0


def test_every_record_is_on_one_side_in_its_order_and_without_what_it_did_not_have():
    records = [(f"text {n}", "ab"[n % 2], "") for n in range(100)]
    for side in (parts := sides(records)):
        assert [record for record in records if record in side] == side
    assert sorted(parts[0] + parts[1]) == sorted(records)
    training, evaluation = held_out(TextData(("one", "two", "three"), ()), fraction=0.5, key=b"0")
    assert len(training) + len(evaluation) == 3
    assert {training.labels, evaluation.labels} == {()}
    assert training.pairs is None
    assert held_out(TextData((), ()), fraction=0.5, key=b"0") == (TextData((), ()), TextData((), ()))
