"""A run of which one node answers by file has the ledgers and the model, to the bit, of the run over the network.

The vaults are processes. Of the network, Flower's in the last test alone, this process stands for the others' carriers.
"""

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pandas as pd
import pytest
from flwr.app import Context, RecordDict
from safetensors.numpy import load_file

from clients.app import VAULT_KEY
from clients.app import app as client_app
from clients.deploy import by_file as at_node
from clients.deploy.folder import Node
from fedpriv.config import RunConfig, parse, to_flower
from fedpriv.errors import InputError, TooFewClientsError
from fedpriv.holder.vault.settings import FILE
from fedpriv.privacy.ledger.entries import Entry
from server.app import make_app
from server.deploy import by_file as at_coordinator
from server.deploy import membership
from server.deploy.folder import Coordinator
from server.mailbox import Mailbox
from server.observer import LogObserver
from simulations.engines.federation import RUN_ID, server_context
from simulations.engines.flower_private import task_identity
from simulations.engines.grid import LocalGrid
from simulations.sites import CLIENT, SERVER, DeployedFederation, Service, kit, read_ledger, wait_until
from tests.couriers import BUNDLE, make_coordinator, make_node, node_id
from tests.deployment.conftest import QUICK, holdings
from tests.holder.vault.running import Running

pytestmark = pytest.mark.deployment

CLIENTS = range(3)
CARRIED = 2


vaults: dict[int, Running] = {}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator[tuple[Coordinator, dict[int, Node]]]:
    """A coordinator and three nodes of the corpus, each with a vault of its own that runs."""
    folder = tmp_path_factory.mktemp("c")
    coordinator = make_coordinator(folder / "co")
    nodes = {client: make_node(folder / f"n{client}", coordinator, client) for client in CLIENTS}
    for client, node in nodes.items():
        with (node.folder / "vault.toml").open("a") as file:
            file.write("memory_limit_mb = 8\n")
        vaults[client] = Running(node.vault)
    yield coordinator, nodes
    for vault in vaults.values():
        vault.stop()


@pytest.fixture(params=[False, True], ids=["uploads", "sums"])
def config(request, site, tiny_bert) -> RunConfig:
    values = {"model": str(tiny_bert), "layers": "last-1", "rank": 4, "partition": "iid", "num_clients": 3}
    values |= {"rounds": 2, "local_steps": 1, "simulate": True, "memory_limit_mb": 8, "comparison": False}
    values |= {"baselines": False, "optimizer": "sgd", "learning_rate": 0.1, "noise_multiplier": 4.0}
    values |= {"node_keys": str(site[0].vaults), "min_clients": 3, "secure_aggregation": request.param}
    values |= {"registration_seconds": 60, "round_seconds": 60, "recipe": "per-sample", "batch_size": 8}
    values |= {"secure_masks": True} if request.param else {}
    return parse(values)


class Courier(threading.Thread):
    """Carries files as long as the run lasts, and counts its ways."""

    def __init__(self, run: Path, node: Node, stick: Path, loses: int, before: Callable[[int], None]) -> None:
        super().__init__(daemon=True)
        self.run_folder, self.node, self.stick = run, node, stick
        self.loses, self.before = loses, before
        self.lines: list[str] = []
        self.errors: list[Exception] = []
        self.num_ways = 0
        self.ends = threading.Event()

    def run(self) -> None:
        while not self.ends.wait(0.02):
            with suppress(InputError):  # nobody was asked yet, or the run has ended
                (request,) = at_coordinator.post(self.run_folder, self.stick, self.lines.append, seconds=0)
                self._carry(request)

    def _carry(self, request: Path) -> None:
        try:
            self.num_ways += 1
            self.before(self.num_ways)
            is_lost = self.num_ways == self.loses
            if not is_lost:
                self.lines.append(at_node.answer(self.node, request, request.with_suffix(".reply")))
            refused = at_coordinator.collect(self.run_folder, self.stick, self.lines.append, goes_on=is_lost)
            assert not refused
        except Exception as error:
            self.errors.append(error)
            self.ends.set()


