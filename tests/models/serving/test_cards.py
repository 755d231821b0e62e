"""What a variant cost, and several together, from what lies beside them; and who may use the base and aliases."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from fedpriv.errors import InputError
from fedpriv.models.serving.http.cards import Cards, Catalogue
from fedpriv.models.serving.http.tokens import Tokens, add_new
from fedpriv.models.variants import Store, folders, stored_models
from fedpriv.models.variants.composition import History, Upload
from fedpriv.privacy.accounting import Event, SubsampledGaussian, epsilon_of, risk_of
from fedpriv.texts import percent_up
from server.registry import client_ancestors, global_ancestors
from tests.models.serving.fake import NAMES, FakeServing, words
from tests.models.serving.running import running
from tests.stores import add, damage_index, described

EVENT = SubsampledGaussian(noise_multiplier=2.0, sampling_probability=0.1)
DELTAS = {"A": 1e-5, "B": 1e-6}
UPLOADS = [Upload(data_set=id_, run="r", round=round_, event=EVENT) for id_ in DELTAS for round_ in (1, 2, 3)]

# Of three rounds of clients A and B: the last global model, an earlier one, and both clients' last uploads.
ANCESTORS = {
    "global": global_ancestors(UPLOADS, "r", 3),
    "round-1": global_ancestors(UPLOADS, "r", 1),
    "client-A": client_ancestors(UPLOADS, "r", 3, "A"),
    "client-B": client_ancestors(UPLOADS, "r", 3, "B"),
}

# Of every one, as a store states them.
COSTS: dict[str, dict[str, object]] = {name: {"epsilon": 50.0, "delta": 1e-5} for name in ANCESTORS}

# The last one's name is such as the clinic may use, and its variant is not.
ALIASES = {"gpt-4o-mini": "global", "hidden": "secret-variant", "plain": "base", "round-9": "client-0"}


def describe(folder: Path, name: str, history: History | None = None) -> None:
    history = history or History(name=name, ancestors=ANCESTORS[name])
    variant = described(name, utility=0.75, deltas=DELTAS, history=history)
    folders.write(folder / name, variant, {"w": np.zeros(4, np.float32)})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder."""
    for name in ANCESTORS:
        describe(tmp_path / "variants", name)
    summary = {"noise_source": "secure", "ledger_head": "abc", "epsilon_local_max": float("inf"), "unit": "record"}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    return tmp_path


def store(path: Path, privacy: dict[str, dict[str, object]], bases: dict[str, list[str]], **outcome: object) -> Path:
    """A store of variants with what deduplication would have noted."""
    outcome = outcome or {"utility_before": 0.7, "utility_after": 0.7}
    with Store(path) as opened:
        for name, costs in privacy.items():
            provenance = {"bases": bases.get(name, []), "outcome": outcome}
            add(opened, name, {"w": np.arange(8, dtype=np.float32)}, 4, privacy=costs, provenance=provenance)
    return path


def spent(rounds: int, delta: float = 1e-6, event: Event = EVENT) -> float:
    return epsilon_of([event] * rounds, delta).epsilon


def test_a_variant_costs_its_uploads_at_the_data_set_that_pays_most(run):
    card = Cards(run).card("round-1")
    assert card["epsilon"] == spent(1)
    assert (card["delta"], card["unit"], card["accuracy"], card["is_guarantee"]) == (1e-5, "record", 0.75, True)
    assert card["adjacency"] == "one record of the client added or removed"
    assert card["ancestors"] == {"num_uploads": 2, "uploads_of_data_sets": {"A": 1, "B": 1}, "runs": ["r"], "bases": []}
    assert card["run"]["ledger_head"] == "abc"
    assert card["run"]["epsilon_local_max"] == "inf"
    assert card["tpr_at_fpr"] == risk_of([EVENT], 1e-6).tpr_at_fpr
    assert percent_up(card["tpr_at_fpr"]["0.01"]) in card["risk_in_words"]


def test_readers_of_several_pay_each_upload_once(run):
    cards = Cards(run)
    # client-A holds B's rounds 1 and 2, client-B all three: together three of each, as in the last global model.
    assert cards.together(["client-A", "client-B"])["epsilon"] == pytest.approx(spent(3))
    assert cards.together(["client-A", "client-B"])["epsilon"] == cards.together(list(ANCESTORS))["epsilon"]
    assert cards.together(["global"])["method"] == "provenance"
    names = ["round-1", "client-A", "client-B", "global"]
    costs = [cards.together(names[:number])["epsilon"] for number in range(1, 5)]
    assert costs == sorted(costs), "more variants never cost less"


