"""Persons in a table: each at one side of every split, whatever the other records are, and named once.

A test set that is shown without noise holds no record and no person of private data, by whatever name it comes.
"""

import csv
import json
import shutil
from collections import Counter
from dataclasses import replace

import pytest

from fedpriv.config import ON_NODES, RunConfig, parse
from fedpriv.errors import InputError
from fedpriv.learning.data import DataSource, load
from fedpriv.learning.data.federated import held_out, load_own
from fedpriv.learning.data.hospital import generate
from fedpriv.learning.data.text import TextData, at_most, by_person
from tests.learning.data.test_federated import RULES
from tests.tiny import LABELS, WORDS

HEADER = ("text", "label", "site", "patient")


def write(path, rows, header=HEADER):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def rows_of(num_persons: int = 40) -> list[tuple[str, ...]]:
    """Persons with one to four records, each at one of two sites."""
    rows = []
    for person in range(num_persons):
        for record in range(1 + person % 4):
            text = f"{WORDS[(person + record) % len(WORDS)]} {person} {record}"
            rows.append((text, LABELS[(person + record) % 3], f"site-{person % 2}", f"P{person:03}"))
    return rows[::2] + rows[1::2]


@pytest.fixture
def table(tmp_path):
    return write(tmp_path / "t.csv", rows_of())


def config_of(table, **changes) -> RunConfig:
    return parse({"data": str(table), "person_column": "patient", **changes})


def sides(*parts: TextData) -> list[set[str]]:
    return [set(part.persons or ()) for part in parts]


PARTITIONS = RULES | {"sizes": {"partition": "sizes", "client_sizes": [20, 10, 5]}}


@pytest.mark.parametrize("rule", PARTITIONS)
def test_no_person_is_at_two_clients_and_none_loses_a_record(table, rule):
    data = load(config_of(table, **PARTITIONS[rule]))
    held = sides(*data.clients)
    assert sum(map(len, held)) == len(set.union(*held)) == sum(client.num_units for client in data.clients)
    records = Counter(person for *_, person in rows_of())
    for client in data.clients:
        assert Counter(client.persons) == {person: records[person] for person in set(client.persons)}
    if rule == "sizes":
        assert [client.num_units for client in data.clients] == [20, 10, 5]


def test_a_test_set_takes_whole_persons(table):
    config = config_of(table, client_column="site", public_data=True, test_fraction=0.25)
    data = load(config)
    trained = set.union(*sides(*data.clients))
    tested = {text.split()[1] for text in data.test.texts}
    assert len(trained) == 30
    assert len(tested) == 10
    assert not {f"P{int(person):03}" for person in tested} & trained
    assert len(data.test) + sum(map(len, data.clients)) == len(rows_of())


def test_a_batch_is_of_persons_and_max_records_draws_persons_with_all_their_records(table):
    few = load(config_of(table, client_column="site", max_records=5))
    assert [client.num_units for client in few.clients] == [5, 5]
    records = Counter(person for *_, person in rows_of())
    assert Counter(few.clients[0].persons) == {person: records[person] for person in set(few.clients[0].persons)}
    asked = {"client_column": "site", "recipe": "per-sample"}
    load(config_of(table, batch_size=20, **asked))
    with pytest.raises(InputError, match=r"batch_size = 21: client 0 .* has only 20 persons; use at most 20"):
        load(config_of(table, batch_size=21, **asked))


def test_the_coin_that_sets_aside_is_the_persons_whatever_its_records_are(table):
    data = load(config_of(table, partition="iid", num_clients=1)).clients[0]
    train, aside = held_out(data, fraction=0.4, key=b"key")
    kept, set_aside = sides(train, aside)
    assert min(len(kept), len(set_aside)) > 0 == len(kept & set_aside)
    texts, labels = (*data.texts, "another text", "newcomer"), (*data.labels, *LABELS[:2])
    more = replace(data, texts=texts, labels=labels, persons=(*data.persons, "P003", "P999"))
    now_kept, now_aside = sides(*held_out(more, fraction=0.4, key=b"key"))
    assert (now_kept - {"P999"}, now_aside - {"P999"}) == (kept, set_aside)


def test_a_node_keeps_so_many_records_of_a_person_and_others_change_nothing():
    names = ["a"] * 3 + ["b"] * 9 + ["c"]
    data = TextData(tuple(map(str, range(13))), (), None, tuple(names))
    kept = at_most(data, 4, b"key")
    assert Counter(kept.persons) == {"a": 3, "b": 4, "c": 1}
    alone = at_most(data.part(range(3, 12)), 4, b"key")
    assert alone.texts == tuple(text for text, name in zip(kept.texts, kept.persons, strict=True) if name == "b")
    assert at_most(data, 4, b"other").texts != kept.texts


