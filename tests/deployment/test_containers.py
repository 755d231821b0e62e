"""The images' steps and every command of docs/containers.md, carried out without Docker; and what confines them."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from fedpriv.learning.data import hospital
from simulations.sites import ROOT, read_ledger
from tests.tiny import LABELS, write_rows

DOCKERFILE = ROOT / "docs" / "Dockerfile"
COMPOSE = ROOT / "docs" / "compose.yaml"
MAKEFILE = (ROOT / "Makefile").read_text()
# Its user has to reach Python, and venv to be there.
PYTHON = "/usr/bin/python3"


def stages() -> dict[str, str]:
    """{"stage FROM": text} of the Dockerfile, without comments."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    parts = re.split(r"^FROM (\S+) AS (\S+)\n", text, flags=re.MULTILINE)
    return {f"{stage} FROM {source}": body for source, stage, body in zip(*[iter(parts[1:])] * 3, strict=True)}


def test_both_images_run_as_nobody_in_particular_and_tell_whether_they_are_well() -> None:
    assert list(stages()) == [
        "build FROM ${BASE}",
        "confined FROM ${BASE}",
        "coordinator FROM confined",
        "holder FROM confined",
    ]
    _, confined, *images = stages().values()
    assert "\nUSER 10001:10001\n" in confined
    assert "RUN" not in confined, "what root does happens in the first stage"
    for image in images:
        assert "HEALTHCHECK" in image
        assert not re.search(r"^(RUN|USER)", image, flags=re.MULTILINE)


def test_what_is_copied_into_the_image_is_enough_to_install_fedpriv() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    hooks = project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]
    assert hooks == {"custom": {}}, "hatchling then runs hatch_build.py"
    needed = {"pyproject.toml", "hatch_build.py", project["project"]["readme"], "LICENSE"}
    needed |= {"requirements.txt", "fedpriv", "clients", "server"}
    lines = re.findall(r"^COPY (.*) \S+$", stages()["build FROM ${BASE}"], flags=re.MULTILINE)
    assert {source for line in lines for source in line.split()} == needed
    left = (ROOT / ".dockerignore").read_text().splitlines()
    assert {f"!{source}" for source in needed} <= set(left)


def test_no_base_is_taken_by_a_name_that_may_change() -> None:
    text = DOCKERFILE.read_text()
    assert "\nARG BASE\nFROM ${BASE} AS build\n" in text, "no default: a build without a digest fails"
    assert "FEDPRIV_BASE:?" in COMPOSE.read_text()


HOLDERS = ("anna", "bruno", "clara")


def test_every_service_is_confined_and_records_are_mounted_to_be_read_alone() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    parts = [f"{name}{part}" for name in HOLDERS for part in ("", "-prepare", "-vault", "-supernode")]
    assert list(services) == ["coordinator", *parts]
    for name, service in services.items():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert all(volume.endswith(":ro") for volume in service["volumes"] if ":/data/" in volume)
        assert ("ports" in service) == (name == "coordinator")
        assert not {"privileged", "pid", "devices"} & service.keys()
        assert ("cap_add" in service) == (service["user"] == "0:0") == name.endswith("-prepare")


@pytest.mark.parametrize("name", HOLDERS)
def test_who_has_records_or_ledger_has_no_network_and_the_coordinators_code_is_another_user(name: str) -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    operator, prepare, vault, supernode = (
        services[f"{name}{part}"] for part in ("", "-prepare", "-vault", "-supernode")
    )
    assert operator["profiles"] == ["operator"], "it runs when it is asked for"
    assert vault["stop_grace_period"] == "90s", "as long as the units wait for a reply that may not leave yet"
    for each in (prepare, vault):
        assert each["network_mode"] == "none"
        assert "networks" not in each
    for each in (prepare, supernode):
        assert each["volumes"] == [f"{name}-state:/state"]
    assert operator["user"] == vault["user"] == "10001:10001"
    assert supernode["user"] == "10002:10002"


def test_no_two_holders_share_keys_or_a_ledger() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    named = {
        (v.split(":")[0], name.partition("-")[0])
        for name, each in services.items()
        for v in each["volumes"]
        if not v.startswith(".")
    }
    assert len({volume for volume, _ in named}) == len(named) == 8


