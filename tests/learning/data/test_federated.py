"""Any table becomes a federation: formats, columns, partitions, labels.

Every partition shares out each record once, by the rule, and the seed alone decides how. Of records that are set aside
for evaluation, a record's side depends on that record alone.
"""

import csv
import gzip
import itertools
import json
import math
from dataclasses import asdict
from pathlib import Path

import datasets
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.config import EMBEDDED, KEYS, ON_NODES, RunConfig, parse
from fedpriv.errors import InputError
from fedpriv.learning.data._tables import Table, read_table
from fedpriv.learning.data.federated import _partition, held_out, holdings, load
from fedpriv.learning.data.records import collate, num_tokens, tokenize
from fedpriv.learning.data.text import TextData
from tests.marks import slow

ROWS = [{"text": f"record {i}", "label": "ab"[i % 2], "site": f"s{i % 3}", "second": f"pair {i}"} for i in range(60)]
# Of ninety records, where their number matters.
RULES = {
    "natural": {"client_column": "site"},
    "iid": {"partition": "iid", "num_clients": 4},
    "dirichlet": {"partition": "dirichlet", "num_clients": 3, "dirichlet_alpha": 5.0},
    "sizes": {"partition": "sizes", "client_sizes": [50, 30, 10]},
}
SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"


def write(path: Path, rows=ROWS) -> Path:
    suffix = path.name.removesuffix(".gz").rsplit(".", 1)[-1]
    if suffix == "parquet":
        pd.DataFrame(rows).to_parquet(path)
        return path
    with (gzip.open if path.suffix == ".gz" else open)(path, "wt", newline="") as file:
        if suffix in ("csv", "tsv"):
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if suffix == "tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
        else:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def federation(path: Path, **changes):
    """The federation of a table, a public one unless the changes say otherwise."""
    return load(parse({"data": str(path), "batch_size": 2, "public_data": True, **changes}))


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "rows.csv")


@pytest.mark.parametrize("name", ["r.csv", "r.tsv", "r.jsonl", "r.json", "r.parquet", "r.csv.gz", "r.jsonl.gz"])
def test_every_format_gives_the_same_records(tmp_path, name):
    table = read_table(str(write(tmp_path / name)))
    assert [dict(zip(table.columns, row, strict=True)) for row in zip(*table.columns.values(), strict=True)] == ROWS


def texts(data):
    return [text for client in data.clients for text in client.texts]


FEW = {"partition": "sizes", "client_sizes": [30, 10, 8]}


@pytest.mark.parametrize("settings", [*(RULES | {"sizes": FEW}).values(), {}])
def test_partitions_and_test_set_are_disjoint_complete_and_repeatable(file, settings):
    data = federation(file, **settings)
    assert sorted([*texts(data), *data.test.texts]) == sorted(row["text"] for row in ROWS)
    assert federation(file, **settings) == data
    assert federation(file, **settings, seed=5).test != data.test


@pytest.mark.parametrize("settings", [{}, {"evaluation_noise_multiplier": 2.0}, {"labels": ["a", "b"]}])
def test_no_record_of_a_private_table_becomes_the_server_s_test_set(file, settings):
    data = federation(file, public_data=False, client_column="site", **settings)
    assert len(data.test) == 0
    assert sorted(texts(data)) == sorted(row["text"] for row in ROWS)
    is_evaluated = "evaluation_noise_multiplier" in settings  # by the holders, who set records aside
    for nobodys in ({"public_data": True}, {"public_data": False, "simulate": True}):
        assert (len(federation(file, **settings | nobodys).test) > 0) is not is_evaluated


def client_of_each(config: RunConfig) -> dict[str, int]:
    return {text: client for client, records in enumerate(load(config).clients) for text in records.texts}


def others(key: str, value: object, changed: dict[str, list[object]]) -> list[object]:
    """Other values of a key, allowed or not."""
    if key in changed:
        return changed[key]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, (int, float)):
        return [value + 1, value * 0.5, 0, 2]
    return [True, 1.0, 2, "x", ["x", "y"]]


# {name: (a configuration, keys that move records there)}
BASES = {
    "dealt out": ({"simulate": True}, "test_data test_fraction evaluation_noise_multiplier simulate seed"),
    "private": ({}, "public_data simulate num_clients client_column partition labels data"),
    "by label": ({"partition": "dirichlet", "dirichlet_alpha": 5.0}, "label_column dirichlet_alpha"),
    "by size": ({"partition": "sizes", "client_sizes": [20, 30], "num_clients": 2}, "client_sizes"),
    "answers": ({"prompt_column": "text", "response_column": "label", "answers": ["a", "b", "c"]}, "answers"),
    "natural": ({"client_column": "site", "simulate": True}, "client_column"),
    "embedded": ({"data": EMBEDDED, "partition": "iid", "num_clients": 5}, "partition num_clients seed"),
}


