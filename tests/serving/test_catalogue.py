"""The base, aliases, and variants that come and go: who may use which, and who may change it."""

from __future__ import annotations

import json
from urllib.parse import quote

import httpx
import openai
import pytest

from fedpriv.errors import InputError
from fedpriv.serving.http._catalogue import Catalogue
from fedpriv.serving.http.tokens import Tokens, add_new
from tests.serving.fake import NAMES, FakeCards, FakeServing, words
from tests.serving.hostile import STRANGE_NAMES
from tests.serving.running import running

# The last one's name is such as the clinic may use, and its variant is not.
ALIASES = {"gpt-4o-mini": "global", "hidden": "secret-variant", "plain": "base", "round-9": "client-0"}


@pytest.fixture
def engine():
    return FakeServing(names=(*NAMES, "base"), has_base=True, kept=("round-4", "client-9"), damaged=("client-9",))


@pytest.fixture
def clients(engine, tmp_path):
    """OpenAI's clients with the tokens of a clinic, of somebody who may use all, and of an administrator."""
    file = tmp_path / "tokens.toml"
    secrets = {
        "clinic": add_new(file, "clinic", ["global", "round-*"]),
        "all": add_new(file, "all", ["*"]),
        "admin": add_new(file, "admin", [], admin=True),
    }
    with running(engine, tokens=Tokens(file), aliases=ALIASES) as server:
        yield {
            name: openai.OpenAI(base_url=f"{server.url}/v1", api_key=secret, max_retries=0)
            for name, secret in secrets.items()
        }


def ids(client):
    return [model.id for model in client.models.list()]


def load(client, name):
    return client.post("/models", body={"model": name}, cast_to=httpx.Response)


def test_an_alias_opens_what_the_token_may_use_anyway_and_nothing_else(clients):
    clinic = clients["clinic"]
    assert ids(clinic) == ["global", "round-3", "gpt-4o-mini"]
    answer = clinic.completions.create(model="gpt-4o-mini", prompt="x", max_tokens=2)
    assert (answer.model, answer.choices[0].text) == ("global", "".join(words("global", "x", 2)))
    card = clinic.models.retrieve("gpt-4o-mini")
    assert (card.id, card.alias_of, card.epsilon) == ("gpt-4o-mini", "global", 1.0)
    for name in ("hidden", "plain", "round-9", "secret-variant", "nobody"):
        with pytest.raises(openai.NotFoundError) as refused:
            clinic.completions.create(model=name, prompt="x")
        assert refused.value.body["message"].replace(name, "N").startswith("The model 'N' does not exist")
    assert set(ALIASES) < set(ids(clients["all"]))


@pytest.mark.parametrize(
    ("aliases", "says"),
    [
        ({"global": "client-0"}, "is the name of a variant"),
        ({"../x": "global"}, "must be letters"),
        ({"a": "nobody"}, "there is no variant 'nobody'"),
        ({"a": "global", "b": "a"}, "there is no variant 'a'"),
    ],
)
def test_an_alias_that_stands_for_nothing_or_hides_a_variant_is_refused(engine, aliases, says):
    with pytest.raises(InputError, match=says):
        Catalogue(engine, aliases)


def test_the_base_says_that_it_is_public_and_has_no_epsilon(clients):
    everyone = clients["all"]
    card = everyone.models.retrieve("base")
    assert card.is_base
    assert "no holder's record" in card.note
    assert not hasattr(card, "epsilon")
    assert everyone.completions.create(model="base", prompt="x", max_tokens=1).choices[0].text == "base:x:0 "
    with pytest.raises(openai.NotFoundError):
        clients["clinic"].completions.create(model="base", prompt="x")
    both = everyone.get("/models/global?with=base", cast_to=httpx.Response).json()["together"]
    assert (both["epsilon"], both["models"]) == (1.0, ["base", "global"]), "the base adds nothing"
    alone = everyone.get("/models/base?with=plain", cast_to=httpx.Response).json()["together"]
    assert alone["is_base"]
    reader = everyone.get("/reader", cast_to=httpx.Response).json()
    assert (len(reader["models"]), reader["epsilon"]) == (len(NAMES) + 1, 0.5 + 0.5 * len(NAMES))


def test_an_administrator_loads_and_unloads_and_reads_nothing(clients, engine):
    admin, clinic, everyone = (clients[name] for name in ("admin", "clinic", "all"))
    assert ids(admin) == []
    assert load(admin, "round-4").json()["id"] == "round-4"
    assert clinic.completions.create(model="round-4", prompt="x", max_tokens=1).choices[0].text
    with pytest.raises(openai.NotFoundError):
        admin.completions.create(model="round-4", prompt="x")
    deleted = admin.models.delete("round-4")
    assert (deleted.id, deleted.deleted) == ("round-4", True)
    for client in (clinic, everyone):
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="round-4", prompt="x")
    admin.models.delete("global")
    with pytest.raises(openai.NotFoundError):
        clinic.completions.create(model="gpt-4o-mini", prompt="x")
    assert "gpt-4o-mini" not in ids(clinic)
    load(admin, "global")
    assert clinic.completions.create(model="gpt-4o-mini", prompt="x", max_tokens=1).model == "global"


def test_what_cannot_be_loaded_or_unloaded_says_why(clients):
    admin = clients["admin"]
    for name, kind, says in (
        ("global", openai.ConflictError, "it is loaded"),
        ("gpt-4o-mini", openai.ConflictError, "it is an alias"),
        ("nobody", openai.NotFoundError, "does not exist"),
        ("client-9", openai.InternalServerError, "damaged"),
    ):
        with pytest.raises(kind, match=says) as refused:
            load(admin, name)
        assert "/srv" not in str(refused.value)
    with pytest.raises(openai.NotFoundError):
        admin.models.delete("nobody")


def test_without_the_right_nothing_is_loaded_or_told(clients, engine):
    before = engine.names
    for client in (clients["clinic"], clients["all"]):
        for name in ("global", "round-4", "nobody", "secret-variant"):
            messages = set()
            for change in (lambda c, n: c.models.delete(n), load):
                with pytest.raises(openai.PermissionDeniedError) as refused:
                    change(client, name)
                messages.add(refused.value.body["message"])
            assert messages == {"This token may not load or unload models."}
    assert engine.names == before
    with running(FakeServing()) as server:
        assert httpx.delete(f"{server.url}/v1/models/global").status_code == 403


def test_a_hostile_name_loads_and_unloads_nothing(clients, engine):
    before = engine.names
    base = str(clients["admin"].base_url)
    headers = {"Authorization": f"Bearer {clients['admin'].api_key}", "Content-Type": "application/json"}
    with httpx.Client(headers=headers) as client:
        for name in (*STRANGE_NAMES, "", "a" * 10_000, "..", "variants/global", "round-4/../global"):
            answers = [client.post(f"{base}models", content=json.dumps({"model": name}))]
            answers.append(client.delete(f"{base}models/{quote(name, safe='')}"))
            for answer in answers:
                assert 400 <= answer.status_code < 500, name
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}, name
            assert engine.names == before, name


def test_cards_are_read_anew_when_a_variant_has_come(tmp_path):
    file, cards = tmp_path / "tokens.toml", FakeCards()
    secret = add_new(file, "admin", [], admin=True)
    with running(FakeServing(kept=("round-4",)), tokens=Tokens(file), cards=cards) as server:
        load(openai.OpenAI(base_url=f"{server.url}/v1", api_key=secret, max_retries=0), "round-4")
    assert cards.num_forgotten == 1