def test_the_embedded_patients_are_at_one_hospital_each_and_change_no_text():
    train, test = generate()
    records = Counter(message.patient for message in train)
    assert set(records.values()) == {1, 2, 3, 4, 5, 6}
    assert sum(number == 1 for number in records.values()) > len(records) * 0.4
    assert len({(message.patient, message.hospital) for message in train}) == len(records)
    assert not any(message.patient for message in test)
    persons, plain = load(parse({"unit": "person"})), load(RunConfig())
    assert [client.texts for client in persons.clients] == [client.texts for client in plain.clients]
    assert plain.clients[0].persons is None
    dealt = load(parse({"unit": "person", "partition": "iid", "num_clients": 4}))
    assert sum(client.num_units for client in dealt.clients) == len(records)


MISTAKES = {
    "two spellings": ("site-0", "p000 ", "persons: 'p000 ' differs from 'P000' by case or blanks"),
    "nobody": ("site-0", " ", "persons: some records name nobody"),
    "unknown": ("site-0", "unknown", "persons: 'unknown' looks like a missing one"),
    "two sites": ("site-1", "P000", "persons: 1 have records at more than 1 client, at up to 2"),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_about_persons_is_refused_unless_it_is_meant(tmp_path, kind):
    site, person, message = MISTAKES[kind]
    path = write(tmp_path / "t.csv", [*rows_of(), ("x 1", LABELS[0], site, person)])
    with pytest.raises(InputError, match=message):
        load(config_of(path, client_column="site"))
    data = load(config_of(path, client_column="site", table_checks="warn"))
    assert any(message in line for line in data.warnings)
    assert " " not in set().union(*sides(*data.clients)), "a record that names nobody could be about anyone"


def test_a_column_that_looks_like_persons_is_told_where_none_is_named(tmp_path):
    rows = [(*row[:3], f"{int(row[3][1:]) % 30}") for row in rows_of()]
    path = write(tmp_path / "t.csv", rows, (*HEADER[:3], "case_id"))
    asked = {"data": str(path), "client_column": "site"}
    assert any("'case_id': looks like persons" in line for line in load(parse(asked)).warnings)
    ward = [(*row[:3], f"{int(row[3][1:]) % 2}") for row in rows_of()]
    assert not load(parse(asked | {"data": str(write(tmp_path / "w.csv", ward, (*HEADER[:3], "ward_no")))})).warnings


def test_a_node_reads_persons_and_leaves_out_records_of_nobody(tmp_path):
    path = write(tmp_path / "t.csv", [*rows_of(), ("x", LABELS[0], "site-0", "  ")])
    config = parse({"data": ON_NODES, "unit": "person", "labels": list(LABELS)})
    assert (config.most_of_a_person, parse({"data": "t.csv"}).most_of_a_person) == (8, 0)
    (records,) = load_own(config, DataSource(data=str(path), person_column="patient")).clients
    assert len(records) == len(rows_of())
    assert records.num_units == 40
    assert by_person(records.persons)["P003"] == [place for place, row in enumerate(rows_of()) if row[3] == "P003"]
    assert repr(records) == repr(replace(records, persons=None)), "the note of a content would change with the unit"


# ---------------------------------------------------------------- a test set apart from private data

COLUMNS = ("text", "label", "patient")
PRIVATE = [(f"the patient has pain in place {row}", "ab"[row % 2], f"P{row:03}") for row in range(40)]
OTHERS = [(f"somebody coughs for {row} days", "ab"[row % 2], f"Q{row:03}") for row in range(12)]


def jsonl(path, rows, header=COLUMNS):
    path.write_text("".join(json.dumps(dict(zip(header, row, strict=True))) + "\n" for row in rows))
    return path


@pytest.fixture
def private(tmp_path):
    return write(tmp_path / "private.csv", PRIVATE, COLUMNS)


def loaded(private, test, **changes):
    return load(parse({"data": str(private), "test_data": str(test), "num_clients": 2, "batch_size": 2, **changes}))


def moved(row, **changes):
    """The row with other values in some columns."""
    return tuple(changes.get(name, value) for name, value in zip(COLUMNS, row, strict=True))


def with_others(path, row):
    return write(path, [*OTHERS, row], COLUMNS)


LAST = r"1 record \(13\) have the text"
# {case: (how a test set is made at a path, what is said of it)}
SHARED = {
    "the same path": (lambda private, path: private, "is the file of data"),
    "a path with dots": (lambda private, path: path.parent / ".." / path.parent.name / private.name, "is the file of"),
    "a symbolic link": (lambda private, path: path.symlink_to(private), "is the file of data"),
    "a hard link": (lambda private, path: path.hardlink_to(private), "is the file of data"),
    "a copy": (lambda private, path: shutil.copy(private, path), r"40 records \(1, 2, 3, 4, 5 and 35 more"),
    "another format": (lambda _, path: jsonl(path.with_suffix(".jsonl"), PRIVATE[::-1]), "40 records .* have the text"),
    "one row": (lambda _, path: with_others(path, PRIVATE[7]), LAST),
    "a row of another": (lambda _, path: with_others(path, moved(PRIVATE[7], label="a", patient="Z")), LAST),
    "a person": (
        lambda _, path: with_others(path, ("another text", "a", "p007 ")),
        r"\(13\) are about a person in",
    ),
}


@pytest.mark.parametrize("case", SHARED)
@pytest.mark.parametrize("by_person", [False, True])
def test_a_test_set_that_is_private_data_is_refused_in_one_line(case, by_person, private, tmp_path):
    make, message = SHARED[case]
    test = make(private, tmp_path / "public.csv") or tmp_path / "public.csv"
    changes = {"person_column": "patient"} if by_person else {}
    if case == "a person" and not by_person:
        assert loaded(private, test).test.texts[-1] == "another text", "nobody said which column names persons"
    else:
        with pytest.raises(InputError, match=f"^test_data = .*{message}.*set public_data = true if nobody") as refused:
            loaded(private, test, **changes)
        assert "\n" not in str(refused.value)
    for nobody in ({"public_data": True}, {"simulate": True}):
        assert len(loaded(private, test, **changes, **nobody).test) > 0


def test_records_of_no_client_are_private_too(private, tmp_path):
    """Those without a usable label, and those beyond `max_records`: the table is the holders'."""
    test = tmp_path / "t.csv"
    for changes in ({"max_records": 2}, {"labels": ["a", "c"]}):
        with pytest.raises(InputError, match=LAST):
            loaded(private, with_others(test, moved(PRIVATE[1], label="a")), **changes)


def test_near_duplicates_are_counted_in_one_warning(private, tmp_path):
    near = {3: "The patient has PAIN, in place 3!", 4: "the patient\thas pain in place4"}
    rows = [*OTHERS, *(moved(PRIVATE[row], text=text, patient="Z") for row, text in near.items())]
    (line,) = loaded(private, write(tmp_path / "t.csv", rows, COLUMNS)).warnings[-1:]
    assert line.endswith("t.csv': 2 records with the text of one in data but for case, blanks, punctuation")
    others = write(tmp_path / "o.csv", OTHERS, COLUMNS)
    assert not any("but for case" in line for line in loaded(private, others).warnings)


@pytest.mark.parametrize("text", ["", " ", "...", "\N{PILE OF POO}"])
def test_texts_that_say_nothing_are_in_common_with_none(text, tmp_path):
    private = write(tmp_path / "private.csv", [*PRIVATE, (text, "a", "P040")], COLUMNS)
    test = with_others(tmp_path / "t.csv", (text, "a", "Q040"))
    if text.strip():  # it is a text all the same
        with pytest.raises(InputError, match=LAST):
            loaded(private, test)
    else:
        assert not any("the text of one in data" in line for line in loaded(private, test).warnings)


def test_persons_that_a_test_set_does_not_name_are_told(private, tmp_path):
    test = write(tmp_path / "t.csv", [row[:2] for row in OTHERS], COLUMNS[:2])
    assert any("has no column 'patient'" in line for line in loaded(private, test, person_column="patient").warnings)
    assert not any("has no column" in line for line in loaded(private, test).warnings)


@pytest.mark.parametrize(("answers", "is_shared"), [((), False), (("a", "b"), True)])
def test_an_answer_is_a_label_and_a_response_a_text(private, tmp_path, answers, is_shared):
    """With a few allowed answers the prompt alone is what is somebody's."""
    test = with_others(tmp_path / "t.csv", moved(PRIVATE[7], label="a", patient="Z"))
    changes = {"prompt_column": "text", "response_column": "label", "answers": list(answers)}
    if is_shared:
        with pytest.raises(InputError, match=LAST):
            loaded(private, test, **changes)
    else:
        assert len(loaded(private, test, **changes).test) == 13
    with pytest.raises(InputError, match=LAST):
        loaded(private, with_others(tmp_path / "u.csv", PRIVATE[7]), **changes)


def test_nothing_is_compared_where_records_are_on_nodes(private):
    """A refusal would tell the coordinator, whose test set it is, that its records are a node's."""
    assert len(loaded(ON_NODES, private, labels=["a", "b"]).test) == len(PRIVATE)