def carry_out(
    site,
    config: RunConfig,
    folder: Path,
    *,
    by_file: bool = True,
    loses: int = 0,
    before: Callable[[int], None] = lambda way: None,
) -> Courier:
    """A run, and who carried its files, but lost those of one way, and did something before each."""
    coordinator, nodes = site
    out = folder / "run"
    config = parse({**to_flower(config), "out": str(out)})
    for client in CLIENTS:
        membership.reach(coordinator, client, by_file=by_file and client == CARRIED)
    contexts = {
        node_id(client): Context(
            RUN_ID, node_id(client), {VAULT_KEY: str(node.vault.socket)}, RecordDict(), to_flower(config)
        )
        for client, node in nodes.items()
        if not (by_file and client == CARRIED)
    }
    stick = folder / "stick"
    stick.mkdir(parents=True)
    courier = Courier(out, nodes[CARRIED], stick, loses, before)
    if by_file:
        courier.start()
    try:
        with task_identity(RUN_ID):
            grid = LocalGrid(contexts, None, client_app)
            grid.set_run(dataclasses.replace(grid.run, fab_hash=BUNDLE))
            make_app(LogObserver())(grid, server_context(config))
    finally:
        courier.ends.set()
        if by_file:
            courier.join(60)
    assert not courier.errors, (courier.errors, courier.lines)
    return courier


def told(entries: list[Entry], run: str) -> list[tuple[object, ...]]:
    """What a ledger says of a run, but for times and random ids."""
    names = ("phase", "data_set", "client", "round", "event", "rho_bar", "aggregate_scale", "noise_source", "note")
    return [tuple(getattr(entry, name) for name in names) for entry in entries if entry.run == run]


def figures(folder: Path, nodes: dict[int, Node]) -> tuple[object, ...]:
    """The model's bytes, and what all ledgers say of the run in a folder."""
    entries = read_ledger(folder / "run" / "ledger.sqlite")
    run = next(entry.run for entry in entries if entry.run)
    model = load_file(folder / "run" / "variants" / "global" / "adapter_model.safetensors")
    ledgers = [told(entries, run), *(told(read_ledger(node.vault.ledger), run) for node in nodes.values())]
    return {name: array.tobytes() for name, array in model.items()}, ledgers


def test_a_run_by_file_is_the_run_over_the_network_to_the_bit(site, config, tmp_path):
    carry_out(site, config, tmp_path / "network", by_file=False)
    courier = carry_out(site, config, tmp_path / "file")
    models, ledgers = zip(*(figures(tmp_path / name, site[1]) for name in ("network", "file")), strict=True)
    assert models[0] == models[1]
    assert ledgers[0] == ledgers[1]
    assert [entry[0] for entry in ledgers[1][1 + CARRIED]].count("charged") == config.rounds
    # One way is `post`, `answer`, `collect`: one to register, then one a round or, of a sum, six.
    assert courier.num_ways == 1 + config.rounds * (6 if config.secure_aggregation else 1)
    with pytest.raises(InputError, match="run: has ended; `fedpriv status` says how"):
        at_coordinator.post(tmp_path / "file" / "run", tmp_path, print)
    mailbox = Mailbox.of(tmp_path / "file" / "run")
    assert {asked.key for asked in mailbox.asked().values()} == {None}, "no answer can be opened any more"


def test_a_lost_stick_costs_the_round_that_node_alone(site, config, tmp_path):
    """The run goes on at the coordinator's word; in a sum of three, which needs all, it ends by name."""
    lost = 2  # the answer to the first round, or to the first exchange for its sum
    if config.secure_aggregation:
        with pytest.raises(TooFewClientsError, match=r"came from 2 clients, must come from at least 3"):
            carry_out(site, config, tmp_path, loses=lost)
        return
    courier = carry_out(site, dataclasses.replace(config, min_clients=2), tmp_path, loses=lost)
    rows = pd.read_csv(tmp_path / "run" / "clients.csv").query(f"client == {CARRIED}")
    assert [*zip(rows["round"], rows.status, strict=True)] == [(1, "failed"), (2, "ok")]
    assert "no answer came by file" in rows.detail.iloc[0]
    assert [line for line in courier.lines if "goes on" in line] == ["the run goes on without Clinic 2 (2), request 2"]


