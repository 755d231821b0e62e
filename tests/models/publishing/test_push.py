"""`fedpriv push` shows what would leave, refuses what nobody allowed, and uploads four files or none."""

import base64
import json
import re
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from fedpriv.config import parse
from fedpriv.errors import InputError
from fedpriv.models.publishing import find, hub
from fedpriv.privacy.accounting.events import to_json
from fedpriv.privacy.ledger import Charge, Key, Ledger
from server.observer import LogObserver
from simulations.engines import federation
from tests.cli import command_line
from tests.cli.command_line import as_json, fedpriv
from tests.models.publishing.runs import RELEASE, finished

refused = partial(command_line.refused, "push")


@pytest.fixture
def run(tiny_bert, tmp_path):
    return finished(tmp_path / "run", tiny_bert)


def test_without_yes_it_lists_files_sizes_and_every_holders_epsilon(run):
    found = as_json("push", run, "clinic/letters")
    assert (found["uploaded"], found["address"]) == (False, None)
    files = {each["file"]: each["bytes"] for each in found["files"]}
    assert files.keys() == {"README.md", "adapter_config.json", "adapter_model.safetensors", "fedpriv.json"}
    tensors = run / "variants" / "global" / "adapter_model.safetensors"
    assert files[tensors.name] == tensors.stat().st_size
    assert [(each["client"], each["epsilon_local"]) for each in found["holders"]] == [(0, 1.2345), (1, 1.2345)]


def test_nothing_of_the_machine_the_data_or_the_ledger_is_in_the_files(run, tiny_bert):
    for name, key in (("adapter_config.json", "base_model_name_or_path"), ("fedpriv.json", "base_model")):
        path = run / "variants" / "global" / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: str(tiny_bert)}))
    contents = hub.contents(find(run))
    data_sets = [fields["data_set"] for fields in json.loads((run / "registrations.json").read_text()).values()]
    for name, content in contents.items():
        for secret in (str(tiny_bert.parent), str(run), "letters.csv", "hospital", "Anna", *data_sets):
            assert secret.encode() not in content.replace(b"\\", b""), name  # Markdown escapes each slash of a path


def test_a_holders_own_variant_needs_its_permission_which_can_be_withdrawn(run):
    arguments = (run, "clinic/letters", "--variant", "client-1")
    assert "has no permission of that holder" in refused(*arguments)
    ledger = run / "ledger.sqlite"
    fedpriv("ledger", "permit", ledger, "--client", "0", "--reason", "letter of Dr Huber")
    assert "has no permission of that holder" in refused(*arguments), "another holder's permission"
    as_json("ledger", "permit", ledger, "--client", "1", "--reason", "letter of Dr Maier")
    assert "letter of Dr Maier" in as_json("push", *arguments)["allowed"]
    assert as_json("ledger", "verify", ledger)["intact"]
    fedpriv("ledger", "permit", ledger, "--client", "1", "--reason", "call of Dr Maier", "--withdraw")
    assert "has no permission of that holder" in refused(*arguments)
    fedpriv("ledger", "permit", ledger, "--client", "7", "--reason", "x", code=2)
    fedpriv("ledger", "permit", ledger, "--client", "1", "--reason", " ", code=2)


def carry(ledger: Path, to: Path) -> None:
    """A ledger with its head in the place of another."""
    for end in ("", ".head"):
        shutil.copy(f"{ledger}{end}", f"{to}{end}")


