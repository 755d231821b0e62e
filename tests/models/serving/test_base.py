"""The base answers as without any adapter."""

import shutil

import pytest
import torch

from fedpriv.learning import adapters
from fedpriv.learning.adapters import load_base
from fedpriv.models.serving.requests import BASE, Embed, Finished, Generate, ServingError
from tests.chats import chat_tokenizer
from tests.models.serving.conftest import NAMES
from tests.served import Asked, ask_classes, save_run, serving

PROMPT = (17, 42, 99, 7)


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


def test_the_base_continues_as_the_model_without_an_adapter(chat_run, model):
    with serving(chat_run) as scheduler:
        assert scheduler.names == (*NAMES, BASE)
        asked = [
            Asked(scheduler, Generate(variant=name, prompt=PROMPT, max_new_tokens=12)) for name in (BASE, "global") * 3
        ]
        assert all(isinstance(each.last(), Finished) for each in asked)
    expected = {
        BASE: decoded(load_base(str(model), task="CAUSAL_LM").model),
        "global": decoded(adapters.load(str(model), chat_run / "variants" / "global")),
    }
    assert expected[BASE] != expected["global"]
    assert [each.text for each in asked] == [expected[name] for name in (BASE, "global") * 3]


def test_a_variant_of_that_name_is_the_variant(chat_run, tmp_path):
    run = shutil.copytree(chat_run, tmp_path / "run")
    shutil.move(run / "variants" / "client-1", run / "variants" / BASE)
    described = run / "variants" / BASE / "variant.json"
    described.write_text(described.read_text().replace('"client-1"', f'"{BASE}"'))
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
    expected = torch.nn.functional.normalize(output.last_hidden_state.mean(dim=1), dim=-1)
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