@pytest.mark.skipif(not shutil.which("docker-compose"), reason="no docker-compose")
def test_compose_accepts_its_file() -> None:
    variables = {**os.environ, "FEDPRIV_CHECKOUT": str(ROOT), "FEDPRIV_BASE": "python@sha256:00"}
    command = ["docker-compose", "--file", str(COMPOSE), "config", "--quiet"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not shutil.which("hadolint"), reason="no hadolint")
def test_hadolint_has_nothing_to_say() -> None:
    done = subprocess.run(["hadolint", "--no-color", DOCKERFILE], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that other users reach too, with the records of three holders and a test set."""
    folder = Path(tempfile.mkdtemp(prefix="fedpriv-containers-"))
    folder.chmod(0o755)
    rows = [[m.text, m.department] for m in hospital.generate()[0] if m.department in LABELS]
    for number, name in enumerate(("anna", "bruno", "clara", "test")):
        write_rows(folder / f"{name}.csv", [["note", "department"], *rows[number::4][:60]]).chmod(0o644)
    yield folder
    shutil.rmtree(folder)


def lock_for_this_machine(target: Path) -> None:
    """Write requirements.txt with the torch that is installed here, which may be no file of the registry."""
    shutil.copy(ROOT / "requirements.txt", target)
    torch = target.with_name("torch.txt")
    torch.write_text(f"torch=={version('torch')}\n")
    recipe = re.search(r"uv (pip compile .*?) --output-file", MAKEFILE.replace("\\\n", " "), flags=re.DOTALL)
    found = {**os.environ, "UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", "")}
    words = [*shlex.split(recipe[1]), "--constraint", torch, "--output-file", target]
    subprocess.run([sys.executable, "-m", "uv", *words, "--quiet"], cwd=ROOT, env=found, check=True)


def assert_closed(state: Path, *, user: int) -> None:
    """The code that the coordinator ships can list nothing of a holder's state, nor open what is not for it."""
    own = {"user": user, "group": user, "extra_groups": [], "text": True}
    listed = subprocess.run(["ls", state, state / "node"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, **own)
    assert listed.stdout == ""
    for name in ("events.jsonl", "history.jsonl", "node.key", "vault.key", "receipts.jsonl"):
        assert (state / "node" / name).exists()
        opened = subprocess.run(["head", "-c1", state / "node" / name], stderr=subprocess.PIPE, **own)
        assert "Permission denied" in opened.stderr, name


@pytest.mark.nightly
@pytest.mark.skipif(os.geteuid() != 0 or not Path(PYTHON).exists(), reason="needs root, to be another user")
def test_the_steps_of_the_images_and_the_commands_of_the_page_make_a_run_of_three_holders(place: Path) -> None:
    programs = place / "programs"
    programs.mkdir()
    stand_in = Path(__file__).with_name("stand_in_docker.py")
    (programs / "docker").write_text(f'#!/bin/sh\nexec {sys.executable} {stand_in} "$@"\n')
    (programs / "docker").chmod(0o755)
    (programs / "python3").symlink_to(PYTHON)
    (place / "stand-in").mkdir()
    lock_for_this_machine(place / "stand-in" / "requirements.txt")
    variables = {**os.environ, "STAND_IN": str(place / "stand-in"), "PATH": f"{programs}:{os.environ['PATH']}"}
    variables.pop("PYTHONPATH", None)
    page = (ROOT / "docs" / "containers.md").read_text().replace("CHECKOUT=~/fedpriv", f"CHECKOUT={ROOT}")
    commands = "\n".join(re.findall(r"^```sh\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL))
    with (place / "log").open("w") as log:
        done = subprocess.run(["bash", "-ex", "-c", commands], cwd=place, env=variables, stdout=log, stderr=log)
    text = (place / "log").read_text()
    if done.returncode:
        subprocess.run([programs / "docker", "compose", "down"], cwd=place, env=variables)
    assert done.returncode == 0, text[-6000:]
    volumes = place / "stand-in" / "volumes"
    assert (volumes / "coordinator-results" / "first" / "summary.json").is_file()
    for holder in HOLDERS:
        charged = [e for e in read_ledger(volumes / f"{holder}-ledger" / "ledger.sqlite") if e.phase == "charged"]
        assert [each.round for each in charged] == [1, 2]
        assert (volumes / f"{holder}-state" / "node" / "node.key").stat().st_uid == 10001
        assert (volumes / f"{holder}-state" / "node" / "flower" / "node.key").stat().st_uid == 10002
        assert_closed(volumes / f"{holder}-state", user=10002)
