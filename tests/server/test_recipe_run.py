"""Runs of the recipe `fedpriv`: what every round trains and costs, and that all of them together meet the target."""

import csv
import math
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from flwr.app import Context, RecordDict

from clients import node
from fedpriv.config import parse, read, to_flower
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import Request
from fedpriv.learning.training import noise_plan
from fedpriv.learning.training.noise_plan import calibrated, derived_learning_rate, with_learning_rates
from fedpriv.learning.training.rounds import RunSchedule
from fedpriv.learning.training.workbench import workbench
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.privacy.ledger.reader import reading
from fedpriv.runs import files
from server import checkpoint
from server.bookkeeping import Books
from server.observer import described
from simulations.engines.flower_private import task_identity
from tests.events import gaussian
from tests.marks import slow
from tests.server.parts import StopsAfter, global_adapter, registered, released, run, summary
from tests.wire import arrays_of

TARGET, SIZES = 3.0, [84, 56, 52]
ROUNDS = {"rounds": 8, "lora_rounds": 3, "target_epsilon": TARGET, "delta": 1e-5, "baselines": False}


@pytest.fixture(scope="module")
def recipe(small_run):
    """Configuration values of a small run of the recipe."""
    of_the_paper = ("local_steps", "batch_size", "noise_multiplier")
    return {key: value for key, value in small_run.items() if key not in of_the_paper} | ROUNDS


@pytest.fixture(scope="module")
def finished(recipe, tmp_path_factory):
    """The folder of such a run."""
    folder = tmp_path_factory.mktemp("recipe")
    return run(recipe, folder / "run", ledger=str(folder / "ledger.sqlite"))


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "clients.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_round_costs_what_its_phase_says_and_the_ledger_holds_it_with_its_own_event(finished):
    by_round = {int(row["round"]): row for row in rows(finished) if row["client"] == "0"}
    probabilities = [float(by_round[r]["sampling_probability"]) for r in range(1, 9)]
    assert probabilities == [1.0] * 5 + [0.125] * 3
    noise = [float(by_round[r]["noise_multiplier"]) for r in range(1, 9)]
    assert len(set(noise[1:5])) == len(set(noise[5:])) == 1
    assert len({noise[0], noise[1], noise[5]}) == 3
    events = list(map(gaussian, noise, probabilities))
    spent = summary(finished)["epsilon_local_max"]
    assert spent == pytest.approx(epsilon_of(events, 1e-5).epsilon, rel=1e-9)
    assert 0.995 * TARGET < spent <= TARGET, "start and steps are one charge that meets the target"
    with reading(finished.parent / "ledger.sqlite") as db:
        for data_set in db.data_sets():
            events = [release.event for release in db.releases(data_set.id)]
            counts = {(event.noise_multiplier, event.sampling_probability): event.count for event in events}
            assert sorted((q, count) for (_, q), count in counts.items()) == [(0.125, 3), (1.0, 1), (1.0, 4)]
            assert epsilon_of(events, data_set.delta).epsilon <= TARGET


def test_a_b_and_head_are_trained(finished):
    found = summary(finished)
    assert found["adapters_moved"], found["unmoved_tensors"]
    names = global_adapter(finished).keys()
    assert {"lora_A", "lora_B", "classifier"} <= {part for name in names for part in name.split(".")}


def test_the_head_alone_leaves_the_rest_as_it_was_and_is_tested_every_so_many_rounds_and_at_the_end(recipe, tmp_path):
    folder = run(recipe, tmp_path / "run", train="head", rounds=5, evaluate_every=3, lora_rounds="")
    assert all(not tensor.any() for name, tensor in global_adapter(folder).items() if "lora_B" in name)
    with (folder / "rounds.csv").open(newline="") as file:
        accuracies = {int(row["round"]): row["test_accuracy"] for row in csv.DictReader(file)}
    assert [round_ for round_, accuracy in accuracies.items() if accuracy] == [0, 3, 5]
    found = summary(folder)
    assert (found["adapters_moved"], found["accuracy"]) == (True, float(accuracies[5]))


