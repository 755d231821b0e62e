"""Every command of docs/deployment.md, run as it stands there but for address, ports and home folder."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from fedpriv.holder.vault.settings import FILE
from fedpriv.learning.data import hospital
from fedpriv.operate import joining
from fedpriv.privacy.ledger import keys
from simulations.sites import ROOT, free_port, read_ledger, wait_until
from tests.tiny import LABELS, write_rows

pytestmark = pytest.mark.deployment

# Of a holder, and of the test set: what the page shows does not depend on their number, but a machine's hour does.
MOST_RECORDS = 150

HOLDERS = (("anna", "St. Anna"), ("bruno", "St. Bruno"), ("clara", "St. Clara"))


@dataclass(frozen=True)
class Block:
    """Commands of the page: whether each holder runs them, and whether they run until they are ended."""

    text: str
    each: bool
    stays: bool


def blocks() -> list[Block]:
    page = (ROOT / "docs" / "deployment.md").read_text()
    found = re.findall(r"^```sh( each)?( terminal)?\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    return [Block(text, bool(each), bool(stays)) for each, stays, text in found]


class Shell:
    """Runs commands with a home folder and an address of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.port = free_port()
        self.log = home / "terminals.log"
        programs = Path(sys.executable).parent
        self.variables = {**os.environ, "HOME": str(home), "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
        self.terminals: list[subprocess.Popen[str]] = []

    def here(self, command: str) -> str:
        command = command.replace("fl.example.org", "127.0.0.1").replace("~/", f"{self.home}/")
        return with_fingerprints(command.replace("--port 9093", f"--port {self.port}"), self.home)

    def run(self, text: str) -> None:
        here = {"cwd": ROOT, "env": self.variables, "timeout": 500}
        done = subprocess.run(["bash", "-e", "-c", self.here(text)], **here, capture_output=True, text=True)
        assert done.returncode == 0, (
            f"{text}\n{done.stdout[-4000:]}{done.stderr[-2000:]}\n{self.log.read_text()[-4000:]}"
        )

    def open(self, text: str) -> None:
        with self.log.open("a") as log:
            command = ["bash", "-c", f"exec {self.here(text)}"]
            process = subprocess.Popen(
                command, cwd=ROOT, env={**self.variables, "PYTHONUNBUFFERED": "1"}, stdout=log, stderr=subprocess.STDOUT
            )
        self.terminals.append(process)

    def close(self) -> None:
        for terminal in reversed(self.terminals):
            family = [*psutil.Process(terminal.pid).children(recursive=True)] if terminal.poll() is None else []
            terminal.terminate()
            terminal.wait(timeout=60)
            for process in family:
                if process.is_running():
                    process.kill()


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    train, test = hospital.generate()
    names = tuple(dict.fromkeys(message.hospital for message in train))
    parts = {
        f"{key}.csv": [m for m in train if m.hospital == name] for (key, _), name in zip(HOLDERS, names, strict=False)
    }
    for file, messages in {**parts, "test.csv": test}.items():
        rows = [[m.text, m.department] for m in messages if m.department in LABELS][:MOST_RECORDS]
        write_rows(tmp_path / file, [["note", "department"], *rows])
    shell = Shell(tmp_path)
    yield shell
    shell.close()


def for_holder(text: str, place: int) -> str:
    """A holder's commands with another folder and invitation."""
    text = text.replace(f"~/{HOLDERS[0][0]}", f"~/{HOLDERS[place][0]}")
    return text.replace("invitations/0.toml", f"invitations/{place}.toml")


def with_fingerprints(command: str, home: Path) -> str:
    """A command with what is read out by telephone before: of its invitation, or of the vaults of others."""
    if found := re.search(r"--invite (\S+)", command):
        told = [joining.read(joining.Invitation, Path(found[1])).fingerprint]
    else:
        nodes = [home / key for key, _ in HOLDERS if f"approve-peers {home / key} " not in command]
        told = [keys.fingerprint(keys.public_line(node / "vault.key")) for node in nodes if node.exists()]
    heard = iter(told)
    return re.sub(r"(?<=--fingerprint )[A-Z2-7-]{24}", lambda _: next(heard), command)


def test_the_first_round_takes_few_commands():
    """At most five an institution, and three and two for each institution of the coordinator, until the run is over.

    Three files go from one to the other for each institution: its invitation, its application, and what all are given.
    """
    found = blocks()
    until = next(place for place, block in enumerate(found) if "coordinator run" in block.text)
    lines = [(block.each, line) for block in found[: until + 1] for line in block.text.splitlines()]
    of_coordinator = [line for _, line in lines if "fedpriv coordinator" in line and "coordinator units" not in line]
    of_institution = [line for _, line in lines if "fedpriv node" in line]
    assert {each for each, line in lines if "fedpriv node" in line} == {True}
    assert (len(of_coordinator), len(of_institution)) == (5, 4)
    handed_over = {file for _, line in lines for file in re.findall(r"(?:anna/|federation/)(\S+?\.toml)", line)}
    assert handed_over == {"invitations/0.toml", "application.toml", "roster.toml"}


def test_the_page_holds_as_it_stands(shell):
    assert [block.stays for block in blocks()].count(True) == 2
    begin = time.monotonic()
    for block in blocks():
        for place in range(len(HOLDERS) if block.each else 1):
            text = for_holder(block.text, place) if block.each else block.text
            if block.stays:
                shell.open(text)
            else:
                shell.run(text)
            if "node init" in text:
                # Its first start tries the passes that its memory allows, which the page does not speak of.
                with (shell.home / HOLDERS[place][0] / FILE).open("a") as file:
                    file.write("memory_limit_mb = 32\n")
        if "coordinator run" in block.text:
            print(f"from empty folders to the end of the first run: {(time.monotonic() - begin) / 60:.1f} minutes")
        if block.stays:
            ready = "nodes online: 3 of 3" if block.each else "SuperLink answers"
            wait_until(lambda ready=ready: ready in shell.log.read_text(), ready, 120)
    folder = shell.home / "federation" / "runs" / "first"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["adapters_moved"]  # three noisy rounds need not be better than none
    assert 0 < summary["epsilon_aggregate_max"] <= 2
    assert [client["name"] for client in summary["clients"]] == [name for _, name in HOLDERS]
    assert {
        record["signature"] != "" for record in json.loads((folder / "registrations.json").read_text()).values()
    } == {True}
    for (key, _), client in zip(HOLDERS, summary["clients"], strict=True):
        entries = read_ledger(shell.home / key / "ledger.sqlite")
        assert [e.round for e in entries if e.phase == "released"] == [1, 2, 3]
        assert {e.noise_source for e in entries if e.phase == "charged"} == {"secure"}
        assert entries[0].num_records == client["num_records"]
