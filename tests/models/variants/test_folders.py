"""A variant's folder reads back as it was written, and what was damaged in it is named."""

import hashlib
import json

import numpy as np
import pytest

from fedpriv.errors import InputError
from fedpriv.models.variants import folders
from tests.foreign import planted
from tests.stores import described, flip

DESCRIBED = described("round-20", 2, architecture="mlp", utility=0.9)
TENSORS = {"weight": np.arange(1, 13, dtype="f4").reshape(3, 4), "bias": np.ones(3, "f4")}
LATER = {name: values + 1 for name, values in TENSORS.items()}


def test_a_description_reads_back_and_a_damaged_one_is_refused_by_name(tmp_path):
    folder = tmp_path / "round-20"
    folders.write(folder, DESCRIBED, TENSORS)
    assert folders.read(folder) == DESCRIBED
    tensors = folders.read_tensors(folder)
    assert all(np.array_equal(tensors[name], TENSORS[name]) for name in tensors)
    text = (folder / "variant.json").read_text()
    other_version, other_event = text.replace('"version": 1', '"version": 9'), text.replace("subsampled", "unknown")
    for harmed in ("", "[]", "{", "{}", other_version, other_event):
        assert harmed != text
        (folder / "variant.json").write_text(harmed)
        with pytest.raises(InputError, match=r"variant\.json: not a variant's description"):
            folders.read(folder)
    for harmed in ("[]", "{", '{"tensors_sha256": 3}', '{"tensors_sha256": ""}'):
        (folder / "variant.json").write_text(harmed)
        with pytest.raises(InputError):  # a digest that says nothing does not pass for none
            folders.read_tensors(folder)
    with pytest.raises(InputError, match="a variant is described there"):
        folders.read(tmp_path)
    (folder / "model.safetensors").write_bytes(b"x")
    with pytest.raises(InputError, match=r"model\.safetensors: cannot be read"):
        folders.read_tensors(folder)


def test_a_folder_of_links_is_written_and_what_they_lead_to_stays(tmp_path):
    foreign = planted(tmp_path / "round-20", tmp_path / "outside")
    for name in ("model.safetensors", "variant.json"):
        (tmp_path / "round-20" / name).symlink_to(tmp_path / "outside" / "patients.csv")
    folders.write(tmp_path / "round-20", DESCRIBED, TENSORS)
    foreign.check()
    assert folders.read(tmp_path / "round-20") == DESCRIBED


def test_a_flipped_bit_is_refused_and_older_folders_and_meant_changes_are_read(tmp_path):
    folders.write(tmp_path, DESCRIBED, TENSORS)
    file, description = tmp_path / "model.safetensors", tmp_path / "variant.json"
    assert json.loads(description.read_text())["tensors_sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    flip(file, -4)  # a mantissa's last bit
    with pytest.raises(InputError, match=r"model\.safetensors: is damaged or was changed, its SHA-256"):
        folders.read_tensors(tmp_path)
    changed = json.loads(description.read_text())
    del changed["tensors_sha256"]
    description.write_text(json.dumps(changed))
    assert folders.read(tmp_path) == DESCRIBED
    assert folders.read_tensors(tmp_path).keys() == TENSORS.keys()
    folders.describe(tmp_path, DESCRIBED)
    assert folders.read_tensors(tmp_path).keys() == TENSORS.keys()
    folders.write(tmp_path, DESCRIBED, LATER)
    assert folders.read_tensors(tmp_path).keys() == LATER.keys()