def test_a_model_of_sums_costs_what_the_sums_showed(run):
    summed = {"privacy_view": "aggregate", "aggregate_objections": [], "epsilon_aggregate_max": 0.25, "delta_max": 1e-5}
    told = {"run_id": "r", "noise_source": "secure", "tpr_at_fpr": {"0.01": 0.02}, **summed}

    def card(name: str = "global", **changes: object) -> dict[str, object]:
        (run / "summary.json").write_text(json.dumps(told | changes))
        return Cards(run).card(name)

    found = card()
    assert (found["epsilon"], found["delta"], found["view"], found["method"]) == (0.25, 1e-5, "aggregate", "run")
    assert found["tpr_at_fpr"] == {"0.01": 0.02}
    assert found["is_guarantee"]
    seen = {
        "another view": {"privacy_view": "local"},
        "uploads were seen": {"aggregate_objections": ["secure_aggregation = false"]},
        "uploads of another run": {"run_id": "other"},
        "no bound": {"epsilon_aggregate_max": None},
        "the local view bounds more": {"epsilon_aggregate_max": 1e3},
    }
    for why, changes in seen.items():
        assert (card(**changes)["view"], card(**changes)["epsilon"]) == ("local", spent(3)), why


def test_a_causal_models_card_and_the_list_have_the_perplexity_of_its_responses(tmp_path):
    costs, outcome = {"x": {"epsilon": 1.0, "delta": 1e-5}}, {"utility": "log likelihood", "utility_before": -1.0}
    path = store(tmp_path / "store", costs, {}, **outcome, utility_after=-2.0)
    card = Cards(path).card("x")
    assert (card["accuracy"], card["perplexity"]) == (None, pytest.approx(math.exp(2)))
    with Store(path, read_only=True) as opened:
        (listed,) = stored_models(opened)
    assert (listed.accuracy, listed.perplexity) == (None, pytest.approx(math.exp(2)))
    path = store(tmp_path / "broken", costs, {}, **outcome, utility_after=-math.inf)
    assert Cards(path).card("x")["perplexity"] == "inf"


def test_a_store_alone_adds_up_what_it_states(tmp_path):
    privacy = {"x": {"epsilon": 1.0, "delta": 1e-5}, "y": {"epsilon": 2.0, "delta": 2e-5}, "z": {}}
    cards = Cards(store(tmp_path / "store", privacy, {}))
    both = cards.together(["x", "y"])
    assert (both["epsilon"], both["delta"], both["method"]) == (3.0, pytest.approx(3e-5), "basic")
    assert cards.card("x")["epsilon"] == 1.0
    assert (cards.card("x")["tpr_at_fpr"], cards.card("x")["risk_in_words"]) == (None, None)
    unknown = cards.together(["x", "z"])
    assert (unknown["epsilon"], unknown["is_guarantee"]) == ("inf", False)
    assert "take it as not private" in unknown["note"]


def test_validation_on_private_records_is_not_forgotten(run):
    """No upload tells of it, so what the uploads cost is too little."""
    unknown = {"utility_before": None, "utility_after": None}
    cards = Cards(store(run / "store", COSTS, {"round-1": ["global"]}, **unknown))
    assert cards.together(["round-1"])["epsilon"] == 50.0
    assert cards.together(["round-1", "client-A"])["epsilon"] == 100.0


def test_without_noise_or_with_seeded_noise_it_says_that_nobody_is_protected(run):
    bare = Upload(data_set="A", run="r", round=1, event=replace(EVENT, noise_multiplier=0.0))
    describe(run / "variants", "bare", History(name="bare", ancestors=frozenset({bare})))
    card = Cards(run).card("bare")
    assert (card["epsilon"], card["is_guarantee"]) == ("inf", False)
    assert "protects nobody" in card["note"]
    assert (card["mu"], card["advantage"], card["tpr_at_fpr"]["0.001"]) == ("inf", 1.0, 1.0)
    assert "Nothing bounds" in card["risk_in_words"]
    (run / "summary.json").write_text('{"noise_source": "seeded"}')
    seeded = Cards(run).card("round-1")
    assert seeded["epsilon"] == spent(1)
    assert not seeded["is_guarantee"]
    assert "seeded" in seeded["note"]


def test_records_and_whole_clients_have_no_common_epsilon(run):
    whole = replace(EVENT, sampling_probability=1.0, unit="client")
    upload = Upload(data_set="A", run="q", round=1, event=whole)
    describe(run / "variants", "whole", History(name="whole", ancestors=frozenset({upload})))
    cards = Cards(run)
    assert cards.card("whole")["unit"] == "client"
    both = cards.together(["whole", "global"])
    assert both["epsilon"] == "inf"
    assert "different units" in both["note"]


def test_a_damaged_description_or_manifest_is_no_guarantee_and_spoils_no_other_card(run):
    (run / "variants" / "global" / "variant.json").write_text("{")
    assert Cards(run).card("global")["epsilon"] == "inf"
    assert Cards(run).card("round-1")["epsilon"] == spent(1)
    path = store(run / "other", {"x": {"epsilon": 1.0, "delta": 1e-5}, "y": {"epsilon": 2.0, "delta": 1e-5}}, {})
    damage_index(path, "models", "manifest", name="x")
    assert Cards(path).card("x")["epsilon"] == "inf"
    assert Cards(path).card("y")["epsilon"] == 2.0