def test_a_ledger_that_runs_share_decides_and_not_the_copy_in_the_folder(tiny_bert, tmp_path):
    shared = tmp_path / "shared.sqlite"
    run = finished(tmp_path / "run", tiny_bert, values={"ledger": str(shared)})
    arguments, permit = (run, "clinic/letters", "--variant", "client-1"), ("--client", "1", "--reason", "a letter")
    fedpriv("ledger", "permit", run / "ledger.sqlite", *permit)  # as before the end of the run, so both have it
    carry(run / "ledger.sqlite", shared)
    assert "a letter" in as_json("push", *arguments)["allowed"]
    fedpriv("ledger", "permit", shared, *permit, "--withdraw")
    assert f"{shared} has no permission of that holder" in refused(*arguments)
    moved = tmp_path / "moved.sqlite"
    carry(shared, moved)
    shared.unlink()
    message = refused(*arguments)
    assert "no such ledger" in message
    assert "say with --ledger PATH where it is now" in message
    assert "has no permission of that holder" in refused(*arguments, "--ledger", moved)
    shared.write_bytes(b"no ledger at all")
    assert "say with --ledger PATH" in refused(*arguments)
    shared.unlink()
    shared.mkdir()
    assert "say with --ledger PATH" in refused(run, "clinic/letters")


def test_a_permission_is_for_the_run_charged_last_and_its_end_for_the_one_that_has_it(tmp_path):
    path = tmp_path / "ledger.sqlite"

    def charge(data_set: str, run: str, round_: int = 1) -> None:
        key = Key(run=run, client="1", round=round_, request="x")
        ledger.charge([Charge(key=key, data_set=data_set, release=RELEASE, noise_source="secure")])

    with Ledger(path) as ledger:
        first, second = (ledger.register("1", 100, 1e-5).id for _ in range(2))
        for charged in ((first, "both"), (second, "second"), (first, "first"), (first, "both", 2)):
            charge(*charged)
    arguments = ("ledger", "permit", path, "--client", "1", "--reason", "a letter")
    found = as_json(*arguments)
    assert (found["data_set"], found["run"]) == (first, "both")
    with Ledger(path) as ledger:
        charge(second, "last")
    assert as_json(*arguments, "--withdraw")["run"] == "both"
    for run in ("first", "last"):
        as_json(*arguments, "--run", run)
    said = command_line.refused(*arguments, "--withdraw")
    assert "several runs (first, last); say which with --run" in said
    assert as_json(*arguments, "--withdraw", "--run", "first")["run"] == "first"
    assert as_json(*arguments, "--withdraw")["run"] == "last"


def test_what_a_few_holders_made_needs_the_permission_of_all(tiny_bert, tmp_path):
    run = finished(tmp_path / "run", tiny_bert, ("global", "integral-mean"))
    assert "--client 0 --reason" in refused(run, "a/b", "--variant", "integral-mean"), "the ledger knows numbers alone"
    for client in ("0", "1"):
        assert f"what St. Anna ({client}) uploaded" in refused(run, "a/b", "--variant", "integral-mean")
        fedpriv("ledger", "permit", run / "ledger.sqlite", "--client", client, "--reason", "a letter")
    assert as_json("push", run, "a/b", "--variant", "integral-mean")["allowed"].count("a letter") == 2
    registrations = json.loads((run / "registrations.json").read_text())
    (run / "registrations.json").write_text(json.dumps({"0": registrations["0"]}))
    fedpriv("ledger", "permit", run / "ledger.sqlite", "--client", "0", "--reason", "no", "--withdraw")
    assert "what St. Anna (0) uploaded" in refused(run, "a/b"), "the global model of one holder is its own"


def test_the_ledger_decides_and_not_the_summary(tiny_bert, tmp_path):
    seeded = finished(tmp_path / "seeded", tiny_bert, noise_source="seeded", summary={"noise_source": "secure"})
    assert "its noise was seeded" in refused(seeded, "a/b")
    other = finished(tmp_path / "other", tiny_bert)
    carry(other / "ledger.sqlite", seeded / "ledger.sqlite")
    assert "with which the run ended" in refused(seeded, "a/b", code=1)


