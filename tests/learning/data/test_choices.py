"""Choices that differ from record to record, in the forms in which public tables have them."""

import json

import pytest

from fedpriv.config import ON_NODES, parse
from fedpriv.errors import InputError
from fedpriv.learning.data._tables import read_own, read_strictly
from fedpriv.learning.data.federated import load, load_own
from fedpriv.learning.data.text import DataSource, from_choices, unpacked_choices, with_right
from tests.cli.command_line import as_json
from tests.learning.data.test_federated import write

AB = ("hot tea", "cold tea")

# Of the Hub: (values of the columns, what names the right one, labels).
FORMS = {
    "PIQA: sol1, sol2; label": (AB, 1, ()),
    "WinoGrande: option1, option2; answer": (AB, "2", ("1", "2")),
    "HellaSwag: endings; label": ([[*AB, "milk", "no"]], "1", ()),
    "ARC: choices; answerKey": ([{"text": list(AB), "label": ["A", "B"]}], "B", ()),
    "MedQA: options; answer_idx": ([{"A": AB[0], "B": AB[1], "E": None}], "B", ()),
    "MedQA: options; answer": ([{"A": AB[0], "B": AB[1]}], AB[1], ()),
    "MedMCQA: opa to opd; cop": ((*AB, "milk", "no"), 1, ()),
    "SciQ: distractor1, correct_answer; correct_answer": (AB, AB[1], ()),
    "a CSV": ([json.dumps(AB)], "1", ()),
    "fewer than there are columns": ((*AB, None, None), 1, ()),
    "numbers, by their text": (("3", "7"), "7", ()),
    "white space around them": ((" hot tea", "cold tea\n"), "cold tea ", ()),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_says_which_choice_is_right(form):
    values, response, labels = FORMS[form]
    right, choices = unpacked_choices(from_choices(values, response, labels))
    assert right == 1
    assert choices[0] == AB[0] or form.startswith("numbers")


REFUSED = {
    "is none of its choices, by their texts, names or numbers": [(AB, right, ()) for right in (2, None, "tea", "01")],
    "is none of its choices, by labels = 1,2": [(AB, "0", ("1", "2")), (AB, AB[1], ("1", "2"))],
    "none of its choices, by labels = a,b,c": [(AB, "c", ("a", "b", "c"))],
    "fewer than two": [([[]], 0, ()), ([["a"]], 0, ()), ((AB[0], None), 0, ()), ([json.dumps(AB[:1])], 0, ())],
    "a choice twice": [(("a", "a "), 0, ()), ([["a", "b", "a"]], 1, ())],
    "an empty choice": [(("a", " "), 0, ()), ([["", "b"]], 1, ()), ((None, "b"), 1, ())],
    "the text of one choice and the name of another": [(("1", "0"), 1, ()), ([["2", "3", "1"]], "2", ())],
    "holds no list of choices": [
        *((values, 0, ()) for values in (AB[:1], ["[" * 9], ["a, b"], ["3"], [7], [None])),
        *(([{"text": AB, "label": label}], 0, ()) for label in (5, "AB")),
    ],
    "holds a list, not a text": [([[["a"], "b"]], 1, ())],
}


@pytest.mark.parametrize(("why", "case"), [(why, case) for why, cases in REFUSED.items() for case in cases])
def test_a_record_without_two_choices_or_a_right_one_is_refused_by_what_is_wrong_and_not_by_its_values(why, case):
    values, response, labels = case
    with pytest.raises(ValueError, match=why) as raised:
        from_choices(values, response, labels)
    assert "tea" not in str(raised.value)


ROWS = [
    {"q": f"question {i}", "sol1": f"one {i}", "sol2": f"two {i}", "label": i % 2, "site": "xy"[i % 2]}
    for i in range(20)
]
ASKS = {"prompt_column": "q", "response_column": "label", "choice_columns": ["sol1", "sol2"]}


def test_a_run_and_a_node_read_the_same_choices_and_learn_the_right_one(tmp_path):
    files = [write(tmp_path / f"r.{kind}", ROWS) for kind in ("jsonl", "parquet", "csv")]
    sources = [DataSource(data=str(file), **ASKS | {"choice_columns": ("sol1", "sol2")}) for file in files]
    on_node = parse({**ASKS, "data": ON_NODES, "test_data": "t", "num_clients": 1})
    nodes = [load_own(on_node, source).clients[0] for source in sources]
    assert nodes[0] == nodes[1] == nodes[2]
    assert with_right(nodes[0]).pairs == tuple(f"{('one', 'two')[i % 2]} {i}" for i in range(20))
    values = {**ASKS, "client_column": "site", "simulate": True, "batch_size": 2, "test_fraction": 0.1}
    runs = [load(parse({**values, "data": str(file)})) for file in files]
    assert runs[0] == runs[1] == runs[2]
    assert {pair for part in (*runs[0].clients, runs[0].test) for pair in part.pairs} == set(nodes[0].pairs)


def test_a_run_refuses_a_record_by_its_line_and_a_node_leaves_it_out_until_it_is_registered(tmp_path):
    file = write(tmp_path / "r.jsonl", [*ROWS[:6], {**ROWS[6], "label": 2}, *ROWS[7:]])
    values = {**ASKS, "data": str(file), "client_column": "site", "simulate": True, "batch_size": 2}
    with pytest.raises(InputError, match=r"choice_columns = sol1,sol2: .*r\.jsonl: line 7 has a response that is none"):
        load(parse(values))
    source = DataSource(data=str(file), **ASKS | {"choice_columns": ("sol1", "sol2")})
    found = read_own(source)
    assert [isinstance(record, InputError) for record in found] == [place == 6 for place in range(20)]
    with pytest.raises(InputError, match=r"line 7: cannot be read .has a response that is none of its choices"):
        read_strictly(source)


def test_more_choices_than_the_run_allows_are_refused_with_the_key_to_raise(tmp_path):
    rows = [{"q": f"q {i}", "c": list("abcde")[: 3 + i % 3], "a": "a", "site": "xy"[i % 2]} for i in range(12)]
    values = {"data": str(write(tmp_path / "r.jsonl", rows)), "prompt_column": "q", "response_column": "a"}
    values |= {"choice_columns": ["c"], "client_column": "site", "simulate": True, "batch_size": 2}
    with pytest.raises(InputError, match=r"max_choices = 4: .* line 3 has 5 choices"):
        load(parse(values))
    assert load(parse({**values, "max_choices": 5})).test.pairs


def test_data_check_tells_how_many_choices_records_have_and_which_are_right(tmp_path):
    found = as_json(
        *("data", "check", write(tmp_path / "r.csv", ROWS[:19]), "--prompt", "q", "--response", "label"),
        *("--choices", "sol1", "--choices", "sol2", "--client", "site"),
    )
    assert (found["choices"], found["right"]) == ({"2": 19}, {"0": 10, "1": 9})
    assert found["words_of_responses"]["p100"] == 2
    assert found["mistakes"] == []