@pytest.mark.parametrize("base", ["private", *slow(*sorted(BASES.keys() - {"private"}))])
def test_whichever_key_changes_who_holds_a_record_tells_holdings_apart(tmp_path, base):
    """What all runs of a sweep cost together is composed client by client only where holdings are equal."""
    rows = [{**row, "label": "abc"[i % 3], "half": "pq"[i % 2]} for i, row in enumerate(ROWS)]
    rows[-6:] = [{**row, "label": "d"} for row in rows[-6:]]
    given, expected = BASES[base]
    file, reverse = write(tmp_path / "r.csv", rows), write(tmp_path / "reverse.csv", rows[::-1])
    test = write(tmp_path / "t.csv", [{**row, "text": f"test {row['text']}"} for row in rows])
    labels = [] if "answers" in given else ["a", "b", "c", "d"]
    first = parse({"data": str(file), "batch_size": 1, "labels": labels, "num_clients": 3} | given)
    changed: dict[str, list[object]] = {
        **{"data": [str(reverse), EMBEDDED], "test_data": [str(test)], "test_fraction": [0.4], "max_records": [5]},
        **{"text_column": ["second"], "label_column": ["half"], "client_column": ["site", "half", ""]},
        **{"labels": [["a", "b"]], "answers": [["a", "b"]], "client_sizes": [[15, 25]], "noise_multiplier": [2.0]},
        "partition": ["auto", "iid", "natural", "dirichlet", "sizes"],
    }
    clients, moving = client_of_each(first), set()
    for key in KEYS:
        for value in others(key, getattr(first, key), changed):
            values = asdict(first) | {key: value}
            if key in ("label_column", "data"):
                values["labels"] = []
            try:
                config = parse(values)
                found = client_of_each(config)
            except InputError:
                continue
            if any(found.get(text, client) != client for text, client in clients.items()):
                moving.add(key)
                assert holdings(config) != holdings(first), (key, value)
    assert moving.issuperset(expected.split()), "the loader would not be looked at"


@pytest.mark.parametrize(
    ("given", "value"), [({"simulate": True, "client_column": "site"}, {"seed": 3}), ({}, {"noise_multiplier": 2.0})]
)
def test_what_moves_no_record_leaves_holdings_equal(file, given, value):
    first = {"data": str(file), "batch_size": 1, **given}
    assert holdings(parse(first)) == holdings(parse(first | value))
    one, other = (holdings(parse(first | {"evaluation_noise_multiplier": z})) for z in (2.0, 4.0))
    assert one == other


def test_a_test_table_of_its_own_leaves_all_records_to_the_clients(file, tmp_path):
    other = write(tmp_path / "test.csv", ROWS[:5])
    data = federation(file, client_column="site", test_data=str(other), text_pair_column="second")
    assert len(texts(data)) == 60
    assert data.test.pairs == tuple(f"pair {i}" for i in range(5))
    write(other, [*ROWS[:3], {**ROWS[0], "label": "z"}])
    with pytest.raises(InputError, match=r"'z' occurs only in .*test\.csv, never in training"):
        federation(file, test_data=str(other))


def test_labels_choose_the_records(tmp_path):
    rows = [{**row, "label": "abc"[i % 3]} for i, row in enumerate(ROWS)]
    data = federation(write(tmp_path / "r.csv", rows), labels=["c", "a"])
    assert data.label_names == ("c", "a")
    assert len(texts(data)) + len(data.test) == 40
    with pytest.raises(InputError, match="none of labels = x,y"):
        federation(tmp_path / "r.csv", labels=["x", "y"])
    rows = [{**row, "label": None if i < 10 else row["label"]} for i, row in enumerate(ROWS)]
    data = federation(write(tmp_path / "r.jsonl", rows))
    assert len(texts(data)) + len(data.test) == 50, "records without a label are left out"
    data = federation(write(tmp_path / "t.csv", [{"text": row["text"]} for row in ROWS]), task="CAUSAL_LM")
    assert (data.label_names, len(data.clients)) == ((), 5), "which a causal model does not need"


