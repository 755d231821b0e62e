"""The base and aliases: who may use which."""

from __future__ import annotations

import httpx
import openai
import pytest

from fedpriv.errors import InputError
from fedpriv.models.serving.http._catalogue import Catalogue
from fedpriv.models.serving.http.tokens import Tokens, add_new
from tests.models.serving.fake import NAMES, FakeServing, words
from tests.models.serving.running import running

# The last one's name is such as the clinic may use, and its variant is not.
ALIASES = {"gpt-4o-mini": "global", "hidden": "secret-variant", "plain": "base", "round-9": "client-0"}


@pytest.fixture
def engine():
    return FakeServing(names=(*NAMES, "base"), has_base=True)


@pytest.fixture
def clients(engine, tmp_path):
    """OpenAI's clients with the tokens of a clinic, and of somebody who may use all."""
    file = tmp_path / "tokens.toml"
    secrets = {"clinic": add_new(file, "clinic", ["global", "round-*"]), "all": add_new(file, "all", ["*"])}
    with running(engine, tokens=Tokens(file), aliases=ALIASES) as server:
        yield {
            name: openai.OpenAI(base_url=f"{server.url}/v1", api_key=secret, max_retries=0)
            for name, secret in secrets.items()
        }


def ids(client):
    return [model.id for model in client.models.list()]


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
