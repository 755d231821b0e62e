"""The base answers as without any adapter, and variants come and go while others are answered."""

from __future__ import annotations

import shutil
import time

import pytest
import torch

from fedpriv import adapters
from fedpriv.adapters import load_base
from fedpriv.serving.http.cards import Cards
from fedpriv.serving.requests import (
    BASE,
    DamagedVariantError,
    Embed,
    Finished,
    Generate,
    LoadedError,
    ServingError,
    UnknownVariantError,
)
from tests.chats import chat_model, chat_tokenizer
from tests.served import Asked, ask_classes, save_run, serving
from tests.serving.hostile import STRANGE_NAMES

PROMPT = (17, 42, 99, 7)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return chat_model(tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture
def run(model, tmp_path):
    columns = {"prompt_column": "prompt", "response_column": "response", "data": "x.csv"}
    values = {"model": str(model), "task": "CAUSAL_LM", "layers": "all", "normalize_features": False, **columns}
    return save_run(tmp_path / "run", values, ("global", "client-0", "round-3"), scale=0.5)


def says(scheduler, name, num=12):
    found = Asked(scheduler, Generate(variant=name, prompt=PROMPT, max_new_tokens=num))
    assert isinstance(found.last(), Finished)
    return found.text


def decoded(plain, num=12):
    ids = torch.tensor([PROMPT])
    said = plain.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=num, do_sample=False, pad_token_id=0
    )
    return chat_tokenizer().decode(said[0, len(PROMPT) :], skip_special_tokens=True).rstrip("\ufffd")


def test_the_base_continues_as_the_model_without_an_adapter(run, model):
    with serving(run) as scheduler:
        assert scheduler.names == ("global", "client-0", "round-3", BASE)
        asked = [
            Asked(scheduler, Generate(variant=name, prompt=PROMPT, max_new_tokens=12)) for name in (BASE, "global") * 3
        ]
        assert all(isinstance(each.last(), Finished) for each in asked)
    expected = {
        BASE: decoded(load_base(str(model), task="CAUSAL_LM").model),
        "global": decoded(adapters.load(str(model), run / "variants" / "global")),
    }
    assert expected[BASE] != expected["global"]
    assert [each.text for each in asked] == [expected[name] for name in (BASE, "global") * 3]


def test_a_variant_of_that_name_is_the_variant(run):
    shutil.move(run / "variants" / "round-3", run / "variants" / BASE)
    described = run / "variants" / BASE / "variant.json"
    described.write_text(described.read_text().replace('"round-3"', f'"{BASE}"'))
    with serving(run) as scheduler:
        assert not scheduler.has_base
        assert says(scheduler, BASE)


def test_the_base_of_classifiers_has_vectors_and_no_classes(tiny_bert, tmp_path):
    run = save_run(tmp_path / "run", {"model": str(tiny_bert), "layers": "all", "rank": 4}, ("global",))
    with serving(run) as scheduler:
        with pytest.raises(ServingError, match="no head"):
            ask_classes(scheduler, BASE, ("the rash",))
        text = scheduler.encode("the rash")
        vectors = Asked(scheduler, Embed(variant=BASE, texts=(text,))).last().vectors
    plain = load_base(str(tiny_bert), task="SEQ_CLS", num_labels=3, normalize=True).model.base_model
    with torch.no_grad():
        output = plain(input_ids=torch.tensor([text]), attention_mask=torch.ones(1, len(text)))
    expected = torch.nn.functional.normalize(output.pooler_output, dim=-1)
    assert torch.allclose(torch.from_numpy(vectors), expected, atol=1e-5)


