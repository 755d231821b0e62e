"""A node runs only the bundles whose bytes its operator approved."""

from __future__ import annotations

import hashlib

import pytest

from clients.deploy.approvals import approved
from clients.deploy.approved_supernode import is_approved

CONTENT = b"a bundle"
DIGEST = hashlib.sha256(CONTENT).hexdigest()


def test_only_the_very_bytes_are_approved(tmp_path):
    file = tmp_path / "approved-fabs"
    file.write_text(f"# read and approved by M. Curie\n{'0' * 64}\n{DIGEST}  # version 0.1.0\n")
    assert approved(file) == {DIGEST, "0" * 64}
    assert is_approved(CONTENT, file)
    assert not is_approved(CONTENT + b" ", file)


@pytest.mark.parametrize("text", ["", "# nothing\n", f"{DIGEST}\nyes\n", f"{DIGEST.upper()}\n"])
def test_an_empty_or_damaged_list_approves_nothing(tmp_path, text):
    file = tmp_path / "approved-fabs"
    file.write_text(text)
    assert not is_approved(CONTENT, file)
    assert not is_approved(CONTENT, tmp_path / "missing")