def test_a_variant_that_took_blocks_of_another_descends_from_it_too_also_where_the_run_is_served(run):
    path = store(run / "store", COSTS, {"round-1": ["client-A"], "client-A": ["client-B"]})
    card = Cards(path).card("round-1")
    assert card["epsilon"] == pytest.approx(spent(3))
    assert (card["ancestors"]["bases"], card["accuracy"]) == (["client-A", "client-B"], 0.7)
    assert Cards(run).card("round-1")["epsilon"] == pytest.approx(spent(3)), "it is served from the store"
    shutil.rmtree(run / "variants" / "round-1")
    card = Cards(run).card("round-1")
    assert (card["epsilon"], card["ancestors"]["bases"]) == (50.0, ["client-A", "client-B"])
    # It may hold blocks of client-A, and by them of client-B, which only client-A's manifest tells.
    describe(run / "variants", "round-1")
    damage_index(path, "models", "manifest", name="client-A")
    assert Cards(path).together(["round-1"])["epsilon"] == 50.0, "what the store stated when all was there"
    assert Cards(path).together(["global"])["epsilon"] == spent(3)


def test_a_reader_of_variants_that_are_bases_of_each_other_pays_for_the_union(run):
    """Every one names all others; the union of uploads is counted here without the cards' own code."""
    members = ["round-1", "client-A", "client-B"]
    alone = Cards(run).together(["round-1"])["epsilon"]
    cards = Cards(store(run / "store", COSTS, {name: [m for m in members if m != name] for name in members}))
    union = {upload.key for name in members for upload in ANCESTORS[name]}
    most = max(spent(sum(key[0] == id_ for key in union), delta) for id_, delta in DELTAS.items())
    for names in (["round-1"], ["client-B"], ["round-1", "client-A"], members):
        assert cards.together(names)["epsilon"] == pytest.approx(most)
    assert cards.together(["round-1"])["epsilon"] > alone


@pytest.fixture(scope="module")
def engine():
    return FakeServing(names=(*NAMES, "base"), has_base=True)


@pytest.fixture(scope="module")
def clients(engine, tmp_path_factory):
    """OpenAI's clients with the tokens of a clinic, and of somebody who may use all."""
    file = tmp_path_factory.mktemp("tokens") / "tokens.toml"
    secrets = [add_new(file, name, may_use) for name, may_use in (("clinic", ["global", "round-*"]), ("all", ["*"]))]
    with running(engine, tokens=Tokens(file), aliases=ALIASES) as server:
        yield [openai.OpenAI(base_url=f"{server.url}/v1", api_key=secret, max_retries=0) for secret in secrets]


def ids(client):
    return [model.id for model in client.models.list()]


def test_an_alias_opens_what_the_token_may_use_anyway_and_nothing_else(clients):
    clinic, everyone = clients
    assert ids(clinic) == ["global", "round-3", "gpt-4o-mini"]
    answer = clinic.completions.create(model="gpt-4o-mini", prompt="x", max_tokens=2)
    assert (answer.model, answer.choices[0].text) == ("global", "".join(words("global", "x", 2)))
    card = clinic.models.retrieve("gpt-4o-mini")
    assert (card.id, card.alias_of, card.epsilon) == ("gpt-4o-mini", "global", 1.0)
    for name in ("hidden", "plain", "round-9", "secret-variant", "nobody"):
        with pytest.raises(openai.NotFoundError) as refused:
            clinic.completions.create(model=name, prompt="x")
        assert refused.value.body["message"].replace(name, "N").startswith("The model 'N' does not exist")
    assert set(ALIASES) < set(ids(everyone))


def test_an_alias_that_stands_for_nothing_or_hides_a_variant_is_refused(engine):
    for aliases, says in (
        ({"global": "client-0"}, "is the name of a variant"),
        ({"../x": "global"}, "must be letters"),
        ({"a": "nobody"}, "there is no variant 'nobody'"),
        ({"a": "global", "b": "a"}, "there is no variant 'a'"),
    ):
        with pytest.raises(InputError, match=says):
            Catalogue(engine, aliases)


def test_the_base_says_that_it_is_public_and_has_no_epsilon(clients):
    clinic, everyone = clients
    card = everyone.models.retrieve("base")
    assert card.is_base
    assert "no holder's record" in card.note
    assert not hasattr(card, "epsilon")
    assert everyone.completions.create(model="base", prompt="x", max_tokens=1).choices[0].text == "base:x:0 "
    with pytest.raises(openai.NotFoundError):
        clinic.completions.create(model="base", prompt="x")
    both, alone, reader = (
        everyone.get(address, cast_to=httpx.Response).json()
        for address in ("/models/global?with=base", "/models/base?with=plain", "/reader")
    )
    both = both["together"]
    assert (both["epsilon"], both["models"]) == (1.0, ["base", "global"]), "the base adds nothing"
    assert alone["together"]["is_base"]
    assert (len(reader["models"]), reader["epsilon"]) == (len(NAMES) + 1, 0.5 + 0.5 * len(NAMES))