@pytest.mark.slow
def test_minilm_s_vectors_are_sentence_transformers(tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    run = save_run(tmp_path / "run", {"model": "all-MiniLM-L6-v2", "layers": "last-1", "max_length": 128}, ("global",))
    texts = ("A rash on both knees.", "The patient coughs at night, and has had a fever for three days.", "x")
    with serving(run) as scheduler:
        found = Asked(scheduler, Embed(variant=BASE, texts=tuple(map(scheduler.encode, texts)))).last().vectors
    plain = sentence_transformers.SentenceTransformer(str(adapters.model_folder("all-MiniLM-L6-v2")), device="cpu")
    assert abs(found - plain.encode(list(texts))).max() < 1e-5


def test_a_variant_that_goes_finishes_its_answers_and_then_frees_its_memory(run):
    with serving(run, rows=2, turn_tokens=4) as scheduler:
        expected = says(scheduler, "client-0", 60)
        says(scheduler, "global")
        held = scheduler.statistics().bytes_in_memory
        # More than rows, so that some wait and some are paused when it goes.
        asked = [
            Asked(scheduler, Generate(variant="client-0", prompt=PROMPT, max_new_tokens=60, client=f"c{n % 2}"))
            for n in range(5)
        ]
        asked[0].next()
        scheduler.unload("client-0")
        assert "client-0" not in scheduler.names
        with pytest.raises(UnknownVariantError):
            says(scheduler, "client-0")
        with pytest.raises(LoadedError, match="still answers"):
            scheduler.load("client-0")
        for each in asked:
            assert isinstance(each.last(), Finished)
        assert [each.text for each in asked[1:]] == [expected] * 4
        wait_until(lambda: scheduler.statistics().bytes_in_memory == held / 2)
        scheduler.load("client-0")
        assert scheduler.names == ("global", "client-0", "round-3", BASE)
        assert says(scheduler, "client-0", 60) == expected


def wait_until(holds):
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_variant_that_came_is_loaded_and_one_that_changed_is_read_anew(run):
    variants = run / "variants"
    shutil.move(variants / "round-3", run / "round-3")
    with serving(run) as scheduler:
        with pytest.raises(UnknownVariantError):
            scheduler.load("round-3")
        shutil.move(run / "round-3", variants / "round-3")
        scheduler.load("round-3")
        third, first = says(scheduler, "round-3"), says(scheduler, "global")
        assert third != first
        scheduler.unload("round-3")
        for file in ("adapter_model.safetensors", "variant.json"):
            shutil.copy(variants / "global" / file, variants / "round-3" / file)
        described = variants / "round-3" / "variant.json"
        described.write_text(described.read_text().replace('"name": "global"', '"name": "round-3"'))
        wait_until(lambda: "round-3" not in scheduler._leaving)
        scheduler.load("round-3")
        assert says(scheduler, "round-3") == first


def test_what_is_damaged_or_strange_is_not_loaded(run):
    secret = run.parent / "secret"
    shutil.copytree(run / "variants" / "global", secret)
    with serving(run) as scheduler:
        for name in (*STRANGE_NAMES, "", "../../secret", str(secret), "../variants/global", "."):
            with pytest.raises(UnknownVariantError):
                scheduler.load(name)
            with pytest.raises(UnknownVariantError):
                scheduler.unload(name)
        scheduler.unload("client-0")
        wait_until(lambda: not scheduler._leaving)
        (run / "variants" / "client-0" / "adapter_model.safetensors").write_bytes(b"\x08")
        with pytest.raises(DamagedVariantError):
            scheduler.load("client-0")
        assert "client-0" not in scheduler.names
        with pytest.raises(LoadedError, match="it is loaded"):
            scheduler.load("global")
        with pytest.raises(LoadedError, match="the base"):
            scheduler.unload(BASE)
        shutil.move(run / "config.toml", run / "elsewhere.toml")
        with pytest.raises(ServingError, match="cannot be read now") as refused:
            scheduler.load("client-0")
        assert str(run) not in str(refused.value)


def test_cards_forget_what_they_read(run):
    cards = Cards(run)
    assert cards.card("client-0")["accuracy"] is None
    described = run / "variants" / "client-0" / "variant.json"
    described.write_text(described.read_text().replace('"utility": null', '"utility": 0.5'))
    assert cards.card("client-0")["accuracy"] is None
    cards.forget()
    assert cards.card("client-0")["accuracy"] == 0.5
