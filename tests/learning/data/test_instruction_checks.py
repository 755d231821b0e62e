"""`data check` of prompts and responses: what would be cut, and records as the model sees them."""

import pytest

from fedpriv.config import parse
from fedpriv.errors import InputError
from fedpriv.learning.data._checks import describe_instructions
from tests.chats import chat_model, chat_tokenizer
from tests.cli.command_line import as_json, fedpriv
from tests.learning.data.test_federated import write

ROWS = [
    {"q": "What is flu?", "a": "A viral disease.", "site": "x"},
    {"q": "What is flu?", "a": "", "site": "x"},
    {"q": "rash " * 9, "a": "cough " * 90, "site": "y"},
    {"q": "rash " * 90, "a": "cough", "site": "y"},
]


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "r.jsonl", ROWS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return chat_model(tmp_path_factory.mktemp("chat"))


ASKS = ("--prompt", "q", "--response", "a")


def test_every_count(file):
    config = parse({"data": str(file), "prompt_column": "q", "response_column": "a", "max_length": 60})
    found, shown = describe_instructions(config, client="site", tokenizer=chat_tokenizer())
    tokens, responses = found.pop("tokens"), found.pop("tokens_of_responses")
    assert found == {
        "records": 4,
        "empty_responses": 1,
        "duplicate_prompts": 1,
        "words_of_prompts": {"p0": 3.0, "p50": 6.0, "p95": pytest.approx(77.85), "p100": 90.0},
        "words_of_responses": {"p0": 0.0, "p50": 2.0, "p95": pytest.approx(76.95), "p100": 90.0},
        "clients": {"x": 2, "y": 2},
        "max_length": 60,
        "prompts_cut": 1,
        "responses_cut": 1,
        "responses_cut_away": 0,
        "unusable": 1,
    }
    assert tokens["p100"] > 90 < responses["p100"]
    assert [[learned for _, learned in parts] for parts in shown] == [[False, True]] * 3
    assert shown[0][1][0] == "A viral disease.<|im_end|>"


def test_the_command_shows_records_with_what_is_learned_in_brackets(file, folder):
    out, _ = fedpriv("data", "check", file, *ASKS, "--model", folder, "--max-length", 60, "--system", "You are kind.")
    first = "<|im_start|>system\nYou are kind.<|im_end|>\n<|im_start|>user\nWhat is flu?<|im_end|>\n"
    assert first + "<|im_start|>assistant\n[[A viral disease.<|im_end|>]]" in out
    assert out.count("[[") == 3
    assert "responses_cut" in out
    values = as_json("data", "check", file, *ASKS, "--model", folder, "--max-length", 60, "--template", "answer: {}")
    assert values["samples"][0][0]["text"].count("answer: What is flu?") == 1
    assert [part["learned"] for part in values["samples"][0]] == [False, True]


def test_without_a_model_words_are_counted(file):
    values = as_json("data", "check", file, *ASKS)
    assert values["records"] == 4
    assert not {"tokens", "samples"} & values.keys()


def test_messages_are_read_as_a_run_reads_them(tmp_path):
    chat = [{"role": "user", "content": "flu?"}, {"role": "assistant", "content": "A disease."}]
    path = write(tmp_path / "m.jsonl", [{"m": messages} for messages in (chat, chat[:1], chat)])
    values = as_json("data", "check", path, "--messages", "m")
    assert (values["records"], values["empty_responses"]) == (3, 1)


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
def test_what_cannot_be_checked_is_one_line(file, folder, given, message):
    more = ("--model", folder) if "--max-length" in given else ()
    _, err = fedpriv("data", "check", file, *given, *more, code=2)
    assert message in err
    assert err.count("\n") == 1


def test_an_empty_table_is_refused(tmp_path):
    path = write(tmp_path / "r.jsonl", [])
    with pytest.raises(InputError, match="holds no records"):
        describe_instructions(parse({"data": str(path), "prompt_column": "q", "response_column": "a"}))
