"""What can be told of a run before anything slow is imported is told then, and the Hub is asked once."""

import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedpriv.config import ON_NODES, parse
from fedpriv.errors import InputError
from fedpriv.learning.adapters._locations import hub_problem
from fedpriv.learning.data import federated
from fedpriv.learning.training.noise_plan import calibrated, planned_releases, with_learning_rates
from fedpriv.learning.training.private_evaluation import EvaluationSpec, planned_event
from fedpriv.privacy.accounting import epsilon_of
from fedpriv.runs.plan import preflight
from server import app
from server.observer import LogObserver
from tests.server.test_noise_schedule import ADAPTER
from tests.tiny import with_persons

ON_NODES_HERE = {"data": ON_NODES, "labels": "a,b"}
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def values(table, tiny_bert):
    return {"data": str(table), "client_column": "site", "model": str(tiny_bert)}


def test_a_run_that_can_start_passes(values, tmp_path):
    for config in (values, ON_NODES_HERE):
        preflight.check(parse(config | {"out": str(tmp_path / "new")}))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label_column": "lable"}, "label_column = 'lable': .* it has text, label, site"),
        ({"data": "none.csv"}, "data = 'none.csv': no such file"),
        ({"test_data": "none.csv"}, "test_data = 'none.csv': no such file"),
        ({"budget_epsilon": [1.0, 2.0]}, "budget_epsilon = .*: has 2 entries for 3 clients"),
        ({"aggregation": "flora", "client_ranks": [4]}, "client_ranks = .*: has 1 entries for 3 clients"),
        ({"min_clients": 9}, "min_clients = 9: there are 3 clients"),
        (ON_NODES_HERE | {"num_clients": 4, "min_clients": 5}, "min_clients = 5: there are 4 clients"),
        ({"mechanism": "lmo", "mechanism_parameters": "none.json"}, "mechanism_parameters = 'none.json': cannot be"),
        ({"track": "mlflow"}, "track = mlflow: needs mlflow"),
        ({"noise_multiplier": 0}, "noise_multiplier = 0: allowed only on public data"),
        ({"comparison": True, "test_data": "none.csv"}, "comparison = true: .* allowed only on public data"),
        ({"privacy_view": "aggregate"}, "privacy_view = aggregate: does not hold: .*secure_aggregation = false"),
        ({"prompt_column": "text", "response_column": "label", "test_data": "none.csv"}, "generated_answers = .*rouge"),
        ({"model": "./none"}, "model = './none': no such folder"),
        ({"model": "all-MiniLM-L6-v3"}, "model = .*HF_HUB_OFFLINE.*; did you mean all-MiniLM-L6-v2[?]"),
        ({"model": "a model"}, "model = 'a model': no folder here, and no possible name"),
        ({"batch_size": 4000}, "batch_size = 4000"),
        ({"out": str(ROOT)}, "out = .*: already holds a run"),
        ({"out": str(ROOT / "LICENSE")}, "out = .*: already holds a run"),
    ],
)
def test_what_is_wrong_with_folder_model_or_data_is_one_line(values, changes, message, monkeypatch):
    monkeypatch.setattr("fedpriv.runs.show._tracker.find_spec", lambda name: None)
    monkeypatch.setattr("fedpriv.learning.training.evaluation.find_spec", lambda name: None)
    with pytest.raises(InputError, match=message) as caught:
        preflight.check(parse(values | changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes", [{"noise_multiplier": 0}, {"comparison": True, "test_data": "t.csv"}, {"privacy_view": "aggregate"}]
)
def test_a_coordinator_refuses_it_too_before_it_loads_anything_or_asks_a_node(values, changes, tmp_path):
    config = parse(values | changes | {"out": str(tmp_path / "out"), "model": "none"})
    with pytest.raises(InputError, match=f"{min(changes)} = "):
        app.run(None, config, LogObserver())
    assert not (tmp_path / "out").exists()


def test_a_sweep_s_data_are_looked_at_once_and_all_problems_told(values, monkeypatch):
    loaded, load = [], federated.load
    monkeypatch.setattr(federated, "load", lambda config: loaded.append(config) or load(config))
    configs = [parse(values | {"rank": rank, "max_records": most}) for rank in (2, 4) for most in (40, 50)]
    assert preflight.problems(configs) == []
    assert len(loaded) == 2
    few = [parse(values | {"min_clients": num}) for num in (1, 4, 5, 5)]
    assert [line.split(":")[0] for line in preflight.problems(few)] == ["min_clients = 4", "min_clients = 5"]
    assert len(loaded) == 3
    bad = [parse(values | {"model": f"./{name}"}) for name in "ab"]
    assert [line[:13] for line in preflight.problems(bad)] == ["model = './a'", "model = './b'"]


@pytest.fixture
def mute_model(tiny_bert, tmp_path, monkeypatch) -> None:
    """A model without a tokenizer in the working directory."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_bert, tmp_path / "mute", ignore=shutil.ignore_patterns("tokenizer*", "vocab*", "special*"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({}, None, marks=pytest.mark.slow),
        pytest.param({"train": "auto", "target_risk": "mu=1", "target_epsilon": ""}, None, marks=pytest.mark.slow),
        ({"target_modules": ["nope"]}, "target_modules = nope: not in model .* its linear layers are"),
        ({"layers": "last-9"}, "layers = 'last-9': the model has 2 layers"),
        ({"max_length": 9000}, "max_length = 9000: model .* takes at most 64"),
        ({"evaluation_noise_multiplier": 0.1}, "evaluation_noise_multiplier = 0.1: the evaluation alone costs epsilon"),
        ({"target_epsilon": 1e-6}, "target_epsilon = 1e-06: "),
        (ON_NODES_HERE | {"target_epsilon": 1e-6}, "target_epsilon = 1e-06: "),
        ({"model": "mute"}, "its tokenizer knows no word, .* such as tokenizer.json, into its folder"),
    ],
)
def test_what_a_model_cannot_take_and_noise_cannot_meet_is_found_before_a_run(values, changes, message, mute_model):
    config = parse(values | {"rounds": 3, "lora_rounds": 1} | changes)
    found = preflight.problems([config], begins=True)
    assert len(found) == (message is not None), found
    assert not found or re.search(message, found[0])
    assert not message or not preflight.problems([config]), "only the model, or accounting, can tell"


def test_an_evaluation_is_calibrated_in_the_unit_of_the_run(table, tiny_bert, tmp_path):
    path = with_persons(table, tmp_path / "persons.csv", 2)
    keys = {"data": str(path), "client_column": "site", "person_column": "patient", "model": str(tiny_bert)}
    config = parse(keys | {"rounds": 3, "lora_rounds": 1, "target_epsilon": 3.0, "evaluation_noise_multiplier": 8.0})
    assert (config.recipe, config.unit) == ("fedpriv", "person")
    assert preflight.problems([config], begins=True) == []
    found = with_learning_rates(calibrated(config, (60, 60), ADAPTER), (60, 60), ADAPTER)
    events = [*planned_releases(found, dict(enumerate((60, 60))), 0, ADAPTER), planned_event(EvaluationSpec.of(found))]
    assert {event.unit for event in events} == {"person"}
    assert 2.97 < epsilon_of(events, 1e-5).epsilon <= 3.0


def told(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The refusal of a run, and what it had loaded by then."""
    code = (
        "import sys; from simulations.__main__ import app\n"
        "try: app(sys.argv[1:])\n"
        "except SystemExit as ended: print(ended.code, *sorted(sys.modules))"
    )
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)


