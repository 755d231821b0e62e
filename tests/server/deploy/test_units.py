"""The unit of a coordinator's SuperLink: it writes its own folder alone, and systemd understands it."""

import shutil
import subprocess
from pathlib import Path

import pytest

from server.deploy.folder import Coordinator, make
from server.deploy.superlink import units


@pytest.fixture
def coordinator(tmp_path: Path) -> Coordinator:
    return make(tmp_path / "fed 100% $x", addresses=["fl.example.org"], port=9093, days=30, passphrase="correct horse")


def test_the_superlink_writes_its_own_folder_alone_and_not_its_authority(coordinator: Coordinator) -> None:
    lines = units(coordinator)[0].text().splitlines()
    folder = str(coordinator.folder).replace("%", "%%")
    assert [line for line in lines if line.startswith("ReadWritePaths")] == [f'ReadWritePaths="{folder}"']
    assert f'InaccessiblePaths="-{folder}/ca.key"' in lines
    assert {"ProtectSystem=strict", "NoNewPrivileges=yes", "PrivateTmp=yes", "Restart=on-failure"} <= set(lines)
    (start,) = [line for line in lines if line.startswith("ExecStart=")]
    assert start.endswith(f'"server.deploy" "start" "{folder.replace("$", "$$")}"')


@pytest.mark.parametrize(("port", "capability"), [(443, "CAP_NET_BIND_SERVICE"), (9093, "")])
def test_a_port_of_roots_needs_a_capability_and_a_run_elsewhere_its_folder(tmp_path: Path, port, capability) -> None:
    planned = {"data": "on-nodes", "labels": ["a", "b"], "out": str(tmp_path / "disk" / "run")}
    made = make(tmp_path / "fed", addresses=["::1"], port=port, days=30, passphrase="correct horse", planned=planned)
    text = units(made)[0].text()
    assert f"\nCapabilityBoundingSet={capability}\nAmbientCapabilities={capability}\n" in text
    assert f'\nReadWritePaths="{tmp_path}"\n' in text
    (tmp_path / "unit.service").write_text(text)
    if shutil.which("systemd-analyze"):
        done = subprocess.run(["systemd-analyze", "verify", "--man=no", tmp_path / "unit.service"], capture_output=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze")
def test_systemd_finds_nothing_wrong_with_the_unit(coordinator: Coordinator, tmp_path: Path) -> None:
    (unit,) = units(coordinator)
    file = tmp_path / f"{unit.name}.service"
    file.write_text(unit.text())
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", file], capture_output=True, text=True)
    ours = [line for line in done.stderr.splitlines() if "fedpriv" in line]
    assert (done.returncode, ours) == (0, []), done.stderr
    command = ["systemd-analyze", "security", "--offline=yes", "--threshold=30", file]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-300:]  # an exposure below 3.0 of 10
