"""Vectors of texts are what the variant's own head reads, at length 1."""

import base64
import re
from functools import partial

import numpy as np
import openai
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedpriv.learning import adapters
from fedpriv.models.serving.requests import BASE, Embed, ServingError
from tests.models.serving.fake import FakeServing, vector
from tests.models.serving.running import running
from tests.served import LABELS, Asked, ask_classes, hold, save_run, serving, to_classify
from tests.tiny import WORDS

NAMES = ("global", "client-0")
TEXTS = tuple(" ".join(WORDS[: 1 + 2 * number]) for number in range(5))


def head_inputs(model, run) -> torch.Tensor:
    """What the first linear layer behind the encoder reads of each text while `run` runs the model."""
    found = []
    heads = re.compile(r"(^|\.)(pre_)?classifier(\.modules_to_save\.default)?(\.dense)?$")
    hooks = [
        module.register_forward_pre_hook(lambda _module, inputs: found.append(inputs[0].detach()))
        for name, module in model.named_modules()
        if heads.search(name) and type(module) is nn.Linear
    ]
    with torch.no_grad():
        run()
    for hook in hooks:
        hook.remove()
    return found[0]


@pytest.mark.parametrize("normalize", [True, False])
def test_vectors_of_mixed_requests_are_plain_peft_s(tiny_bert, tmp_path, monkeypatch, normalize):
    recipe = "fedpriv" if normalize else "per-sample"
    values = {"model": str(tiny_bert), "layers": "all", "rank": 4, "recipe": recipe}
    run = save_run(tmp_path / "run", values, NAMES)
    tokenizer = adapters.load_tokenizer(str(tiny_bert))
    with serving(run) as scheduler:
        assert scheduler.embeds
        texts = tuple(map(scheduler.encode, TEXTS))
        stopped, go = hold(monkeypatch)  # so that the others wait together
        first = Asked(scheduler, to_classify(scheduler, "global", ("a",)))
        assert stopped.wait(30)
        asked = {name: Asked(scheduler, Embed(variant=name, texts=texts)) for name in NAMES}
        classes = [Asked(scheduler, to_classify(scheduler, name, TEXTS)) for name in NAMES]
        go.set()
        answers = {name: each.last() for name, each in asked.items()}
        for each in (first, *classes):
            assert {len(row) for row in each.last().probabilities} == {len(LABELS)}
    for name, answer in answers.items():
        plain = adapters.load(str(tiny_bert), run / "variants" / name).eval()
        expected = torch.cat(
            [head_inputs(plain, partial(plain, **tokenizer(text, return_tensors="pt"))) for text in TEXTS]
        )
        assert answer.num_tokens == sum(map(len, texts))
        assert answer.vectors.dtype == np.float32
        assert torch.allclose(torch.from_numpy(answer.vectors), F.normalize(expected, dim=-1), atol=1e-5)
    assert np.abs(answers["global"].vectors - answers["client-0"].vectors).max() > 1e-3


def test_the_base_of_classifiers_has_vectors_and_no_classes_and_a_head_that_pools_by_itself_has_none(
    tiny_bert, tmp_path, monkeypatch
):
    run = save_run(tmp_path / "run", {"model": str(tiny_bert), "layers": "all", "rank": 4}, NAMES)
    with serving(run) as scheduler:
        with pytest.raises(ServingError, match="no head"):
            ask_classes(scheduler, BASE, ("the rash",))
        text = scheduler.encode("the rash")
        vectors = Asked(scheduler, Embed(variant=BASE, texts=(text,))).last().vectors
    plain = adapters.load_base(str(tiny_bert), task="SEQ_CLS", num_labels=3, normalize=True).model.base_model
    with torch.no_grad():
        output = plain(input_ids=torch.tensor([text]), attention_mask=torch.ones(1, len(text)))
    expected = F.normalize(output.last_hidden_state.mean(dim=1), dim=-1)
    assert torch.allclose(torch.from_numpy(vectors), expected, atol=1e-5)
    monkeypatch.setattr("fedpriv.models.serving._engine.pools", lambda model: False)
    with serving(run) as scheduler, pytest.raises(ServingError, match="pools no text"):
        scheduler.submit(Embed(variant="global", texts=((5, 6),)), print)


@pytest.mark.slow
def test_minilm_s_vectors_are_sentence_transformers(tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    run = save_run(tmp_path / "run", {"model": "all-MiniLM-L6-v2", "layers": "last-1", "max_length": 128}, ("global",))
    texts = ("A rash on both knees.", "The patient coughs at night, and has had a fever for three days.", "x")
    with serving(run) as scheduler:
        found = Asked(scheduler, Embed(variant=BASE, texts=tuple(map(scheduler.encode, texts)))).last().vectors
    plain = sentence_transformers.SentenceTransformer(str(adapters.model_folder("all-MiniLM-L6-v2")), device="cpu")
    assert abs(found - plain.encode(list(texts))).max() < 1e-5


@pytest.fixture(scope="module")
def client():
    with running(FakeServing(task="SEQ_CLS", damaged=("client-1",))) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_openai_s_client_reads_one_and_several_in_both_formats(client):
    texts = ["it hurts", "it itches"]
    expected = np.stack([vector("round-3", text) for text in texts])
    numbers = client.embeddings.create(model="round-3", input=texts, encoding_format="float")
    assert np.array_equal(np.float32([each.embedding for each in numbers.data]), expected)
    assert ([each.index for each in numbers.data], numbers.usage.prompt_tokens) == ([0, 1], 17)
    same = client.embeddings.create(model="round-3", input="it hurts", dimensions=len(expected[0]))
    assert np.array_equal(np.float32(same.data[0].embedding), expected[0])
    default = client.embeddings.create(model="round-3", input="it hurts")  # the client asks for base64 and decodes it
    assert np.array_equal(np.float32(default.data[0].embedding), expected[0])
    raw = client.embeddings.with_raw_response.create(model="round-3", input="it hurts", encoding_format="base64")
    assert base64.b64decode(raw.http_response.json()["data"][0]["embedding"]) == expected[0].tobytes()


def test_what_is_wrong_about_a_request_for_vectors_is_named(client):
    for wrong, says in (
        ({"input": []}, "input: must have at least 1"),
        ({"input": [[1, 2]]}, r"input\.0: must be a valid string"),
        ({"input": ["x"] * 65}, "input: 65 texts; at most 64"),
        ({"encoding_format": "hex"}, "encoding_format = 'hex': must be 'float' or 'base64'"),
        ({"dimensions": 7}, "dimensions = 7: vectors of this model have [0-9]+; leave it out"),
        ({"dimensions": 0}, "dimensions = 0: must be"),
        ({"input": "x" * 600}, "too many tokens"),
    ):
        with pytest.raises(openai.BadRequestError, match=says):
            client.embeddings.create(**{"model": "global", "input": "x", **wrong})
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="nobody", input="x")
    with pytest.raises(openai.InternalServerError, match="cannot be read"):
        client.embeddings.create(model="client-1", input="x")
