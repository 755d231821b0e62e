"""Engines differ only in speed: stacked or on Ray, every client gets the same result as when trained alone."""

import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest
import torch

from fedpriv.config import RunConfig, parse
from fedpriv.errors import InputError
from fedpriv.learning.adapters import LoraSettings, attach, load_base, read
from fedpriv.learning.adapters._arithmetic import A_SUFFIX, B_SUFFIX, Product, factors_of
from fedpriv.learning.aggregation.rules import RULES
from fedpriv.learning.data.records import Records
from fedpriv.learning.training.independence import TRAINING
from fedpriv.learning.training.local_update import ClientUpdate, UpdateSpec, UpdateTask
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.private_sums import PoissonSampler
from fedpriv.learning.training.stacked import clients_at_once, execute_one_by_one, execute_stacked
from fedpriv.learning.training.workbench import workbench
from fedpriv.privacy.accounting.sensitivity import CLIPPING_RULES, NOISE_TARGETS
from fedpriv.privacy.mechanisms.sources import SecureSource, SeededSource
from simulations.engines import ray_actors
from simulations.engines.ray_actors import RayExecutor
from simulations.sites import free_port
from tests.chats import chat_model
from tests.marks import slow
from tests.notes import Notes
from tests.server.parts import run, summary
from tests.tiny import move, random_records, with_persons

# Clients of very different sizes: one has no records to draw, one draws every record.
SIZES = (40, 3, 0, 90, 12)
# Room for all of them, and for passes of few rows, which are tried for every model.
MEMORY = 2**23
SPEC = UpdateSpec.of(RunConfig(rounds=5, batch_size=6, clip_norm=0.7, noise_multiplier=0.8))


def make_tasks(model, records, **changes) -> list[UpdateTask]:
    """One task per client, each with its own adapter and its own random streams."""
    start = read(model.peft_model)
    return [
        UpdateTask(
            adapter={name: tensor + 0.01 * client for name, tensor in start.items()},
            data=data,
            spec=dataclasses.replace(SPEC, **changes),
            round=1,
            sampler=PoissonSampler(
                num_registered=max(len(data), 6), expected_batch_size=6, source=SeededSource(client, "inclusion")
            ),
            noise=SeededSource(client, "noise"),
        )
        for client, data in enumerate(records)
    ]


def assert_close(expected, found, *, rtol: float = 1e-4) -> None:
    """Whether all these updates are the same, but for rounding."""
    for one, other in zip(expected, found, strict=True):
        assert isinstance(one, ClientUpdate), one
        assert isinstance(other, ClientUpdate), other
        assert (one.event, one.num_records) == (other.event, other.num_records)
        assert one.adapter.keys() == other.adapter.keys()
        for name, tensor in one.adapter.items():
            torch.testing.assert_close(other.adapter[name], tensor, atol=2e-5, rtol=rtol, msg=name)


def assert_equal(model, records, **changes) -> None:
    alone = execute_one_by_one(model, make_tasks(model, records, **changes))
    tasks = make_tasks(model, records, **changes)
    for one, task in zip(alone, tasks, strict=True):
        unmoved = [name for name, tensor in one.adapter.items() if torch.equal(tensor, task.adapter[name])]
        assert not unmoved, "the test would prove nothing"
    assert_close(alone, execute_stacked(model, tasks))


@pytest.fixture(scope="module")
def encoded(tiny_bert) -> TrainingModel:
    return model_of(tiny_bert)


def model_of(tiny_bert, *, memory_limit: int = MEMORY, layers: str = "all", **options: object) -> TrainingModel:
    """A classifier whose adapter is not at its start."""
    base = load_base(str(tiny_bert), task="SEQ_CLS", num_labels=3)
    return TrainingModel(move(attach(base, LoraSettings(rank=4, layers=layers))), memory_limit=memory_limit, **options)


@pytest.fixture(scope="module")
def clients() -> list[Records]:
    return [random_records(size, seed=size) for size in SIZES]


