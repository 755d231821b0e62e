"""The programs above the library, as commands of `fedpriv`."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from fedpriv import apps
from fedpriv.cli.main import app, main
from fedpriv.errors import InputError
from fedpriv.operate import approvals

COMMANDS = {
    "run": "--resume",
    "sweep": "--max-parallel",
    "init": "--text",
    "node": "approve-peers",
    "coordinator": "renew",
}


@pytest.mark.parametrize(("command", "shown"), COMMANDS.items())
def test_a_program_is_a_command_like_any_other(command, shown):
    assert command in CliRunner().invoke(app, ["--help"]).stdout
    done = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    assert shown in done.stdout
    assert f"fedpriv {command}" in done.stdout


def test_help_loads_no_program():
    code = (
        "import sys; from fedpriv.cli.main import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: print(sorted({'simulations', 'server', 'clients', 'flwr'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_written_app_has_the_bundle_that_nodes_approve(tmp_path, capsys):
    main_of("app", str(tmp_path / "my-app"))
    digest = approvals.bundle_digest(tmp_path / "my-app")
    assert digest == approvals.bundle_digest(apps.FLOWER_APP)
    assert digest in capsys.readouterr().out
    (tmp_path / "my-app/clients/node.py").write_text("changed = True\n")
    assert approvals.bundle_digest(tmp_path / "my-app") != digest


@pytest.mark.parametrize(("name", "message"), [("there", "exists"), ("my_app", "letters, digits and hyphens")])
def test_a_folder_that_cannot_hold_an_app_is_refused(tmp_path, capsys, name, message):
    (tmp_path / "there").mkdir()
    assert main_of("app", str(tmp_path / name)) == 2
    assert message in capsys.readouterr().err
    assert not list((tmp_path / "there").iterdir())


def main_of(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


def test_a_missing_package_is_named_by_its_extra(monkeypatch, capsys):
    for module in list(sys.modules):
        if module.partition(".")[0] in ("simulations", "flwr"):
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "flwr", None)
    with pytest.raises(InputError, match=r"^flwr: is not installed; run pip install 'fedpriv\[federation\]'$"):
        apps.program("simulations.engines.grid")


def test_another_folder_of_a_program_s_name_is_not_taken_for_it(monkeypatch):
    stranger = SimpleNamespace(__file__="/home/someone/server/app.py")
    monkeypatch.setattr(apps, "import_module", lambda _: stranger)
    with pytest.raises(InputError, match=r"^/home/someone/server/app.py: stands in the way of .*server/app; rename it"):
        apps.program("server.app")
