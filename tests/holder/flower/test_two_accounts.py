"""The table in docs/flower.md: Flower's accountant and a ledger at each holder, on one app and over two runs."""

import re
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp import NeighboringRelation, PrivacyConfig, RdpAccountant, SamplingMethod
from flwr.serverapp.exception import PrivacyBudgetExhausted
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg

from fedpriv.holder.flower import Account, UpdateMod
from simulations.engines.flower_private import task_identity
from simulations.engines.grid import LocalGrid
from tests.events import by_dp_accounting, gaussian
from tests.holder.flower.nodes import charges, contexts

PAGE = (Path(__file__).resolve().parents[3] / "docs/flower.md").read_text()
CLIP, NOISE, ROUNDS, CLIENTS = 1.0, 8.0, 10, 4


def app_with(mods: list) -> ClientApp:
    """One app, whose update has norm 10, with the mods of either side."""
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = message.content.array_records["arrays"]
        grown = ArrayRecord({name: Array(array.numpy() + 5.0) for name, array in arrays.items()})
        return Message(RecordDict({"arrays": grown, "m": MetricRecord({"num-examples": 1})}), reply_to=message)

    return app


def run(strategy, mods: list, run_id: int = 1) -> dict[str, np.ndarray]:
    """The model after a run; none where the last round had no uploads."""
    with task_identity(run_id):
        start = ArrayRecord({"w": Array(np.zeros(4, dtype=np.float32))})
        result = strategy.start(LocalGrid(contexts(CLIENTS, run_id), None, app_with(mods)), start, num_rounds=ROUNDS)
    return {name: array.numpy() for name, array in result.arrays.items()}


def averaging() -> FedAvg:
    return FedAvg(fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS)


def accounted(max_epsilon: float | None = None) -> DifferentialPrivacyClientSideFixedClipping:
    relation, sampling = NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.NO_AMPLIFICATION
    accountant = RdpAccountant(PrivacyConfig(1e-5, CLIENTS, relation, sampling, max_epsilon))
    return DifferentialPrivacyClientSideFixedClipping(averaging(), NOISE, CLIP, CLIENTS, accountant=accountant)


def told(row: str) -> list[float]:
    """The epsilons in both columns of a row of the page."""
    (line,) = re.findall(rf"^\| {row} \|(.*)\|$", PAGE, re.M)
    return [float(cell) for cell in re.findall(r"epsilon ([0-9.]+[0-9])", line)]


def by_rdp(z: float) -> float:
    return by_dp_accounting("rdp", gaussian(z, count=ROUNDS)).get_epsilon(1e-5)


def account_in(folder: Path, budget: float | None = None):
    def account_of(context: Context) -> Account:
        client = f"client {context.node_config['partition-id']}"
        ledger = folder / f"{client}.sqlite"
        return Account(ledger=ledger, client=client, num_records=100, budget_epsilon=budget, delta=1e-5)

    return account_of


def test_what_both_sides_know_after_one_run_and_after_two(tmp_path):
    flowers, ours = [], []
    account_of = account_in(tmp_path)
    for run_id in (1, 2):  # by servers that know nothing of each other
        strategy = accounted()
        assert np.isfinite(run(strategy, [fixedclipping_mod], run_id)["w"]).all()
        flowers.append(strategy.privacy_spent().epsilon)
        mods = [UpdateMod(account_of, clip_norm=CLIP, noise_multiplier=NOISE)]
        assert np.isfinite(run(averaging(), mods, run_id)["w"]).all()
        spent = {account_of(context).spent().epsilon for context in contexts(CLIENTS).values()}
        assert len(spent) == 1
        ours += spent
    assert told("after 10 rounds") == pytest.approx([flowers[0], ours[0]], abs=5e-4)
    assert told("after 10 more in a second run") == pytest.approx([flowers[1], ours[1]], abs=5e-4)
    assert flowers == pytest.approx([by_rdp(NOISE)] * 2)
    assert ours[0] == pytest.approx(by_rdp(NOISE / 2), rel=0.2)  # by pld, of a client whose data are replaced
    assert ours[0] < by_rdp(NOISE / 2)
    assert charges(tmp_path / "client 0.sqlite") == 2 * ROUNDS


def test_either_side_ends_a_run_at_its_own_limit(tmp_path):
    with pytest.raises(PrivacyBudgetExhausted):
        run(accounted(max_epsilon=1.0), [fixedclipping_mod])
    account_of = account_in(tmp_path, budget=2.0)
    run(averaging(), [UpdateMod(account_of, clip_norm=CLIP, noise_multiplier=NOISE)])
    assert 0 < charges(tmp_path / "client 0.sqlite") < ROUNDS
    assert account_of(contexts(CLIENTS)[11]).spent().epsilon <= 2.0