LMO = (
    '{"combination": "mixture", "gamma": {"weight": 0.5, "shape": 2.0, "scale": 0.3}, '
    '"uniform": {"weight": 0.5, "low": 1.0, "high": 3.0}}'
)
OF_LMO = {"mechanism": "lmo", "mechanism_parameters": LMO}
# Every day test_alone.py has each of these of two clients, but for LMO noise.
LONG = [
    *({"clipping": clipping, "optimizer": each} for clipping in CLIPPING_RULES for each in ("sgd", "adamw")),
    *({"noise_on": "upload", "optimizer": each} for each in ("sgd", "adamw")),
    *({"clipping": clipping, "noise_on": on, **OF_LMO} for clipping in CLIPPING_RULES for on in NOISE_TARGETS),
]


@pytest.mark.parametrize("changes", [{}, {"clipping": "per-tensor", **OF_LMO}, *slow(*LONG)])
def test_stacked_equals_alone_for_every_clipping_rule_optimizer_and_noise(encoded, clients, changes):
    assert_equal(encoded, clients, **changes)


@pytest.mark.parametrize("kind", ["gpt2", *slow("llama")])
@pytest.mark.parametrize("clipping", ["joint", *slow(*CLIPPING_RULES[1:])])
def test_stacked_equals_alone_on_causal_models(causal, make_records, kind, clipping):
    model = TrainingModel(causal(kind), memory_limit=MEMORY)
    assert_equal(model, [make_records(size, classes=0, seed=size) for size in SIZES], clipping=clipping)


def test_stacked_equals_alone_with_the_prefix_cache_and_with_memory_for_only_some_clients(encoder, clients):
    model = TrainingModel(encoder(layers="last-1"), memory_limit=MEMORY)
    assert model.cache is not None
    assert_equal(model, clients)
    model = TrainingModel(encoder(), memory_limit=2**18)
    assert 1 < clients_at_once(model) < len(SIZES)
    assert_equal(model, clients)


@pytest.mark.parametrize("optimizer", ["sgd", *slow("adamw")])
@pytest.mark.parametrize(
    ("trains", "quantization"),
    [("lora-b", "none"), ("lora-r", "none"), ("weights", "none"), ("weights", "ternary"), ("lora", "ternary")],
)
def test_stacked_equals_alone_whatever_is_trained(encoder, clients, optimizer, trains, quantization):
    model = TrainingModel(encoder(trains=trains, layers="last-1"), memory_limit=MEMORY)
    assert_equal(model, clients, optimizer=optimizer, quantization=quantization)


def test_stacked_equals_alone_for_clients_of_different_rank_on_a_merged_base(encoded, clients):
    model = encoded
    merged = {name: Product(0.1 * b, a) for name, (b, a) in factors_of(model.initial).items()}
    generator = torch.Generator().manual_seed(0)

    def tasks():
        made = []
        for rank, task in zip((1, 4, 2, 1, 9), make_tasks(model, clients), strict=True):
            shapes = {
                n: (rank if A_SUFFIX in n else t.shape[0], rank if B_SUFFIX in n else t.shape[1])
                for n, t in task.adapter.items()
                if "lora" in n
            }
            fresh = {n: torch.randn(shape, generator=generator.manual_seed(rank)) * 0.1 for n, shape in shapes.items()}
            made.append(dataclasses.replace(task, adapter={**task.adapter, **fresh}, merged=merged))
        return made

    assert_close(execute_one_by_one(model, tasks()), execute_stacked(model, tasks()))


def test_a_failing_client_returns_its_exception_and_the_others_keep_their_own_specification(encoded, clients):
    tasks = make_tasks(encoded, clients)
    malformed = {name: tensor[:1] for name, tensor in tasks[1].adapter.items()}
    tasks[1] = dataclasses.replace(tasks[1], adapter=malformed)
    tasks[3] = dataclasses.replace(tasks[3], spec=dataclasses.replace(SPEC, local_steps=1))
    first, failed, *others = execute_stacked(encoded, tasks)
    assert isinstance(failed, ValueError)
    assert [update.event.count for update in (first, *others)] == [3, 3, 1, 3]


