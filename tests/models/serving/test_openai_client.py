"""OpenAI's own client, as it is, talks to a real server."""

import re

import openai
import pytest

from fedpriv.models.serving.http.tokens import Tokens, add_new
from tests.models.serving.fake import NAMES, FakeServing, words
from tests.models.serving.running import running

ASKED = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what hurts?"}]


@pytest.fixture(scope="module")
def engine():
    return FakeServing(damaged=("client-1",))


@pytest.fixture(scope="module")
def clients(engine, tmp_path_factory):
    """Two of one server, with a token each."""
    file = tmp_path_factory.mktemp("tokens") / "tokens.toml"
    secrets = [add_new(file, name, ["global", "client-*"]) for name in ("clinic", "practice")]
    with running(engine, tokens=Tokens(file)) as server:
        yield [openai.OpenAI(base_url=f"{server.url}/v1", api_key=each, max_retries=0) for each in secrets]


@pytest.fixture(scope="module")
def client(clients):
    return clients[0]


def complete(client, **options):
    return client.completions.create(**{"model": "global", "prompt": "x", **options})


def chat(client, **options):
    return client.chat.completions.create(**{"model": "global", "messages": ASKED, **options})


def test_it_lists_the_models_that_the_token_may_use(client):
    assert [model.id for model in client.models.list()] == ["global", "client-0", "client-1"]
    assert client.models.retrieve("global").epsilon == 1.0


def test_a_completion_and_several_prompts_with_an_answer_each_in_their_order(client):
    answer = complete(client, prompt="say it", max_tokens=3, temperature=0, seed=1)
    assert answer.choices[0].text == "".join(words("global", "say it", 3))
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 3)
    answer = complete(client, model="client-0", prompt=["one", "two"], max_tokens=2)
    assert [each.text for each in answer.choices] == ["".join(words("client-0", p, 2)) for p in ("one", "two")]
    texts = {0: "", 1: ""}
    for event in complete(client, prompt=["one", "two"], max_tokens=2, stream=True):
        texts[event.choices[0].index] += event.choices[0].text
    assert texts == {0: "".join(words("global", "one", 2)), 1: "".join(words("global", "two", 2))}


def test_a_chat_also_of_content_in_parts(client):
    message = chat(client, model="client-0", max_completion_tokens=2).choices[0].message
    assert (message.role, message.content) == ("assistant", "".join(words("client-0", "|user=what hurts?", 2)))
    parts = [{"role": "user", "content": [{"type": "text", "text": "what "}, {"type": "text", "text": "hurts?"}]}]
    assert chat(client, messages=parts).choices == chat(client, messages=ASKED[1:]).choices


def test_a_streamed_chat_is_the_whole_one_in_pieces(client):
    *said, last = chat(client, max_tokens=4, stream=True, stream_options={"include_usage": True})
    assert said[0].choices[0].delta.role == "assistant"
    assert "".join(e.choices[0].delta.content or "" for e in said) == "".join(words("global", "|user=what hurts?", 4))
    assert said[-1].choices[0].finish_reason == "length"
    assert (last.choices, last.usage.completion_tokens) == ([], 4)
    assert all(event.usage is None for event in said)


def test_n_answers_a_prompt_with_a_choice_each_and_its_tokens_count_once(client):
    answer = chat(client, max_tokens=2, n=3)
    assert [each.index for each in answer.choices] == [0, 1, 2]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len("system=be brief|user=what hurts?"), 6)
    prompts = complete(client, prompt=["one", "two"], max_tokens=1, n=2)
    assert [each.text for each in prompts.choices] == [words("global", p, 1)[0] for p in ("one", "one", "two", "two")]
    assert prompts.usage.prompt_tokens == 6
    events = list(chat(client, max_tokens=2, n=2, stream=True))
    for index in (0, 1):
        own = [event.choices[0] for event in events if event.choices[0].index == index]
        assert own[0].delta.role == "assistant"
        assert "".join(each.delta.content or "" for each in own) == "".join(words("global", "|user=what hurts?", 2))
        assert own[-1].finish_reason == "length"


