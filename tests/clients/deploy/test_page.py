"""docs/who_decides.md says who decides each key that a coordinator may send, and lists a node's limits."""

import re
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path

from fedpriv.config import RunConfig
from fedpriv.holder.vault.settings import NodeLimits
from fedpriv.learning.training.local_update import UpdateSpec
from server.deploy import folder as folders

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE = (DOCS / "who_decides.md").read_text()
COORDINATOR = "The coordinator decides"
DECIDERS = {"The operator decides", f"{COORDINATOR}, within bounds", f"{COORDINATOR} freely", "The node ignores"}


def table() -> dict[str, str]:
    """{key: the heading above it}."""
    found: dict[str, str] = {}
    heading = ""
    for line in PAGE.splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        elif line.startswith("| "):
            for key in re.findall(r"`([a-z_]+)`", line.split("|")[1]):
                assert key not in found, f"{key} stands in two rows"
                found[key] = heading
    return found


def test_every_key_has_one_who_decides_it():
    expected = {f.name for kind in (RunConfig, UpdateSpec) for f in fields(kind)}
    assert table().keys() == expected
    assert set(table().values()) == DECIDERS


def test_every_limit_has_its_default_on_the_page():
    stated = re.findall(r"`(m[a-z_]+)` \(([\d.,e-]+)\)", PAGE)
    limits = {f.name: float(f.default) for f in fields(NodeLimits)}
    assert len(stated) == len(limits)
    assert {name: float(value.replace(",", "")) for name, value in stated} == limits


def test_who_may_read_which_file_is_what_the_page_says(make_node, own, tmp_path):
    """Of both sides, as their kits make the folders; a file of which the page says nothing is missing there."""
    node = make_node(**own)
    secret = "a passphrase of some length"
    folders.make(tmp_path / "coordinator", addresses=["127.0.0.1"], port=9093, days=9, passphrase=secret)
    upkeep = (DOCS / "node_upkeep.md").read_text()
    for folder, heading in ((node.folder, "file of a node"), (tmp_path / "coordinator", "file of a coordinator")):
        table = upkeep.partition(f"| {heading} |")[2].partition("\n\n")[0].splitlines()
        told = {
            name: row.split("|")[2].strip()[:3]
            for row in table[2:]
            for name in re.findall(r"`([\w.*-]+)`", row.split("|")[1])
        }
        made = {path.name: f"{path.stat().st_mode & 0o777:o}" for path in folder.iterdir() if path.is_file()}
        stated = {name: next((told[each] for each in told if fnmatch(name, each)), None) for name in made}
        assert stated == made
