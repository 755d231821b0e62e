"""A Modelfile puts chats as the run's chat template does, read by Ollama's grammar and by Go's templates."""

import json
import re
import shutil
import subprocess
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedpriv.models.publishing import gguf_files, saved
from tests.chats import CHATML, INST, chat_tokenizer
from tests.cli.command_line import fedpriv
from tests.models.publishing.runs import chat_run

WITH_DEFAULT = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are kind.<|im_end|>\n{% endif %}" + CHATML
)
HEADERS = (
    "{% for m in messages %}{% set content = '<h>' + m['role'] + '</h>\n\n' + m['content'] | trim + '<|im_end|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<h>assistant</h>\n\n' }}{% endif %}"
)
EXPRESSED = {"chatml": CHATML, "default": WITH_DEFAULT, "headers": HEADERS}
THINKING = CHATML.replace("assistant\\n' }}", "assistant\\n<think>\\n\\n</think>\\n\\n' }}")
OTHERS = {
    "without system turns": INST,
    "an answer that begins otherwise when it is asked for": THINKING,
    "a date": CHATML + "{% if strftime_now is defined and false %}{% endif %}",
    "numbers of turns": CHATML.replace("m['role']", "loop.index | string + m['role']"),
    "the last turn alone": CHATML.replace("{% for m in messages %}", "{% for m in messages[-1:] %}"),
    "texts changed": CHATML.replace("m['content']", "m['content'] | upper"),
    "signs of what is said": CHATML.replace("m['content']", "m['content'] | replace('<', '&lt;')"),
    "another text before the third question": CHATML.replace(
        "'<|im_start|>'", "('<|im_start|>' if loop.index < 5 else '')"
    ),
    "braces": CHATML.replace("'<|im_start|>'", "'<|im_start|>{' + '{'"),
}
ACTION = re.compile(r"{{ (.*?) }}")

# Go's text/template, which Ollama calls with the same names.
GO = """
package main

import (
	"encoding/json"
	"os"
	"text/template"
)

type message struct{ Role, Content string }

func main() {
	var given struct {
		Template string
		Chats    [][]message
	}
	json.NewDecoder(os.Stdin).Decode(&given)
	made := template.Must(template.New("").Option("missingkey=zero").Parse(given.Template))
	for _, chat := range given.Chats {
		system := ""
		for _, each := range chat {
			if each.Role == "system" {
				system += each.Content
			}
		}
		if err := made.Execute(os.Stdout, map[string]any{"System": system, "Messages": chat}); err != nil {
			panic(err)
		}
		os.Stdout.WriteString("\\x00")
	}
}
"""


def commands(modelfile: str) -> list[tuple[str, str]]:
    """(command, value) of each, by Ollama's grammar: a value in three quotation marks may have several lines."""
    found = re.findall(r'^([A-Z]+(?: [a-z_]+)?) (?:"""([\s\S]*?)"""|(.*))$', modelfile, re.M)
    return [(name, quoted or plain) for name, quoted, plain in found]


def as_go(template: str, chat: gguf_files.Chat) -> str:
    """What Go makes of a template of the few words that are used here: range, if, else if, eq, not, end."""
    texts, actions = ACTION.split(template)[0::2], ACTION.split(template)[1::2]
    system = "".join(text for role, text in chat if role == "system")
    start, stop = actions.index("range .Messages"), len(actions) - 1

    def written(place: int, until: int, turn: tuple[str, str]) -> str:
        said, taken, now = "", False, True
        for index in range(place, until):
            action = actions[index]
            said += texts[index] if now else ""
            if condition := re.fullmatch(r'(?:else )?if eq .Role "(\w+)"', action):
                now = condition[1] == turn[0] and not (taken and action.startswith("else"))
                taken = taken or now
            elif action == "if not .System":
                now = not system
            elif action == "end":
                now = True
            elif action == ".Content":
                said += turn[1] if now else ""
            else:
                raise AssertionError(action)
        return said + (texts[until] if now else "")

    assert actions[stop] == "end"
    turns = "".join(written(start + 1, stop, turn) for turn in chat)
    return written(0, start, ("", "")) + turns + texts[stop + 1]


