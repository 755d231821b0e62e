"""Answers that keep to a JSON schema, and schemas that would cost too much."""

from __future__ import annotations

import contextlib
import json
import sys
import time

import openai
import pytest

from fedpriv.serving._forms import check_schema
from fedpriv.serving.requests import ServingError
from tests.chats import chat_model
from tests.served import save_run, serving
from tests.serving.fake import FakeServing
from tests.serving.hostile import HOSTILE_SCHEMAS
from tests.serving.running import running

ASKED = [{"role": "user", "content": "what hurts?"}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ann", "Zoë", "日本"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "pains": {"type": "array", "items": {"$ref": "#/$defs/pain"}, "minItems": 1, "maxItems": 2},
        "note": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 5}]},
    },
    "required": ["name", "age", "pains", "note"],
    "additionalProperties": False,
    "$defs": {"pain": {"const": "knee"}},
}


def named(schema):
    return {"type": "json_schema", "json_schema": {"name": "patient", "schema": schema, "strict": True}}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    pytest.importorskip("llguidance")
    model = chat_model(tmp_path_factory.mktemp("chat") / "model")
    columns = {"prompt_column": "prompt", "response_column": "response", "data": "x.csv"}
    values = {"model": str(model), "task": "CAUSAL_LM", "layers": "all", "normalize_features": False, **columns}
    run = save_run(tmp_path_factory.mktemp("served") / "run", values, ("global", "client-0"), scale=0.5)
    with serving(run) as scheduler, running(scheduler) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def ask(client, form, **options):
    options = {"model": "global", "messages": ASKED, "max_tokens": 90, **options}
    return client.chat.completions.create(**options, response_format=form)


@pytest.mark.parametrize(
    "draw", [{"temperature": 0}, {"temperature": 1.5, "seed": 3}, {"temperature": 2, "top_p": 0.9}]
)
def test_every_finished_answer_is_a_document_of_the_schema(client, draw):
    import jsonschema  # deferred: it builds the grammar of links, which takes a second

    answers = [ask(client, named(PERSON), model=name, n=3, **draw).choices for name in ("global", "client-0")]
    finished = [each for choices in answers for each in choices if each.finish_reason == "stop"]
    assert len(finished) == 6
    for each in finished:
        jsonschema.validate(json.loads(each.message.content), PERSON)
    if draw["temperature"]:
        assert len({each.message.content for each in finished}) > 1


def test_any_object_and_a_stream_of_one(client):
    events = ask(client, {"type": "json_object"}, stream=True, temperature=1.0, seed=1)
    text = "".join(event.choices[0].delta.content or "" for event in events)
    assert text.startswith("{")
    assert "\n" not in text
    whole = ask(client, {"type": "json_object"}, temperature=1.0, seed=1)
    assert whole.choices[0].message.content == text
    if whole.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


def test_neighbours_without_a_form_are_as_without_those_that_have_one(client):
    alone = client.chat.completions.create(model="global", messages=ASKED, temperature=0, max_tokens=20)
    formed = ask(client, named(PERSON), stream=True)
    beside = client.chat.completions.create(model="global", messages=ASKED, temperature=0, max_tokens=20)
    formed.close()
    assert beside.choices[0].message.content == alone.choices[0].message.content


@pytest.mark.parametrize("kind", HOSTILE_SCHEMAS)
def test_a_hostile_schema_is_refused_in_little_time_and_the_server_goes_on(client, kind):
    started = time.perf_counter()
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, named(HOSTILE_SCHEMAS[kind]))
    assert time.perf_counter() - started < 5
    assert refused.value.param in ("response_format", None)
    message = refused.value.body["message"]
    assert "\n" not in message
    assert len(message) < 400
    assert ask(client, named({"enum": ["a"]})).choices[0].message.content == '"a"'


def test_schemas_that_are_costly_and_allowed_take_little_time_a_token(client):
    """Each is as large as it may be, and makes a matcher work for every token."""
    ambiguous = {"anyOf": [{"type": "array", "items": {"$ref": "#"}, "maxItems": k} for k in range(2, 9)]}
    for schema in (
        {"const": "a" * 8000},
        {"anyOf": [{"type": "string", "minLength": 7 * k, "maxLength": 10**9} for k in range(20)]},
        {"enum": [f"value-{k}" for k in range(500)]},
        {"type": "array", "minItems": 10**6, "items": {"type": "integer"}},
        ambiguous,
    ):
        started = time.perf_counter()
        with contextlib.suppress(openai.BadRequestError):  # more work than a step may take
            ask(client, named(schema), max_tokens=30)
        assert time.perf_counter() - started < 5


def test_a_keyword_is_known_where_it_is_one_and_a_property_may_have_its_name():
    check_schema({"properties": {"pattern": {"type": "string"}, "multipleOf": {"enum": [{"pattern": "x"}]}}})
    for hidden in (
        {"properties": {"a": {"items": {"anyOf": [{"pattern": "x"}]}}}},
        {"$defs": {"a": {"multipleOf": 7}}},
        {"definitions": {"a": {"x-guidance": {"lenient": True}}}},
        {"additionalProperties": {"prefixItems": [{"patternProperties": {}}]}},
    ):
        with pytest.raises(ServingError, match="is not known here"):
            check_schema(hidden)
    for reference in ("#/enum/0", "#/$defs/a/properties/b", "http://x/y", "", 7, "#/const", "#a"):
        with pytest.raises(ServingError, match=r"\$ref must lead to"):
            check_schema({"$ref": reference})


def test_without_the_library_it_is_refused_by_one_line(tmp_path, monkeypatch):
    from fedpriv.serving._forms import JsonForms

    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ServingError, match=r"pip install 'fedpriv\[forms\]'") as refused:
        JsonForms(None, ()).of({"type": "object"})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"type": "xml"}, "response_format"),
        ({"type": "json_schema"}, "json_schema: is missing"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "schema: is missing"),
        ({"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}, "must match pattern"),
        ({"type": "json_object", "schema": {}}, "does not know it"),
    ],
)
def test_a_wrong_form_is_named(wrong, says):
    with running(FakeServing()) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.BadRequestError, match=says):
            client.chat.completions.create(model="global", messages=ASKED, response_format=wrong)
        text = client.chat.completions.create(model="global", messages=ASKED, response_format={"type": "text"})
        assert text.choices[0].message.content