PRIVATE, SKEWED = {"public_data": False}, {"partition": "dirichlet", "dirichlet_alpha": 0.001}


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        (ROWS, {"batch_size": 17, "client_column": "site"}, "batch_size = 17: client . .* has only 1. records"),
        (ROWS, {"text_column": "body"}, "text_column = 'body'"),
        (ROWS, {"text_pair_column": "third"}, "text_pair_column = 'third'"),
        (ROWS, {"label_column": "class"}, "label_column = 'class'"),
        (ROWS, {"client_column": "owner"}, "client_column = 'owner'"),
        ([{**row, "label": "a"} for row in ROWS], {}, "holds one class, 'a'"),
        (ROWS[:1], {}, "leaves no training records"),
        # Clients that the partition does not make.
        (ROWS, {"num_clients": 4, "client_column": "site"}, "num_clients = 4: partition = auto makes 3 clients"),
        (ROWS, {"num_clients": 4, "partition": "sizes", "client_sizes": [30, 10]}, "partition = sizes makes 2"),
        (ROWS, {"num_clients": 4, "data": EMBEDDED}, "num_clients = 4: partition = auto makes 5 clients"),
        (ROWS, {"client_sizes": [30, 10]}, "client_sizes = .30, 10.: needs partition = sizes, not auto"),
        (ROWS, PRIVATE | {"partition": "iid", "num_clients": 61}, "num_clients = 61: only 60"),
        (ROWS, PRIVATE | {"partition": "sizes", "client_sizes": [60, 1]}, "sum to 61, but there are 60"),
        (ROWS, PRIVATE | SKEWED | {"num_clients": 40}, "partition = dirichlet"),
    ],
)
def test_what_cannot_be_used_is_one_line(tmp_path, rows, settings, message):
    with pytest.raises(InputError, match=message) as caught:
        federation(write(tmp_path / "r.csv", rows), **settings)
    assert "\n" not in str(caught.value)


def test_a_client_without_records_is_refused_by_name_and_never_vanishes(tmp_path):
    lonely, path = {**ROWS[0], "site": "lonely"}, tmp_path / "r.jsonl"
    message = "client_column = 'site': client 'lonely' has no training records"
    for label, keys in ((None, {}), ("z", {"labels": ["a", "b"]})):
        with pytest.raises(InputError, match=message):
            federation(write(path, [*ROWS, lonely | {"label": label}]), client_column="site", **keys)
    write(path, [*ROWS, lonely])
    outcomes = set()
    for seed in range(12):  # with some, its records all fall into the test split
        try:
            outcomes.add(len(federation(path, client_column="site", seed=seed, batch_size=1).clients))
        except InputError as error:
            outcomes.add("lonely" in str(error))
    assert outcomes == {4, True}


@pytest.mark.parametrize("data", ["table", ON_NODES])
def test_labels_of_the_test_table_in_another_spelling_are_refused_and_others_are_counted(tmp_path, file, data):
    rows = [{"text": f"new {n}", "label": "a " if n % 10 else "a"} for n in range(100)]
    test = write(tmp_path / "test.csv", rows)
    asked = {"data": data if data == ON_NODES else str(file), "labels": "a,b", "test_data": str(test)}
    with pytest.raises(InputError, match=r"test_data = .*labels: 'a ' differs from 'a' by case or blanks alone \(90 "):
        load(parse({**asked, "batch_size": 1, "public_data": True}))
    write(test, [row | {"label": row["label"].replace("a ", "other")} for row in rows])
    told = load(parse({**asked, "batch_size": 1, "public_data": True})).warnings
    assert f"test_data = {str(test)!r}: 90 of 100 records have another label than labels" in told


def test_no_seed_decides_whether_a_class_of_one_record_is_one(tmp_path):
    rows = [*({"text": f"t{n}", "label": "ab"[n % 2]} for n in range(20)), {"text": "last", "label": "rare"}]
    path = write(tmp_path / "r.csv", rows)
    found = [federation(path, seed=seed, num_clients=2) for seed in range(12)]
    assert {each.label_names for each in found} == {("a", "b", "rare")}
    assert {"rare" in each.test.labels for each in found} == {True, False}


def test_records_are_cut_padded_on_the_right_and_labelled(file, tiny_bert):
    from transformers import AutoTokenizer

    data = federation(file, client_column="site", text_pair_column="second")
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    records = tokenize(data.clients[0], tokenizer, label_names=data.label_names, max_length=6)
    assert max(map(num_tokens, records.items())) <= 6
    batch = collate(records.items([0, 1, 2]))
    assert set(batch) == {"input_ids", "token_type_ids", "attention_mask", "labels"}
    assert (batch["attention_mask"].diff(dim=1) <= 0).all()
    assert batch["labels"].tolist() == [data.label_names.index(label) for label in data.clients[0].labels[:3]]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data sets are not on this machine")