def jinja(tokenizer: Any, chat: gguf_files.Chat) -> str:
    turns = [{"role": role, "content": text} for role, text in chat]
    return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))


WORDS = st.text(st.sampled_from("ab {}'\"\n<>é|%"), max_size=12).map(lambda text: f"a{text.strip()}b")
CHATS = st.tuples(st.none() | WORDS, st.lists(st.tuples(WORDS, WORDS), max_size=3), WORDS)


def chat_of(drawn: Any) -> gguf_files.Chat:
    system, before, last = drawn
    turns = [turn for said, answer in before for turn in (("user", said), ("assistant", answer))]
    return (*([("system", system)] if system is not None else []), *turns, ("user", last))


@pytest.mark.parametrize("name", EXPRESSED)
def test_a_template_of_go_writes_what_the_chat_template_writes(name):
    tokenizer = chat_tokenizer(EXPRESSED[name])
    texts = gguf_files.turn_texts(tokenizer)
    assert texts is not None
    template = texts.in_go(before="", after="")

    @settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
    @given(CHATS)
    def agrees(drawn):
        assert as_go(template, chat_of(drawn)) == jinja(tokenizer, chat_of(drawn))

    agrees()


@pytest.mark.parametrize("reason", OTHERS)
def test_a_template_that_does_more_has_none(reason):
    texts = gguf_files.turn_texts(chat_tokenizer(OTHERS[reason]))
    assert texts is None or (reason == "braces" and "{{" in texts.user[0])


@pytest.mark.skipif(shutil.which("go") is None, reason="Go is not installed")
@pytest.mark.parametrize("name", EXPRESSED)
def test_go_itself_agrees(name, tmp_path):
    tokenizer = chat_tokenizer(EXPRESSED[name])
    texts = gguf_files.turn_texts(tokenizer)
    assert texts is not None
    (tmp_path / "main.go").write_text(GO)
    chats = [*gguf_files._TRIED, (("user", "{{ .System }} \\"), ("assistant", '"""'), ("user", "%s\n\n{{ end }}"))]
    given = {
        "Template": texts.in_go(before="", after=""),
        "Chats": [[{"Role": role, "Content": text} for role, text in chat] for chat in chats],
    }
    done = subprocess.run(
        ["go", "run", "main.go"], cwd=tmp_path, input=json.dumps(given), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\0")[:-1] == [jinja(tokenizer, chat) for chat in chats]


def test_a_modelfile_puts_a_prompt_as_predict_does_and_ends_an_answer_there(tmp_path):
    system, around = 'Say "it" kindly \U0001f642\nin  one line', "Q: {}\nIn one word?"
    loaded = saved.load(saved.find(chat_run(tmp_path, system_prompt=system, prompt_template=around)))
    content, has_template = gguf_files.modelfile(loaded, has_model=True)
    found = dict(commands(content))
    assert has_template
    assert found.pop("FROM") == "./model.gguf"
    assert found.pop("SYSTEM") == system
    prompt = as_go(found.pop("TEMPLATE"), (("system", system), ("user", "what is flu")))
    tokens = loaded.tokenizer(prompt, add_special_tokens=False).input_ids
    assert tuple(tokens) == saved.prompt_tokens(loaded, "what is flu", 1)
    assert found == {
        "PARAMETER stop": "<|im_end|>",
        "PARAMETER temperature": "0",
        "PARAMETER repeat_penalty": "1",
        "PARAMETER num_predict": "8",
    }
    content, _ = gguf_files.modelfile(loaded, has_model=False)
    assert commands(content)[:2] == [("FROM", "./base.gguf"), ("ADAPTER", "./adapter.gguf")], "that of the reader"


def test_a_system_prompt_that_no_modelfile_can_hold_is_refused(tmp_path):
    run = chat_run(tmp_path, system_prompt='Quote """ so')
    said = fedpriv("export", run, tmp_path / "out", "--gguf", code=2)[1]
    assert 'system_prompt: has """' in said
    assert not (tmp_path / "out").exists()