def test_secure_noise_differs_between_clients_and_runs(encoded, make_records):
    tasks = [dataclasses.replace(t, noise=SecureSource()) for t in make_tasks(encoded, [make_records(0)] * 3)]
    moves = [
        torch.cat([(update.adapter[name] - task.adapter[name]).flatten() for name in task.adapter])
        for _ in range(2)
        for update, task in zip(execute_stacked(encoded, tasks), tasks, strict=True)
    ]
    correlation = torch.corrcoef(torch.stack(moves)) - torch.eye(6)
    assert correlation.abs().max() < 6 / len(moves[0]) ** 0.5


def wait_for(address: str, process: subprocess.Popen) -> str:
    """The address, once the cluster can be joined there."""
    deadline = time.monotonic() + 300
    while True:
        try:
            ray_actors.connect(address).shutdown()
            return address
        except InputError:
            assert process.poll() is None, "the cluster ended by itself"
            assert time.monotonic() < deadline, "the cluster did not come up"
            time.sleep(0.5)


@pytest.fixture(scope="session")
def cluster():
    """The address of a Ray cluster that another process started; all tests join the same one."""
    pytest.importorskip("ray", reason="needs the extra ray")
    port = free_port()
    ray = Path(sys.executable).with_name("ray")
    options = ["--head", "--block", f"--port={port}", "--node-ip-address=127.0.0.1", "--num-cpus=2"]
    command = [str(ray), "start", *options, "--include-dashboard=false"]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield wait_for(f"127.0.0.1:{port}", process)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=300)


# Every day the tests below join the same cluster.
@pytest.mark.slow
def test_an_existing_cluster_is_joined_at_its_address(cluster, small_run):
    import ray

    config = parse({**small_run, "engine": "ray", "ray_address": cluster, "ray_workers": 1})
    bench = workbench(config)
    records = [bench.client(client) for client in range(3)]
    expected = execute_one_by_one(bench.model, make_tasks(bench.model, records))
    with RayExecutor(config) as executor:
        found = executor(make_tasks(bench.model, records))
        assert ray.get_runtime_context().gcs_address.endswith(cluster.rpartition(":")[2])
        assert len(executor._actors) == 1
    assert_close(expected, found)


def test_an_address_without_a_cluster_is_refused_in_one_line(small_run):
    pytest.importorskip("ray", reason="needs the extra ray")
    config = parse({**small_run, "engine": "ray", "ray_address": "127.0.0.1:1"})
    with (
        pytest.raises(InputError, match=r"ray_address = '127\.0\.0\.1:1': no Ray cluster to join"),
        RayExecutor(config),
    ):
        pass


@pytest.mark.slow
def test_actors_tell_together_how_many_steps_of_a_round_are_done(cluster, small_run, monkeypatch):
    monkeypatch.setattr(ray_actors, "_PAUSE_SECONDS", 0.02)
    config = parse({**small_run, "engine": "ray", "ray_address": cluster, "ray_workers": 2})
    bench, told = workbench(config), []
    records = [bench.client(client) for client in range(3)]
    with RayExecutor(config) as executor:
        executor.tell = lambda what, done, total: told.append((what, done, total))
        for _ in range(2):
            executor(make_tasks(bench.model, records, local_steps=40))
    steps = [done for what, done, total in told if (what, total) == (TRAINING, 120)]
    assert ("starting actors", 0, 2) in told
    assert any(0 < done < 120 for done in steps)
    assert max(steps) <= 120


