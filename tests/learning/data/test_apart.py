"""A test set that is shown without noise holds no record and no person of private data, by whatever name it comes."""

import json
import shutil

import pytest

from fedpriv.config import ON_NODES, parse
from fedpriv.errors import InputError
from fedpriv.learning.data import load
from tests.learning.data.test_persons import write

HEADER = ("text", "label", "patient")
PRIVATE = [(f"the patient has pain in place {row}", "ab"[row % 2], f"P{row:03}") for row in range(40)]
OTHERS = [(f"somebody coughs for {row} days", "ab"[row % 2], f"Q{row:03}") for row in range(12)]


def jsonl(path, rows, header=HEADER):
    path.write_text("".join(json.dumps(dict(zip(header, row, strict=True))) + "\n" for row in rows))
    return path


@pytest.fixture
def private(tmp_path):
    return write(tmp_path / "private.csv", PRIVATE, HEADER)


def loaded(private, test, **changes):
    return load(parse({"data": str(private), "test_data": str(test), "num_clients": 2, "batch_size": 2, **changes}))


def moved(row, **changes):
    """The row with other values in some columns."""
    return tuple(changes.get(name, value) for name, value in zip(HEADER, row, strict=True))


def with_others(path, row):
    return write(path, [*OTHERS, row], HEADER)


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


NEAR = [
    moved(PRIVATE[3], text="The patient has PAIN, in place 3!"),
    moved(PRIVATE[4], text="the patient\thas pain in place4"),
]


def test_near_duplicates_are_counted_in_one_warning(private, tmp_path):
    rows = [*OTHERS, *(moved(row, patient="Z") for row in NEAR)]
    (line,) = loaded(private, write(tmp_path / "t.csv", rows, HEADER)).warnings[-1:]
    assert line.endswith("t.csv': 2 records with the text of one in data but for case, blanks, punctuation")
    others = write(tmp_path / "o.csv", OTHERS, HEADER)
    assert not any("but for case" in line for line in loaded(private, others).warnings)


@pytest.mark.parametrize("text", ["", " ", "...", "\N{PILE OF POO}"])
def test_texts_that_say_nothing_are_in_common_with_none(text, tmp_path):
    private = write(tmp_path / "private.csv", [*PRIVATE, (text, "a", "P040")], HEADER)
    test = with_others(tmp_path / "t.csv", (text, "a", "Q040"))
    if text.strip():  # it is a text all the same
        with pytest.raises(InputError, match=LAST):
            loaded(private, test)
    else:
        assert not any("the text of one in data" in line for line in loaded(private, test).warnings)


def test_persons_that_a_test_set_does_not_name_are_told(private, tmp_path):
    test = write(tmp_path / "t.csv", [row[:2] for row in OTHERS], HEADER[:2])
    assert any("has no column 'patient'" in line for line in loaded(private, test, person_column="patient").warnings)
    assert not any("has no column" in line for line in loaded(private, test).warnings)


PROMPTS = {"prompt_column": "text", "response_column": "label"}


@pytest.mark.parametrize(("answers", "is_shared"), [((), False), (("a", "b"), True)])
def test_an_answer_is_a_label_and_a_response_a_text(private, tmp_path, answers, is_shared):
    """With a few allowed answers the prompt alone is what is somebody's."""
    test = with_others(tmp_path / "t.csv", moved(PRIVATE[7], label="a", patient="Z"))
    changes = {**PROMPTS, "answers": list(answers)}
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