def test_medquad_by_source_and_sst2():
    columns = {"text_column": "answer", "label_column": "question_type", "client_column": "source"}
    kept = {"labels": ["information", "symptoms", "treatment"]}
    medquad = federation(SHARED / "medquad.csv.gz", **columns, **kept)
    assert len(medquad.clients) == 9
    assert "CDC" in medquad.client_names
    reviews = SHARED / "sst2_dev.csv.gz"
    sst2 = federation(reviews, partition="dirichlet", num_clients=10, test_data=str(reviews))
    assert sum(map(len, sst2.clients)) == len(sst2.test) == 6735
    assert sst2.label_names == ("0", "1")


def test_runs_of_several_seeds_may_share_their_data(file):
    dealt = {"data": str(file), "partition": "iid", "num_clients": 2, "client_column": "", "public_data": True}

    def data(**seeds: int) -> tuple[object, ...]:
        found = load(parse(dealt | seeds))
        return (*(records.texts for records in found.clients), found.test.texts)

    assert data(seed=1) == data(seed=2, data_seed=1) == data(seed=3, data_seed=1) != data(seed=2)
    assert holdings(parse(dealt | {"seed": 1})) == holdings(parse(dealt | {"seed": 2, "data_seed": 1}))
    assert holdings(parse(dealt | {"seed": 1})) != holdings(parse(dealt | {"seed": 1, "data_seed": 2}))


# ---------------------------------------------------------------- partitions

NUM = 90
COLUMNS = {
    "text": [f"r{i}" for i in range(NUM)],
    "label": ["ab"[i % 2] for i in range(NUM)],
    "site": [("north", "east", "south")[min(i // 20, 2)] for i in range(NUM)],
}
TABLE = Table("rows", COLUMNS)

RECORDS = st.lists(st.tuples(st.text(), st.sampled_from(["a", "b"]), st.text()), max_size=30)


def parts_of(rule, table=TABLE, **changes):
    parts, names = _partition(table, range(len(table)), parse(RULES[rule] | changes))
    assert len(names) == len(parts)
    return [[table.columns["text"][row] for row in part] for part in parts], names


@pytest.mark.parametrize("rule", RULES)
def test_parts_are_disjoint_and_complete_and_the_seed_decides(rule):
    parts, names = parts_of(rule)
    assert sorted(text for part in parts for text in part) == sorted(COLUMNS["text"])
    assert len(set(names)) == len(names)
    if rule == "iid":
        assert {len(part) for part in parts} == {22, 23}
    if rule == "sizes":
        parts, _ = parts_of(rule, client_sizes=[7, 5])
        assert [len(part) for part in parts] == [7, 5]
        assert len({text for part in parts for text in part}) == 12
    assert parts_of(rule, seed=3) == parts_of(rule, seed=3)
    assert (parts_of(rule, seed=3) == parts_of(rule, seed=4)) == (rule == "natural")


def test_natural_partition_ignores_the_order_of_rows():
    parts, names = parts_of("natural")
    assert names == ["east", "north", "south"]
    rows = list(zip(COLUMNS["text"], COLUMNS["site"], strict=True))
    assert parts == [[text for text, site in rows if site == name] for name in names]
    turned, same_names = parts_of("natural", Table("rows", {name: values[::-1] for name, values in COLUMNS.items()}))
    assert same_names == names
    assert [sorted(part) for part in turned] == [sorted(part) for part in parts]


def test_dirichlet_alpha_sets_how_alike_clients_are():
    """A small alpha gives each client mostly one label, a large one the mixture of the whole; 24 shares each."""
    label_of, distances = dict(zip(COLUMNS["text"], COLUMNS["label"], strict=True)), {0.3: 0.0, 100.0: 0.0}
    for alpha, seed in itertools.product(distances, range(8)):
        for part in parts_of("dirichlet", dirichlet_alpha=alpha, seed=seed)[0]:
            distances[alpha] += abs(sum(label_of[text] == "a" for text in part) / len(part) - 0.5)
    assert distances[0.3] > 2 * distances[100.0]


def test_parts_are_those_of_flowers_own_partitioners():
    flowers = pytest.importorskip("flwr_datasets.partitioner")
    theirs = {"iid": flowers.IidPartitioner(4), "sizes": flowers.SizePartitioner([50, 30, 10])}
    for rule, partitioner in theirs.items():
        partitioner.dataset = datasets.Dataset.from_dict(COLUMNS).shuffle(seed=7)
        parts, _ = parts_of(rule, seed=7)
        assert parts == [partitioner.load_partition(k)["text"][:] for k in range(len(parts))]


def sides(records: list[tuple[str, str, str]], seed: int = 3, fraction: float = 0.4) -> tuple[list, list]:
    data = TextData(*zip(*records, strict=True)) if records else TextData((), (), ())
    parts = held_out(data, fraction=fraction, key=str(seed).encode())
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