@pytest.mark.parametrize("rule", ["bitfit", *slow("fedavg")])
def test_the_head_is_found_among_weights_and_biases_that_are_trained_beside_it(recipe, tmp_path, rule):
    values = recipe | {"recipe": "fedpriv", "aggregation": rule, "rounds": 3, "lora_rounds": 1}
    initial = workbench(parse(values)).initial
    rate = derived_learning_rate(calibrated(parse(values), SIZES, initial), SIZES, initial)
    assert rate.largest_learning_rate == 150, "of a head of three classes"
    folder = run(values, tmp_path / "run")
    assert [int(row["round"]) for row in rows(folder) if row["client"] == "0"] == [1, 2, 3]


SUMMED = {"secure_aggregation": True, "min_clients": 3}


@pytest.fixture(params=[{}, SUMMED], ids=["local", "sum"])
def of_r(request, recipe, monkeypatch):
    """Configuration values of a run of which so few records train R, but not a wide one."""
    monkeypatch.setattr(noise_plan.recipe, "LORA_PAYS", math.inf)
    monkeypatch.setattr(noise_plan.recipe, "NARROW_ROUNDS", 6)
    own = {key: value for key, value in recipe.items() if key not in ("rank", "alpha", "lora_rounds")}
    return own | {"train": "auto", "rounds": 9, "rank": 24, "alpha": 96.0, "layers": "all", **request.param}


@pytest.mark.parametrize(
    "of_r", [pytest.param({}, id="local"), pytest.param(SUMMED, id="sum", marks=pytest.mark.slow)], indirect=True
)
@pytest.mark.parametrize("by_folder", [True, *slow(False)])
def test_a_run_that_trains_a_block_of_r_is_one_of_that_rank_throughout_and_resumes_so(of_r, tmp_path, by_folder):
    whole, stopped = run(of_r, tmp_path / "whole"), tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        run(of_r, stopped, StopsAfter(4))
    # As a person and as Flower's run resume it: by what its folder says, or as it was first configured.
    run(read(stopped / "config.toml") if by_folder else of_r, stopped, resume=str(stopped))
    found = [global_adapter(folder) for folder in (whole, stopped)]
    assert {tensor.shape[0] for name, tensor in found[0].items() if "lora_A" in name} == {16}
    for name, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[1][name], rtol=0, atol=0)
    for folder in (whole, stopped):
        config, told = files.read_config(folder), summary(folder)
        assert (config.rank, config.alpha, config.trained_rank, config.rounds) == (24, 96.0, 16, 6)
        assert told["adapters_moved"]
        view = "aggregate" if config.secure_aggregation else "local"
        assert 0.99 * TARGET < told[f"epsilon_{view}_max"] <= TARGET


def charges_of_round(path: Path, round_: int) -> Counter[str]:
    """How many releases of the round a ledger holds, by client."""
    with reading(path) as db:
        keys = [key for d in db.data_sets() for run in db.runs(d.id) for key, _ in db.releases_of(d.id, run.run)]
    return Counter(key.client for key in keys if key.round == round_)


def test_a_round_that_was_lost_after_its_charges_is_the_same_release_when_the_run_resumes(of_r, tmp_path, monkeypatch):
    """Attack: were the chosen rank in what nodes release by, each would release twice, and the server book one."""
    ledger, folder = tmp_path / "ledger.sqlite", tmp_path / "run"
    written = checkpoint.write

    def write(folder, found):
        if found.round == 4:
            raise KeyboardInterrupt
        written(folder, found)

    monkeypatch.setattr(checkpoint, "write", write)
    with pytest.raises(KeyboardInterrupt):
        run(of_r, folder, simulate=False, ledger=str(ledger))
    monkeypatch.setattr(checkpoint, "write", written)
    run(read(folder / "config.toml"), folder, resume=str(folder))
    nodes = sorted(Path(f"{ledger}.nodes").glob("*.sqlite"))
    assert len(nodes) == len(SIZES)
    of_nodes = sum((charges_of_round(node, 4) for node in nodes), Counter())
    # A sum begins again with new terms, and another release then.
    num_releases = 2 if "secure_aggregation" in of_r else 1
    assert of_nodes == charges_of_round(ledger, 4) == {str(client): num_releases for client in range(len(SIZES))}