@pytest.mark.slow
def test_a_dead_actor_is_retried_once_and_then_its_clients_fail(cluster, small_run, monkeypatch, caplog):
    import ray

    config = parse({**small_run, "engine": "ray", "ray_address": cluster})
    bench = workbench(config)
    records = [bench.client(client) for client in range(3)]
    expected = execute_one_by_one(bench.model, make_tasks(bench.model, records))
    with caplog.at_level(logging.WARNING, logger="flwr"), RayExecutor(config) as executor:
        for one_actor_dies in (False, True):
            if one_actor_dies:
                ray.kill(executor._actors[0])
            assert_close(expected, executor(make_tasks(bench.model, records)))
        assert "first attempt" in caplog.text

        dead = executor._actors[0]
        ray.kill(dead)
        monkeypatch.setattr(executor, "_start_actor", lambda: dead)
        results = executor(make_tasks(bench.model, records))
        assert "second attempt" in caplog.text
    num_actors = len(executor._actors)
    assert [isinstance(result, Exception) for result in results] == [k % num_actors == 0 for k in range(3)]


def assert_engines_agree(values: dict[str, object], folder: Path, rule: str, engines: Sequence[str]) -> None:
    """Whole runs by one rule give the same losses and epsilons on all of these engines."""
    losses, epsilons = {}, {}
    changes = {"aggregation": rule, "relevance_threshold": 0.6, "client_ranks": [2, 4, 3] if rule == "flora" else []}
    for engine in engines:
        out = run(values, folder / engine, **changes, engine=engine)
        losses[engine] = pd.read_csv(out / "rounds.csv")["test_loss"].tolist()
        assert len(set(losses[engine])) == 3, "nothing was learnt, so the test would prove nothing"
        assert summary(out)["engine"] == engine
        epsilons[engine] = summary(out)["epsilon_local_max"]
    for engine in engines[1:]:
        assert losses[engine] == pytest.approx(losses[engines[0]], abs=1e-5)
    assert len(set(epsilons.values())) == 1


@pytest.mark.parametrize("rule", ["dp-lora", *slow(*(rule for rule in RULES if rule != "dp-lora"))])
def test_complete_runs_give_the_same_losses_and_epsilons_stacked_and_one_by_one(small_run, tmp_path, rule):
    assert_engines_agree(small_run, tmp_path, rule, ("in-process", "stacked"))


# An adapter, full weights, and a merged base with adapters of all ranks.
@pytest.mark.slow
@pytest.mark.parametrize("rule", ["dp-lora", "t-fedavg", "flora"])
def test_complete_runs_give_the_same_losses_and_epsilons_on_ray(cluster, small_run, tmp_path, rule):
    assert_engines_agree({**small_run, "ray_address": cluster}, tmp_path, rule, ("in-process", "ray"))


@pytest.fixture
def run_of_persons(small_run, table, tmp_path) -> dict[str, object]:
    """A federation that protects persons of three records each, of which two count."""
    columns = {"person_column": "patient", "max_records_per_person": 2}
    return {**small_run, **columns, "data": str(with_persons(table, tmp_path / "persons.csv", 3))}


@pytest.fixture
def answering_run(small_run, tmp_path) -> dict[str, object]:
    """A federation of a tiny model that learns responses."""
    rows = [{"q": f"What is flu {'rash ' * (i % 7)}?", "a": f"A {'viral ' * (i % 5)}disease."} for i in range(60)]
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"prompt_column": "q", "response_column": "a", "client_column": "", "num_clients": 3, "max_length": 60}
    model, data = chat_model(tmp_path / "chat"), tmp_path / "records.jsonl"
    changes |= {"memory_limit_mb": 8, "generated_answers": 0}
    return {**small_run, **changes, "model": str(model), "data": str(data)}


# Every day test_alone.py has persons and a language model.
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["run_of_persons", "answering_run"])
def test_complete_runs_of_persons_and_on_responses_agree(request, cluster, tmp_path, kind):
    values = {**request.getfixturevalue(kind), "ray_address": cluster}
    assert_engines_agree(values, tmp_path, "dp-lora", ("in-process", "stacked", "ray"))


def test_a_memory_limit_that_fits_one_client_is_reported_and_the_run_continues_in_process(small_run, tmp_path):
    run(small_run, tmp_path, told := Notes(), rank=256, memory_limit_mb=1, rounds=1)
    assert any("memory_limit_mb = 1 holds one client at a time" in note for note in told.notes)