SWEEP = ("sweep", "simulations/configs/sweeps/rank.toml")


@pytest.mark.parametrize("command", [("run",), pytest.param(SWEEP, marks=pytest.mark.slow)])
def test_neither_torch_nor_flower_is_loaded_before_a_wrong_column_is_told(command, table):
    done = told(*command, "-c", f"data={table}", "-c", "label_column=lable")
    code, *modules = done.stdout.split()
    assert code == "2"
    assert "label_column = 'lable'" in done.stderr
    assert "fedpriv.learning.data._tables" in modules, "the check would be blind"
    assert not {"torch", "transformers", "peft", "flwr", "ray", "matplotlib"} & set(modules)


@contextmanager
def hub(status: int, error: str) -> Iterator[tuple[str, list[str]]]:
    """A server that answers as the Hub does, and the paths that it was asked for."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            if error:
                self.send_header("X-Error-Code", error)
            self.end_headers()

        def log_message(self, *_arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def ask(tmp_path, monkeypatch) -> Callable[[str], str]:
    """Asks a server, as if it were the Hub, for a model that nobody has."""

    def problem(endpoint: str) -> str:
        constants = {"HF_HUB_OFFLINE": False, "HF_HUB_CACHE": str(tmp_path), "ENDPOINT": endpoint}
        constants |= {"HUGGINGFACE_CO_URL_TEMPLATE": endpoint + "/{repo_id}/resolve/{revision}/{filename}"}
        for name, value in constants.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        return hub_problem("nobody/none", "model")

    return problem


@pytest.mark.parametrize(
    ("status", "error", "told"),
    [
        (404, "RepoNotFound", "the Hugging Face Hub has none of that name, or none that you may read"),
        *((404, "EntryNotFound", ""), (503, "", "")),  # which is left to the Hub's own clients
    ],
)
def test_the_hub_is_asked_for_a_name_once(ask, status, error, told):
    with hub(status, error) as (endpoint, asked):
        assert ask(endpoint) == told
    assert asked == ["/nobody/none/resolve/main/config.json"]


def test_a_hub_that_is_not_there_is_told_at_once(ask):
    with hub(200, "") as (endpoint, _):
        pass
    assert "cannot be reached" in ask(endpoint)


def test_a_data_set_in_the_cache_is_found_under_the_name_that_its_library_gives_it(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    (tmp_path / "keivalya___med_quad-medical_qn_a_dataset").mkdir()  # as datasets.builder names it
    assert hub_problem("keivalya/MedQuad-MedicalQnADataset", "dataset") == ""
    assert hub_problem("keivalya/Other", "dataset").startswith("not in the cache")