def test_a_vault_that_restarts_between_exchanges_has_dropped_out_uncharged(site, config, tmp_path):
    if not config.secure_aggregation:
        pytest.skip("uploads: have one exchange")
    before = len(read_ledger(site[1][CARRIED].vault.ledger))

    def restart(way: int) -> None:
        if way == 3:  # after its keys, before its shares
            vaults[CARRIED].stop()
            vaults[CARRIED] = Running(site[1][CARRIED].vault)

    with pytest.raises(TooFewClientsError, match=r"client 2: refused: "):
        carry_out(site, config, tmp_path, before=restart)
    assert len(read_ledger(site[1][CARRIED].vault.ledger)) == before


@pytest.mark.parametrize("sums", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["uploads", "sums"])
def test_a_run_over_flowers_network_and_by_file(table, tiny_bert, holders_run, tmp_path, sums):
    """Two nodes connect, and the third has no network: `start --by-file`, `post`, `answer`, `collect`."""
    own = holdings(tmp_path, table, *(["--budget-view", "aggregate"] if sums else []))
    site = DeployedFederation(tmp_path / "f", num_nodes=2, holdings=own, model=tiny_bert, settings=QUICK)
    try:
        site.invite(3)
        site.make_node(CARRIED, *own[CARRIED])
        with (site.node(CARRIED) / FILE).open("a") as file:
            file.write(QUICK)
        site.approve_model(CARRIED, tiny_bert)
        site.admit(CARRIED, "--by-file")
        for client in CLIENTS if sums else ():
            site.approve_peers(client)
        by_file = Service(tmp_path / "f" / "node-2.log", CLIENT, "start", site.node(CARRIED), "--by-file")
        site.services["node-2"] = by_file
        by_file.wait_for("the vault runs, without a network", 300)
        values = {**holders_run, "num_clients": 3, "rounds": 1, "secure_aggregation": sums, "local_steps": 1}
        values |= {"optimizer": "sgd", "learning_rate": 0.1, "noise_multiplier": 4.0, "out": str(tmp_path / "run")}
        values |= {"registration_seconds": 900, "round_seconds": 900}
        run, stick = site.start_run("run", values), tmp_path / "stick"
        stick.mkdir()
        # To register, what the node allows, and the one exchange of the round, or six.
        for way in range(1, 2 + (6 if sums else 1) + 1):
            wait_until(lambda: Path(f"{tmp_path}/run.by-file").exists() or run.process.poll() is not None, "run", 600)
            said = kit(SERVER, "post", tmp_path / "run", "--to", stick)
            request, reply = (stick / f"{way:04}-node-2.{kind}" for kind in ("request", "reply"))
            assert f"to Clinic 2 (2): {request}" in said
            assert "answered" in kit(CLIENT, "answer", site.node(CARRIED), request, "--out", reply)
            kit(SERVER, "collect", tmp_path / "run", "--from", stick)
        assert run.process.wait(timeout=600) == 0, run.text()
        rows = pd.read_csv(tmp_path / "run" / "clients.csv")
        assert dict(zip(rows.client, rows.status, strict=True)) == dict.fromkeys(CLIENTS, "ok")
        charged = [
            [(e.round, e.event, e.aggregate_scale) for e in entries if e.phase == "charged" and e.client == "2"]
            for entries in (site.entries(CARRIED), read_ledger(tmp_path / "run" / "ledger.sqlite"))
        ]
        assert charged[0] == charged[1]
        assert len(charged[0]) == 1
        (refused,) = {kit(SERVER, "post", tmp_path / "run", "--to", stick, code=2)}
        assert "has ended" in refused
    finally:
        site.stop()