# Every day each view at one target, and each target on one view.
EVERY_DAY = {("local", 0.5), ("rho", 2.0), ("aggregate", 8.0)}
OTHERS = sorted({*product(("local", "rho", "aggregate"), (0.5, 2.0, 8.0))} - EVERY_DAY)


@pytest.mark.parametrize(
    ("view", "target"), [*sorted(EVERY_DAY), *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHERS)]
)
def test_noise_meets_the_target_on_every_view_and_wastes_little(recipe, view, target):
    hidden = {"secure_aggregation": True, "min_clients": 3} if view == "aggregate" else {}
    config = parse(recipe | ROUNDS | hidden | {"privacy_view": view, "target_epsilon": target})
    initial = workbench(parse(recipe)).initial
    found = with_learning_rates(calibrated(config, SIZES, initial), SIZES, initial)
    books = Books(found, "run", registered(dict(enumerate(SIZES))), initial=initial)
    released(books, range(1, 9), range(3))
    costs = [books.accounts.final(view)[client].epsilon for client in range(3)]
    assert max(costs) <= target
    # On `rho` the worst case is more even weights than these clients have.
    assert max(costs) > (0.8 if view == "rho" else 0.995) * target


def test_a_budget_counts_rounds_that_cost_differently(recipe):
    initial = workbench(parse(recipe)).initial
    config = calibrated(parse(recipe | ROUNDS), SIZES, initial)

    def allowed(budget: float) -> int:
        found = with_learning_rates(replace(config, budget_epsilon=(budget,)), SIZES, initial)
        books = Books(found, "run", registered(dict(enumerate(SIZES))), initial=initial)
        number = books.rounds_allowed[0]
        for round_ in range(1, 9):
            if books.within_budget(round_, [0]) != [0]:
                assert round_ == number + 1
                break
            released(books, [round_])
            assert books.accounts.final("local")[0].epsilon <= budget
        return number

    schedule = RunSchedule.of(with_learning_rates(config, SIZES, initial))
    costs = []
    for num_rounds in range(1, 9):
        specs = [(phase.spec, count) for phase, count in schedule.following(0, num_rounds)]
        events = [gaussian(spec.noise_multiplier, spec.sampling_probability, count) for spec, count in specs]
        costs.append(epsilon_of(events, 1e-5).epsilon)
    assert costs == sorted(costs)
    for budget in (0.5 * costs[0], 1.01 * costs[0], 1.01 * costs[3], 1.01 * costs[7]):
        assert allowed(budget) == sum(cost <= budget for cost in costs)


def test_a_costly_round_charged_twice_and_a_cheap_one_missed_are_judged_by_what_they_cost(recipe, tmp_path):
    """As after a resume: as many releases as rounds, but not one of each."""
    initial = workbench(parse(recipe)).initial
    costly_first = {"start_noise_multiplier": 1.0, "noise_multiplier": 40.0, "target_epsilon": ""}
    config = with_learning_rates(calibrated(parse(recipe | costly_first), SIZES, initial), SIZES, initial)
    one = gaussian(1.0)
    budget = 1.2 * epsilon_of([one], 1e-5).epsilon
    config = replace(config, budget_epsilon=(budget,))
    client = registered({0: 84}, keeps_replies=True)
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        Books(config, "run", client, initial=initial, ledger=ledger).charge(1, {0: "request"})
        books = Books(config, "run", client, initial=initial, ledger=ledger, resumed_after=0)
        assert books.rounds_allowed[0] == 8
        books.charge(1, {0: "another request"})
        books.settle({0: "reply"})
        spent = books.accounts.final("local")[0].epsilon
        assert spent >= epsilon_of([one.with_count(2)], 1e-5).epsilon > budget
        assert books.within_budget(3, [0]) == []