def test_a_run_that_is_not_private_is_refused_unless_its_data_are_public(tiny_bert, tmp_path):
    for summary, reason in (
        ({"private": False, "epsilon_local_max": None}, "it had no noise"),
        ({"noise_source": "seeded"}, "its noise came from a seeded generator"),
    ):
        run = finished(tmp_path / reason, tiny_bert, summary=summary)
        assert f"the run is not private: {reason}" in refused(run, "a/b")
        assert "public_data = false" in refused(run, "a/b", "--public-data")
        public = finished(tmp_path / f"public {reason}", tiny_bert, summary=summary, values={"public_data": True})
        assert "--public-data allows it" in refused(public, "a/b")
        assert as_json("push", public, "a/b", "--public-data")["allowed"] == "the run's records are public"


def test_a_spent_budget_a_swapped_folder_and_a_stray_one_are_refused(tiny_bert, run, tmp_path):
    over = finished(tmp_path / "over", tiny_bert, values={"budget_epsilon": [1.0], "target_epsilon": ""})
    assert "more than its budget 1" in refused(over, "a/b")
    shutil.rmtree(run / "variants" / "global")
    shutil.copytree(run / "variants" / "client-0", run / "variants" / "global")
    assert "describes another variant" in refused(run, "a/b")
    alone = shutil.copytree(run / "variants" / "client-0", tmp_path / "alone")
    assert "only a variant in the folder of its finished run" in refused(alone, "a/b")
    for name in ("letters", "a/b/c", "../x/y", "a b/c"):
        assert "must be OWNER/NAME" in refused(over, name)


def test_a_model_of_a_round_with_a_single_upload_is_that_upload(tiny_bert, tmp_path):
    run = finished(tmp_path / "run", tiny_bert, ("global", "round-1", "round-2", "round-3"))
    rounds = "1,0,ok\n1,1,ok\n2,0,no reply\n2,1,ok\n3,0,failed\n3,1,silent\n"
    (run / "clients.csv").write_text(f"round,client,status\n{rounds}")
    as_json("push", run, "a/b", "--variant", "round-1")
    for name in ("round-2", "round-3", "global"):
        assert "shows what St. Anna (1) uploaded" in refused(run, "a/b", "--variant", name)
    fedpriv("ledger", "permit", run / "ledger.sqlite", "--client", "1", "--reason", "a letter")
    assert "a letter" in as_json("push", run, "a/b")["allowed"]


def test_a_variant_of_another_run_is_refused_as_a_link_and_as_a_copy(run, tiny_bert, tmp_path):
    other = finished(tmp_path / "other", tiny_bert)
    own = run / "variants" / "global"
    shutil.rmtree(own)
    own.symlink_to(other / "variants" / "global")
    assert "leads out of its run's folder" in refused(run, "a/b")
    own.unlink()
    shutil.copytree(other / "variants" / "global", own)
    description = json.loads((own / "variant.json").read_text())
    with Ledger(run / "ledger.sqlite") as ledger:
        ((key, release),) = ledger.releases_of(ledger.data_set().id, "run-1")
        upload = {"data_set": ledger.data_set().id, "run": "run-1", "round": 1, "event": to_json(release.event)}
    for changes, message in (
        ({"run": "run-2", "request": key.request}, "not made of this run's uploads alone"),
        ({"request": "another"}, "made of uploads that .* has not charged"),
        ({"request": key.request}, None),
    ):
        (own / "variant.json").write_text(json.dumps({**description, "uploads": [{**upload, **changes}]}))
        if message is None:
            as_json("push", run, "a/b")
        else:
            assert re.search(message, refused(run, "a/b"))


@pytest.mark.slow
def test_what_a_whole_run_wrote_may_go_out_as_its_ledger_says(small_run, tmp_path):
    out, private = tmp_path / "run", {"simulate": False, "noise_multiplier": 2.0, "variant_rounds": [1]}
    values = {**small_run, **private, "variant_clients": True, "evaluate_every": 100, "out": str(out)}
    federation.run(parse(values), LogObserver())
    for name in ("global", "round-1"):
        assert "paid for" in as_json("push", out, "clinic/letters", "--variant", name)["allowed"]
    assert "has no permission" in refused(out, "clinic/letters", "--variant", "client-1")
    fedpriv("ledger", "permit", out / "ledger.sqlite", "--client", "1", "--reason", "a letter")
    assert "a letter" in as_json("push", out, "clinic/letters", "--variant", "client-1")["allowed"]