def test_log_probabilities_of_a_chat_whole_and_streamed(client):
    options = {"max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    (choice,) = chat(client, **options).choices
    said = words("global", "|user=what hurts?", 3)
    assert [(each.token, each.logprob, bytes(each.bytes).decode()) for each in choice.logprobs.content] == [
        (word, -0.5, word) for word in said
    ]
    tops = choice.logprobs.content[1].top_logprobs
    assert [(each.token, each.logprob) for each in tops] == [(said[1], -0.5), ("other-1", -1.5)]
    streamed = [event.choices[0] for event in chat(client, **options, stream=True)]
    content = [each for choice in streamed if choice.logprobs for each in choice.logprobs.content]
    assert content == choice.logprobs.content
    bare = chat(client, **options | {"top_logprobs": None}).choices[0]
    assert [each.top_logprobs for each in bare.logprobs.content] == [[], [], []]
    assert chat(client).choices[0].logprobs is None
    with pytest.raises(openai.BadRequestError, match="only with logprobs"):
        chat(client, top_logprobs=2)


def test_log_probabilities_of_a_completion_whole_and_streamed(client):
    options = {"prompt": "one", "max_tokens": 2, "logprobs": 2}
    found = complete(client, **options).choices[0].logprobs
    said = words("global", "one", 2)
    assert (found.tokens, found.token_logprobs, found.text_offset) == (said, [-0.5, -0.5], [0, len(said[0])])
    assert found.top_logprobs[0] == {said[0]: -0.5, "other-1": -1.5}
    parts = [event.choices[0].logprobs for event in complete(client, **options, stream=True)]
    assert [token for part in parts if part for token in part.tokens] == said
    none = complete(client, **options | {"logprobs": 0}).choices[0].logprobs
    assert (none.tokens, none.top_logprobs) == (said, None)


def test_the_draw_is_as_it_was_asked_for(client, engine):
    penalties = {"presence_penalty": -2.0, "frequency_penalty": 1.5}
    complete(client, temperature=0.5, top_p=0.25, seed=7, n=2, **penalties, extra_body={"top_k": 40})
    first, second = engine.asked[-2:]
    assert (first.top_k, first.top_p, first.temperature, first.seed, second.seed) == (40, 0.25, 0.5, 7, 8)
    assert (first.presence_penalty, first.frequency_penalty) == (-2.0, 1.5)
    complete(client)
    last = engine.asked[-1]
    assert (last.top_k, last.presence_penalty, last.num_alternatives) == (0, 0, None)


def test_a_refusal_names_the_parameter_its_value_and_the_limit_in_one_line(client):
    for wrong, says in (
        ({"presence_penalty": 2.5}, "presence_penalty = 2.5: must be less than or equal to 2."),
        ({"frequency_penalty": -3}, "frequency_penalty = -3: must be greater than or equal to -2."),
        ({"stop": list("abcde")}, "stop has 5 entries: at most 4."),
        ({"logprobs": 6}, "logprobs = 6: must be less than or equal to 5."),
        ({"n": 65}, "n = 65: 65 answers in all; at most 64."),
        ({"n": 33, "prompt": ["a", "b"]}, "n = 33: 66 answers in all; at most 64."),
        ({"n": 0}, "n = 0: must be greater than or equal to 1."),
        (
            {"n": 11, "logprobs": 5, "max_tokens": 256},
            "logprobs = 5: 16896 log-probabilities, of 11 answers of up to 256 tokens; at most 16384.",
        ),
        ({"extra_body": {"top_k": -2}}, "top_k = -2: must be greater than or equal to 0."),
        ({"prompt": 5}, "prompt = 5: must be a text or a list."),
        ({"echo": True}, "echo = true: must be false."),
        ({"stream_options": 5}, "stream_options = 5: must be an object."),
        ({"logit_bias": {"5": 1}}, "logit_bias: this server takes none; leave it out."),
        ({"extra_body": {"min_p": 0.1}}, "'min_p': this server does not know it; leave it out."),
        ({"extra_body": {"min_p": False}}, "'min_p': this server does not know it; leave it out."),
        ({"max_tokens": 257}, "max_tokens = 257: at most 256 here."),
        ({"prompt": []}, "prompt: must have at least 1 item after validation, not 0."),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            complete(client, **wrong)
        assert refused.value.body["message"] == says
        assert re.match(f"'?{refused.value.param}[ :']", says)


def test_n_answers_and_log_probabilities_count_as_inputs_of_a_token(clients, engine, monkeypatch):
    """Two answers that are told in full take most of what a token may have under way."""
    monkeypatch.setattr(engine, "seconds", 0.1)  # so that none ends before the last is asked
    told = {"max_tokens": 256, "logprobs": True, "top_logprobs": 20, "n": 3}
    # Each with a token of its own: answers of the first one that nobody reads may still be under way.
    for client, ask, asked, number in (
        (clients[0], complete, {"max_tokens": 200, "n": 64}, 128),
        (clients[1], chat, told, 126),
    ):
        too_many = pytest.raises(openai.RateLimitError, match=f"{number} texts or prompts under way")
        with ask(client, **asked, stream=True), ask(client, **asked, stream=True), too_many:
            ask(client, **asked)


def test_its_errors_are_the_client_s_own(client):
    with pytest.raises(openai.NotFoundError, match="does not exist") as unknown:
        complete(client, model="secret-variant")
    assert unknown.value.code == "model_not_found"
    assert "secret-variant" in NAMES
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="fedpriv-wrong").models.list()


def test_a_damaged_variant_is_refused_by_name_and_the_others_answer(client):
    with pytest.raises(openai.InternalServerError, match=r"'client-1' cannot be read") as refused:
        complete(client, model="client-1")
    assert "/srv" not in str(refused.value)
    with pytest.raises(openai.APIError, match="cannot be read"):
        list(complete(client, model="client-1", stream=True))
    assert complete(client, model="client-0").choices[0].text


def test_the_servers_own_answer_is_the_history_of_the_next_turn(client):
    first = chat(client, max_tokens=3).choices[0].message
    turns = [*ASKED, first, {"role": "user", "content": "and now?"}]
    for answer in (first, first.to_dict(), {"role": "assistant", "content": None, "tool_calls": []}):
        turns[2] = answer
        assert chat(client, messages=turns, max_tokens=2).choices[0].message.content
    turns[2] = {"role": "assistant", "content": None, "refusal": "no"}
    with pytest.raises(openai.BadRequestError, match=r"messages\.2\.refusal.*does not know it") as refused:
        chat(client, messages=turns)
    assert refused.value.param == "messages.2.refusal"


IDLE = {
    **dict.fromkeys(("tools", "functions", "metadata", "reasoning_effort", "prediction", "audio", "function_call")),
    **{"tool_choice": "none", "parallel_tool_calls": True, "store": False, "service_tier": "auto", "verbosity": None},
    **{"modalities": ["text"], "logprobs": False, "top_logprobs": 0, "seed": -1, "top_k": -1, "min_p": 0.0},
    **{"repetition_penalty": 1.0, "stop": None, "logit_bias": {}, "web_search_options": {}, "max_tokens": 2.0},
}


def test_fields_that_ask_for_nothing_change_nothing(client, engine):
    chat(client, max_tokens=2)
    chat(client, extra_body={**IDLE, "tools": []})
    assert engine.asked[-1] == engine.asked[-2]
    options = {"include_usage": True, "include_obfuscation": False}
    assert list(chat(client, max_tokens=2, stream=True, extra_body={"stream_options": options}))


def test_an_answer_is_held_to_no_form_and_a_request_for_one_is_refused_in_one_line(client):
    for kind, more in (("json_object", {}), ("json_schema", {"json_schema": {"name": "x", "schema": {}}})):
        with pytest.raises(openai.BadRequestError) as refused:
            chat(client, response_format={"type": kind, **more})
        assert refused.value.body["message"] == f"response_format.type = '{kind}': must be 'text'."
    assert chat(client, response_format={"type": "text"}).choices
