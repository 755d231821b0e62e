"""Every partition shares out each record once, by the rule, and the seed alone decides how."""

from __future__ import annotations

import datasets
import pytest

from fedpriv.config import parse
from fedpriv.errors import InputError
from fedpriv.learning.data._tables import Table
from fedpriv.learning.data.federated import _partition

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


def texts(rule, table=TABLE, **changes):
    parts, names = _partition(table, range(len(table)), parse(RULES[rule] | changes))
    assert len(names) == len(parts)
    return [[table.columns["text"][row] for row in part] for part in parts], names


@pytest.mark.parametrize("rule", RULES)
def test_parts_are_disjoint_and_complete(rule):
    parts, names = texts(rule)
    assert sorted(text for part in parts for text in part) == sorted(COLUMNS["text"])
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("rule", ["iid", "dirichlet", "sizes"])
def test_the_seed_decides(rule):
    assert texts(rule, seed=3) == texts(rule, seed=3)
    assert texts(rule, seed=3) != texts(rule, seed=4)


def test_natural_partition_ignores_seed_and_order_of_rows():
    parts, names = texts("natural")
    assert names == ["east", "north", "south"]
    assert [len(part) for part in parts] == [20, 20, 50]
    assert texts("natural", seed=9) == (parts, names)
    turned, same_names = texts("natural", Table("rows", {name: values[::-1] for name, values in COLUMNS.items()}))
    assert same_names == names
    assert [sorted(part) for part in turned] == [sorted(part) for part in parts]


def test_iid_parts_differ_by_one_record_at_most():
    sizes = [len(part) for part in texts("iid")[0]]
    assert max(sizes) - min(sizes) <= 1


def test_sizes_that_leave_records_over_use_exactly_the_sizes():
    parts, _ = texts("sizes", client_sizes=[7, 5])
    assert [len(part) for part in parts] == [7, 5]
    assert len({text for part in parts for text in part}) == 12


def mixing(alpha):
    """Mean distance of a client's share of label a from one half, over 20 seeds."""
    distances = []
    for seed in range(20):
        parts, _ = _partition(TABLE, range(NUM), parse(RULES["dirichlet"] | {"dirichlet_alpha": alpha, "seed": seed}))
        distances += [abs(sum(COLUMNS["label"][row] == "a" for row in part) / len(part) - 0.5) for part in parts]
    return sum(distances) / len(distances)


# A small alpha gives each client mostly one label, a large one the mixture of the whole; 60 shares each.
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