def test_a_client_that_missed_the_cheap_rounds_is_judged_by_what_it_spent(recipe):
    initial = workbench(parse(recipe)).initial
    costly_last = {"noise_multiplier": 40.0, "lora_noise_multiplier": 1.0, "lora_sampling_probability": 1.0}
    config = calibrated(parse(recipe | costly_last | {"target_epsilon": ""}), SIZES, initial)
    budget = 1.05 * epsilon_of([gaussian(1.0)], 1e-5).epsilon
    config = replace(with_learning_rates(config, SIZES, initial), budget_epsilon=(budget,))
    books = Books(config, "run", registered({0: 84}), initial=initial)
    spent = []
    for round_ in range(6, 9):  # it was never asked before
        if books.within_budget(round_, [0]):
            released(books, [round_])
            spent.append(round_)
    assert spent == [6]
    assert books.accounts.final("local")[0].epsilon <= budget


def test_the_learning_rate_is_that_of_the_rule_and_a_given_one_is_kept(recipe):
    initial = workbench(parse(recipe)).initial
    config = calibrated(parse(recipe | ROUNDS), SIZES, initial)
    weights = [n**0.5 for n in SIZES]
    noise = config.clip_norm * config.noise_multiplier * sum(w * w for w in weights) ** 0.5
    nu = noise / (4**0.5 * sum(w * n for w, n in zip(weights, SIZES, strict=True)))
    rate = derived_learning_rate(config, SIZES, initial)
    assert rate.noise_per_step_length == pytest.approx(nu)
    delivered = (sum((1 - 0.9**s) ** 2 for s in range(4, 8)) / 4) ** 0.5  # of steps 4 to 7 rounds before the end
    assert len(workbench(config).label_names) == 3, "so the largest rate is 150"
    assert rate.learning_rate == pytest.approx(min(150 * 4, 0.487 / (delivered * nu)) / 4)
    assert f"min(150 T, 0.487 / (a nu)) = {4 * rate.learning_rate:.4g}" in described(rate)
    assert derived_learning_rate(replace(config, learning_rate=7.0), SIZES, initial) is None
    given = replace(config, learning_rate=7.0, lora_learning_rate=2.0)
    assert with_learning_rates(given, SIZES, initial).learning_rate == 7.0
    assert with_learning_rates(given, SIZES, initial).lora_learning_rate == 2.0


def test_the_start_is_in_the_node_s_ledger_before_it_is_computed(recipe, tmp_path):
    values = parse(recipe | {"simulate": False, "comparison": False})
    config = with_learning_rates(calibrated(values, SIZES, workbench(values).initial), SIZES, workbench(values).initial)
    ledger = tmp_path / "node.sqlite"
    keys = {"partition-id": 0, node.TRUST_KEY: True, node.LEDGER_KEY: str(ledger)}
    context = Context(1, 7, keys, RecordDict(), to_flower(values))
    spec = RunSchedule.of(config).spec(1)
    arrays = {kinds.ADAPTER: arrays_of(workbench(values).initial)}
    request = Request.of("train", to_flower(values), fields=kinds.pack_instruction("run", 1, spec), arrays=arrays)
    with task_identity(1):
        task = node.prepare(request, context).task
        with reading(ledger) as db:  # nothing is computed yet
            (entry,) = [entry for entry in db.entries() if entry.phase == "charged"]
            (release,) = [release for data_set in db.data_sets() for release in db.releases(data_set.id)]
        assert entry.phase == "charged"
        assert release.event == gaussian(spec.noise_multiplier)
        assert (task.spec.objective, task.spec.trains) == ("class-sums", "head")
        assert task.sampler.sampling_probability == 1.0
        assert torch.is_tensor(task.data.labels)
