"""`fedpriv ...` as a whole: exit codes, clean output, no traceback; `data check` and `report`; programs above it."""

import hashlib
import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedpriv import apps
from fedpriv.errors import InputError
from fedpriv.operate import approvals
from tests.cli.command_line import as_json, fedpriv, refused
from tests.cli.inputs import ACCOUNT


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([*ACCOUNT[:2], "-1", *ACCOUNT[3:]], "noise_multiplier = -1"),
        ([*ACCOUNT[:-1], "2"], "delta = 2"),
        ([*ACCOUNT, "--rho-bar", "1.5"], "rho_bar = 1.5"),
        ([*ACCOUNT, "--accountant", "moments"], "accountant = 'moments': must be one of pld, rdp, closed-form"),
        ([*ACCOUNT, "--clipping", "none"], "clipping = 'none': must be one of"),
        (["account"], "noise-multiplier"),
        (["data", "check", "/no/such.csv"], "/no/such.csv"),
        (["report", "/no/such/run"], "/no/such/run"),
    ],
)
def test_a_users_mistake_exits_with_2_and_prints_nothing_else(arguments, part):
    out, err = fedpriv(*arguments, code=2)
    assert out == ""
    assert part in err


def test_data_check_shows_what_a_run_would_see(table):
    result = as_json("data", "check", table, "--client", "site")
    assert result["records"] == 240
    assert result["labels"] == {"cardiology": 80, "dermatology": 80, "neurology": 80}
    assert sum(result["clients"].values()) == 240
    assert "text, label, site" in refused("data", "check", table, "--text", "body")


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("r.jsonl", "", "r.jsonl"),
        ("r.txt", "x", "unknown format"),
        ("r.jsonl", '{"te\\nxt": "words", "\\u001b[2Jlabel": "a"}', "it has 'te\\nxt', '\\x1b[2Jlabel'"),
    ],
    ids=["empty", "unknown format", "steers the terminal"],
)
def test_data_check_of_an_unusable_file_exits_with_2_and_one_line(tmp_path, name, content, part):
    (tmp_path / name).write_text(content)
    assert part in refused("data", "check", tmp_path / name, "--json")
    refused("report", tmp_path, "--json")


def test_the_installed_script_prints_json_or_one_line_of_error():
    script = Path(sys.executable).parent / "fedpriv"
    keys = ["config", "keys", "data_seed"]
    found = subprocess.run([script, *keys, "--json"], capture_output=True, text=True, timeout=120)
    assert (found.returncode, found.stderr) == (0, "")
    assert json.loads(found.stdout) == as_json(*keys)
    wrong = subprocess.run([script, "docs", "privcy"], capture_output=True, text=True, timeout=120)
    assert (wrong.returncode, wrong.stdout, wrong.stderr) == (2, "", refused("docs", "privcy"))


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        *(("run", "--resume"), ("sweep", "--max-parallel"), ("init", "--text")),
        *(("node", "approve-peers"), ("coordinator", "renew")),
    ],
)
def test_a_program_is_a_command_like_any_other(command, shown):
    assert command in fedpriv("--help")[0]
    said, _ = fedpriv(command, "--help")
    assert shown in said
    assert f"fedpriv {command}" in said


def test_a_written_app_is_the_bundle_that_nodes_approve_which_is_small_and_holds_no_library(tmp_path, monkeypatch):
    bundles, bundle_of = [], approvals.bundle_of
    monkeypatch.setattr(approvals, "bundle_of", lambda app: bundles.append(bundle_of(app)) or bundles[-1])
    told = as_json("app", tmp_path / "my-app")["bundle"]
    (bundle,) = bundles
    assert told == hashlib.sha256(bundle).hexdigest()
    assert len(bundle) < 2**20
    with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
        names = {name for name in archive.namelist() if not name.startswith(".info/")}
        for name in names:
            assert (tmp_path / "my-app" / name).read_bytes() == archive.read(name)
    assert {"clients/app.py", "server/app.py"} <= names
    assert not [name for name in names if "/deploy/" in name], "a kit's change would need every node's approval"
    others = {name for name in names if not name.startswith(("clients/", "server/"))}
    assert others <= {"pyproject.toml", "LICENSE", "README.md"}


@pytest.mark.parametrize(("name", "message"), [("there", "exists"), ("my_app", "letters, digits and hyphens")])
def test_a_folder_that_cannot_hold_an_app_is_refused(tmp_path, name, message):
    (tmp_path / "there").mkdir()
    assert message in refused("app", tmp_path / name)
    assert not list((tmp_path / "there").iterdir())


def test_a_missing_package_is_named_by_its_extra(monkeypatch):
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


def test_pages_that_messages_name_are_printed_whole_or_in_part(tmp_path):
    whole, part = (fedpriv("docs", page, folder=tmp_path)[0] for page in ("docs/privacy.md", "privacy#persons"))
    assert whole.startswith("# ")
    assert part.startswith("## Persons\n")
    assert part.rstrip() in whole
    assert "\n## " not in part
    assert {"privacy", "appendices/risk"} <= as_json("docs")["pages"].keys()
    assert refused("docs", "privcy") == "error: PAGE = 'privcy': no such page; did you mean privacy?\n"
    assert "has no such part" in refused("docs", "privacy#nothing")


def test_keys_are_found_by_a_word_in_their_name_or_meaning():
    lines = fedpriv("config", "keys", "data_seed")[0].splitlines()
    assert lines[0] == 'data_seed = ""'
    assert "partition" in lines[1]
    assert len(as_json("config", "keys")["keys"]) > 100
    assert "no key is about it" in refused("config", "keys", "gibberish")


def test_help_shows_what_is_used_every_day_before_research():
    page = fedpriv("--help")[0]
    titles = ("Every day:\n", "\n  run ", "Between institutions:\n", "\n  node ", "Research, ", "\n  lmo ")
    places = [page.index(words) for words in titles]
    assert places == sorted(places)
