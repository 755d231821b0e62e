"""OpenAI's own client, as it is, talks to a real server."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from fedpriv.serving.http.tokens import Tokens, add_new
from tests.serving.fake import NAMES, FakeServing, words
from tests.serving.running import running

ASKED = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what hurts?"}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    file = tmp_path_factory.mktemp("tokens") / "tokens.toml"
    secret = add_new(file, "clinic", ["global", "client-*"])
    with running(FakeServing(damaged=("client-1",)), tokens=Tokens(file)) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key=secret, max_retries=0)


def test_it_lists_the_models_that_the_token_may_use(client):
    assert [model.id for model in client.models.list()] == ["global", "client-0", "client-1"]
    assert client.models.retrieve("global").epsilon == 1.0


def test_a_completion(client):
    answer = client.completions.create(model="global", prompt="say it", max_tokens=3, temperature=0, seed=1)
    assert answer.choices[0].text == "".join(words("global", "say it", 3))
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == 6
    assert answer.usage.completion_tokens == 3


def test_several_prompts_have_an_answer_each_in_their_order(client):
    answer = client.completions.create(model="client-0", prompt=["one", "two"], max_tokens=2)
    assert [each.text for each in answer.choices] == ["".join(words("client-0", p, 2)) for p in ("one", "two")]


def test_a_chat(client):
    answer = client.chat.completions.create(model="client-0", messages=ASKED, max_completion_tokens=2)
    assert answer.choices[0].message.content == "".join(words("client-0", "|user=what hurts?", 2))
    assert answer.choices[0].message.role == "assistant"


def test_content_in_parts_is_the_same_chat(client):
    parts = [{"role": "user", "content": [{"type": "text", "text": "what "}, {"type": "text", "text": "hurts?"}]}]
    whole = client.chat.completions.create(model="global", messages=[{"role": "user", "content": "what hurts?"}])
    assert client.chat.completions.create(model="global", messages=parts).choices == whole.choices


def test_a_streamed_chat_is_the_whole_one_in_pieces(client):
    options = {"include_usage": True}
    events = list(
        client.chat.completions.create(
            model="global", messages=ASKED, max_tokens=4, stream=True, stream_options=options
        )
    )
    *said, last = events
    assert said[0].choices[0].delta.role == "assistant"
    assert "".join(e.choices[0].delta.content or "" for e in said) == "".join(words("global", "|user=what hurts?", 4))
    assert said[-1].choices[0].finish_reason == "length"
    assert (last.choices, last.usage.completion_tokens) == ([], 4)
    assert all(event.usage is None for event in said)


def test_a_streamed_completion_of_two_prompts(client):
    texts = {0: "", 1: ""}
    for event in client.completions.create(model="global", prompt=["one", "two"], max_tokens=2, stream=True):
        texts[event.choices[0].index] += event.choices[0].text
    assert texts == {0: "".join(words("global", "one", 2)), 1: "".join(words("global", "two", 2))}


def test_its_errors_are_the_client_s_own(client):
    with pytest.raises(openai.NotFoundError, match="does not exist") as unknown:
        client.completions.create(model="secret-variant", prompt="x")
    assert unknown.value.code == "model_not_found"
    assert "secret-variant" in NAMES
    with pytest.raises(openai.BadRequestError, match="at most 256"):
        client.completions.create(model="global", prompt="x", max_tokens=10**6)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="fedpriv-wrong").models.list()


def test_a_damaged_variant_is_refused_by_name_and_the_others_answer(client):
    with pytest.raises(openai.InternalServerError, match=r"'client-1' is damaged") as refused:
        client.completions.create(model="client-1", prompt="x")
    assert "/srv" not in str(refused.value)
    with pytest.raises(openai.APIError, match="damaged"):
        list(client.completions.create(model="client-1", prompt="x", stream=True))
    assert client.completions.create(model="client-0", prompt="x").choices[0].text