class Hub:
    """What a repository holds after requests to a server that speaks the few calls of an upload."""

    def __init__(self) -> None:
        self.repositories: dict[str, bool] = {}
        self.files: dict[str, bytes] = {}
        self.says: int | None = 200
        self.is_private = True

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            self.repositories[name] = asked.get("private", asked.get("visibility") == "private")
            return 200, {"url": f"http://127.0.0.1/{name}", "id": name, "name": name}
        if "/preupload/" in path:
            how = {"uploadMode": "regular", "shouldIgnore": False}
            return 200, {"files": [{"path": each["path"], **how} for each in json.loads(body)["files"]]}
        if "/commit/" in path:
            if self.says == 403:
                return 403, {"error": "no rights"}
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            done = {"commitUrl": "http://127.0.0.1/clinic/letters/commit/1", "commitOid": "1", "success": True}
            return self.says or 0, done
        return 200, {"id": "clinic/letters", "private": self.is_private, "siblings": []}


@pytest.fixture
def hub_here(monkeypatch) -> Iterator[Hub]:
    """A hub to which the client of this process speaks."""
    hub_ = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            while "Transfer-Encoding" in self.headers and (size := int(self.rfile.readline(), 16)):
                body += self.rfile.read(size)
                self.rfile.readline()
            status, values = hub_.answer(self.path, body)
            if status:  # else the connection breaks
                content = json.dumps(values).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        do_GET = do_POST  # noqa: N815, the name that http.server looks for

        def log_message(self, *_arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_of_this_test")
    yield hub_
    server.shutdown()
    server.server_close()


def test_yes_uploads_what_was_shown_in_one_commit(hub_here, run):
    done = as_json("push", run, "clinic/letters", "--yes")
    assert (done["uploaded"], done["address"].rpartition("/commit/")[2]) == (True, "1")
    assert hub_here.repositories == {"clinic/letters": True}, "a new repository is private unless --public is given"
    assert hub_here.files == hub.contents(find(run))


def test_a_hub_that_fails_or_is_gone_is_told_in_one_line(hub_here, run, monkeypatch):
    hub_here.says = 403
    for address in (constants.ENDPOINT, "http://127.0.0.1:1"):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        said = refused(run, "clinic/letters", "--yes", code=1)
        assert said.startswith("error: push clinic/letters: nothing was uploaded (")
    assert not hub_here.files


@pytest.mark.parametrize("says", [504, None])
def test_a_hub_that_breaks_off_after_the_commit_may_have_stored_it_and_the_error_says_so(hub_here, says):
    hub_here.says = says
    with pytest.raises(ConnectionError, match=r"nobody knows whether it was uploaded \(.*\); look at .*/commits/main"):
        hub.upload("clinic/letters", {"README.md": b"x"}, public=False)
    assert hub_here.files == {"README.md": b"x"}
    hub_here.says = 403
    with pytest.raises(ConnectionError, match="nothing was uploaded"):
        hub.upload("clinic/letters", {"adapter_config.json": b"x"}, public=False)
    assert hub_here.files == {"README.md": b"x"}


def test_a_repository_that_is_there_and_public_takes_nothing_without_the_option(hub_here):
    hub_here.is_private = False
    with pytest.raises(InputError, match="anyone can read this repository; say so with --public"):
        hub.upload("clinic/letters", {"README.md": b"x"}, public=False)
    assert not hub_here.files
    assert hub.upload("clinic/letters", {"README.md": b"x"}, public=True).endswith("/commit/1")
