"""What each address answers, and for whom."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from fedpriv.models.serving.http.tokens import add_new
from tests.models.serving.fake import FakeCards, FakeServing, probabilities
from tests.models.serving.running import client_of


@pytest.fixture
def clinic(tmp_path: Path) -> TestClient:
    """A client whose token may use global and client-1."""
    return client_of(tokens=tmp_path / "t.toml", secret=add_new(tmp_path / "t.toml", "clinic", ["global", "client-1"]))


def test_texts_are_classified_with_the_probability_of_every_label():
    client = client_of(FakeServing(task="SEQ_CLS"))
    answer = client.post("/v1/classify", json={"model": "round-3", "input": ["it hurts", "it itches"]}).json()
    for row, text in zip(answer["data"], ("it hurts", "it itches"), strict=True):
        assert tuple(row["probabilities"].values()) == probabilities("round-3", text)
        assert row["label"] == max(row["probabilities"], key=row["probabilities"].get)
    alone = client.post("/v1/classify", json={"model": "round-3", "input": "it hurts"}).json()
    assert alone["data"] == answer["data"][:1]
    assert client.get("/v1/models").json()["labels"] == ["cardiology", "neurology", "urology"]


def test_the_wrong_task_names_the_right_address():
    for task, address, asked, says in (
        ("CAUSAL_LM", "classify", {"input": "x"}, "/v1/chat/completions"),
        ("CAUSAL_LM", "embeddings", {"input": "x"}, "continue texts"),
        ("SEQ_CLS", "completions", {"prompt": "x"}, "/v1/classify"),
    ):
        answer = client_of(FakeServing(task=task)).post(f"/v1/{address}", json={"model": "global", **asked})
        assert answer.status_code == 400
        assert says in answer.json()["error"]["message"]


def test_a_card_tells_what_a_reader_of_one_and_of_several_pays_and_no_base_that_the_token_may_not_see(clinic):
    card = clinic.get("/v1/models/client-1").json()
    assert (card["id"], card["epsilon"], card["delta"], card["unit"]) == ("client-1", 1.0, 1e-5, "record")
    assert (card["ancestors"]["bases"], card["ancestors"]["num_bases"]) == (["global"], 2)
    both = clinic.get("/v1/models/client-1?with=global").json()["together"]
    assert (both["models"], both["epsilon"]) == (["client-1", "global"], 1.5)
    reader = clinic.get("/v1/reader").json()
    assert (reader["token"], reader["models"], reader["epsilon"]) == ("clinic", ["global", "client-1"], 1.5)


@pytest.mark.parametrize("task", ["CAUSAL_LM", "SEQ_CLS"])
def test_a_variant_that_a_token_may_not_use_looks_like_one_that_does_not_exist(tmp_path, task):
    """Status, headers and body are the same but for the name that was asked."""
    file, serving = tmp_path / "t.toml", FakeServing(task=task)
    client = client_of(serving, file, add_new(file, "clinic", ["global"]))
    address, asked = ("completions", "prompt") if task == "CAUSAL_LM" else ("classify", "input")
    chat = {"messages": [{"role": "user", "content": "x"}]}
    for ask in (
        lambda name: client.post(f"/v1/{address}", json={"model": name, asked: "x"}),
        lambda name: client.post("/v1/chat/completions", json={"model": name, **chat}),
        lambda name: client.get(f"/v1/models/{name}"),
        lambda name: client.get(f"/v1/models/global?with={name}"),
    ):
        hidden, missing = ask("secret-variant"), ask("secret-varianx")
        assert hidden.status_code == missing.status_code == 404
        assert hidden.text.replace("secret-variant", "N") == missing.text.replace("secret-varianx", "N")
        assert hidden.headers == missing.headers
    assert not serving.tickets
    assert "secret-variant" not in client.get("/v1/models").text


def test_it_also_takes_as_long(clinic):
    def seconds(name: str) -> float:
        started = time.perf_counter()
        clinic.get(f"/v1/models/{name}")
        return time.perf_counter() - started

    pairs = [(seconds("secret-variant"), seconds("secret-varianx")) for _ in range(60)]
    hidden, missing = (sorted(times)[5] for times in zip(*pairs, strict=True))
    assert 1 / 3 < hidden / missing < 3


def test_without_a_valid_token_there_is_the_page_and_health_and_nothing_else(tmp_path):
    file = tmp_path / "t.toml"
    add_new(file, "clinic", ["*"])
    client = client_of(tokens=file)
    for address in ("/metrics", "/v1/models", "/v1/models/global", "/v1/nothing", "/nothing"):
        answer = client.get(address)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
    assert client.get("/health").json() == {"status": "ok"}
    assert not any(name in client.get("/").text for name in FakeServing().names[1:])


def test_metrics_count_and_name_no_variant(tmp_path):
    file = tmp_path / "t.toml"
    clinic, monitor = add_new(file, "clinic", ["*"]), add_new(file, "monitor", [], metrics=True)
    client = client_of(tokens=file, secret=clinic)
    assert client.get("/metrics").status_code == 403
    assert client.post("/v1/completions", json={"model": "client-1", "prompt": "x"}).status_code == 200
    assert client.post("/v1/completions", json={"model": "nobody", "prompt": "x"}).status_code == 404
    text = client.get("/metrics", headers={"Authorization": f"Bearer {monitor}"}).text
    for line in (
        'fedpriv_request_seconds_count{endpoint="/v1/completions",status="200"} 1.0',
        'fedpriv_refusals_total{reason="model_not_found"} 1.0',
        'fedpriv_refusals_total{reason="no_metrics"} 1.0',
        "fedpriv_variant_hits_total 1.0",
        "fedpriv_variant_misses_total 2.0",
        "fedpriv_variant_read_bytes_total 7.0",
        "fedpriv_pass_rows_total 12.0",
        "fedpriv_requests_under_way 1.0",
    ):
        assert line in text
    assert not any(name in text for name in ("client-1", "nobody", "clinic", "secret-variant"))


def test_an_error_of_the_program_tells_the_client_nothing():
    answer = client_of(FakeServing(broken=True)).post("/v1/completions", json={"model": "global", "prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "path" not in answer.text


def test_a_page_of_another_site_cannot_reach_a_server_without_tokens():
    client = client_of()
    assert client.get("/v1/models").status_code == 200
    assert client.get("/v1/models", headers={"Host": "evil.example:8000"}).status_code == 421
    assert client.get("/v1/models", headers={"Host": "127.0.0.1:8000"}).status_code == 200
    as_form = {"Content-Type": "text/plain"}
    assert client.post("/v1/completions", content='{"model":"global","prompt":"x"}', headers=as_form).status_code == 415


def test_a_chat_has_the_length_that_the_server_allows_and_an_order_that_its_template_knows():
    client = client_of(max_new_tokens=7)
    user, assistant = (
        client.post("/v1/chat/completions", json={"model": "global", "messages": [{"role": role, "content": "x"}]})
        for role in ("user", "assistant")
    )
    assert user.json()["usage"]["completion_tokens"] == 7
    assert assistant.status_code == 400
    assert assistant.json()["error"]["message"] == "The last message must be the user's."


def test_a_prompt_without_room_for_itself_or_the_answer_it_asks_for_is_refused_and_not_left_out():
    client = client_of(FakeServing(max_tokens=20))
    prompts = {"prompt": ["x" * 15, "y"]}
    for address, asked in (
        ("completions", {"prompt": "x" * 21, "max_tokens": None}),
        ("completions", prompts),
        ("completions", {**prompts, "stream": True}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 8}]}),
    ):
        answer = client.post(f"/v1/{address}", json={"model": "global", "max_tokens": 10, **asked})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert len(client.post("/v1/completions", json={"model": "global", **prompts}).json()["choices"]) == 2


def test_the_engine_learns_which_token_asks(tmp_path):
    file = tmp_path / "t.toml"
    for task, address, asked in (("SEQ_CLS", "classify", "input"), ("CAUSAL_LM", "completions", "prompt")):
        serving = FakeServing(task=task)
        client = client_of(serving, file, add_new(file, task.lower(), ["global"]))
        assert client.post(f"/v1/{address}", json={"model": "global", asked: "x"}).status_code == 200
        assert [request.client for request in serving.asked] == [task.lower()]


def test_costs_are_computed_at_turns_of_tokens(tmp_path):
    going, file, asked = threading.Event(), tmp_path / "t.toml", list[str]()

    class Slow(FakeCards):
        def card(self, name):
            going.wait(20)
            asked.append(name)
            return super().card(name)

    greedy, other = (add_new(file, name, ["global", "client-*"]) for name in ("greedy", "other"))
    with client_of(tokens=file, cards=Slow()) as client, ThreadPoolExecutor(12) as pool:

        def ask(secret, name):
            return client.get(f"/v1/models/{name}", headers={"Authorization": f"Bearer {secret}"}).status_code

        many = [pool.submit(ask, greedy, "global") for _ in range(11)]
        one = pool.submit(ask, other, "client-0")
        time.sleep(0.3)
        going.set()
        assert {each.result() for each in (*many, one)} == {200}
    assert asked.index("client-0") <= 2
