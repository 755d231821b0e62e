"""A coordinator, nodes that it reaches by file, and what somebody carries between them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flwr.app import Message

from clients.deploy import by_file as at_node
from clients.deploy import folder as node_folder
from clients.deploy.folder import Node
from fedpriv.config import parse
from fedpriv.holder.wire.frame import Request
from fedpriv.operate import joining
from fedpriv.privacy.ledger import keys
from server.by_file import MixedGrid
from server.deploy import by_file as at_coordinator
from server.deploy import folder as coordinator_folder
from server.deploy import membership
from server.deploy.folder import Coordinator
from server.exchange import message_to
from server.mailbox import Mailbox
from simulations.engines.grid import LocalGrid
from simulations.sites import free_port

BUNDLE = "b" * 64


def node_id(client: int) -> int:
    """Flower's id of a client's node."""
    return 100 + client


def make_coordinator(folder: Path) -> Coordinator:
    return coordinator_folder.make(
        folder, addresses=["127.0.0.1"], port=free_port(), days=30, passphrase="correct horse battery"
    )


def make_node(folder: Path, coordinator: Coordinator, client: int, **settings: object) -> Node:
    """A node that the coordinator has invited and admitted; it reaches it by file."""
    asked = {"name": f"Clinic {client}", "partition_id": client, "superlink": coordinator.address}
    public = {"ca": coordinator.ca_certificate.read_text(), "key": keys.public_line(coordinator.key)}
    invitation = joining.Invitation(**asked, **public)
    (coordinator.invitations / f"{client}.toml").write_text(joining.text(invitation, "for a test"))
    node = node_folder.make(folder, invitation, **settings).node
    with node.approved.open("a") as file:
        file.write(f"{BUNDLE}\n")
    # As `admit` does, but that no SuperLink runs.
    for file, key in ((coordinator.nodes, node.key), (coordinator.vaults, node.vault.key)):
        (file / f"{client}.pub").write_text(f"{keys.public_line(key)}\n")
    (coordinator.nodes / f"{client}.id").write_text(f"{node_id(client)}\n")
    membership.reach(coordinator, client, by_file=True)
    return node


@dataclass
class Carried:
    """A run that waits, and a folder for the files.

    Attributes:
        grid: of the run.
        coordinator: of the run.
        run: its folder, which need not be there.
        folder: for the files.
        lines: that commands have said.
    """

    grid: MixedGrid
    coordinator: Coordinator
    run: Path
    folder: Path
    lines: list[str] = field(default_factory=list)

    @staticmethod
    def of(coordinator: Coordinator, folder: Path, run_config: Mapping[str, object], network: LocalGrid) -> "Carried":
        run, stick = folder / "run", folder / "stick"
        stick.mkdir(parents=True)
        config = parse({**run_config, "out": str(run), "node_keys": str(coordinator.vaults)})
        clients = {node_id(client): client for client in keys.files_of_nodes(coordinator.vaults)}
        grid = MixedGrid(network, clients, dict(run_config), Mailbox.begun(config, BUNDLE))
        return Carried(grid, coordinator, run, stick)

    def ask(self, requests: Mapping[int, Request]) -> dict[int, Path]:
        """Let the run ask these clients; the files that `post` then writes."""
        self.asked = [message_to(node_id(client), request, 1) for client, request in requests.items()]
        self.grid.push_messages(self.asked)
        return self.post()

    def post(self) -> dict[int, Path]:
        files = at_coordinator.post(self.run, self.folder, self.lines.append, seconds=0)
        return {int(file.stem.rpartition("-")[2]): file for file in files}

    def answer(self, node: Node, request: Path, name: str = "") -> Path:
        """The file with the node's answer."""
        out = self.folder / f"{name or request.stem}.reply"
        self.lines.append(at_node.answer(node, request, out, retry_seconds=0))
        return out

    def collect(self, **options: bool) -> str:
        """What `collect` says."""
        lines: list[str] = []
        at_coordinator.collect(self.run, self.folder, lines.append, **options)
        return "\n".join(lines)

    def arrived(self) -> list[Message]:
        """The replies that the run gets."""
        return list(self.grid.pull_messages([message.metadata.message_id for message in self.asked]))
