"""Nodes' keys."""

import pytest

from fedpriv.privacy.ledger import keys


@pytest.fixture
def node_keys(tmp_path):
    """A folder with the public keys of nodes 0 to 2; the private ones are key-0 to key-2 beside it."""
    folder = tmp_path / "nodes"
    folder.mkdir()
    for client in range(3):
        keys.make_key_pair(tmp_path / f"key-{client}")
        (folder / f"{client}.pub").write_text(keys.public_line(tmp_path / f"key-{client}") + "\n")
    return folder
