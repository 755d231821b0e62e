"""The tree over a round's sum: its shape, its totals and its signature leave no place for another set of uploads."""

import base64
import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from fedpriv.privacy.ledger import inclusion, keys
from fedpriv.privacy.ledger.inclusion import InclusionProof, Leaf, Sum, check_owed, digest_of_sum, kept_in, proofs_in

REPLY = "{:064x}".format


@pytest.fixture(scope="module")
def key(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("coordinator") / "coordinator.key"
    keys.make_key_pair(path)
    return path


def leaves_of(number: int) -> list[Leaf]:
    """Every third position has no upload."""
    return [
        Leaf(position=i, reason="no reply") if i % 3 == 2 else Leaf(position=i, reply=REPLY(i), weight=10.5 * i + 1)
        for i in range(number)
    ]


@pytest.fixture
def make(key) -> Callable[..., Sum]:
    return lambda leaves, **changes: signed(leaves, key, **changes)


def signed(leaves: list[Leaf], key: Path, **changes: object) -> Sum:
    """A record of these leaves whose coordinator signs whatever it says."""
    made = Sum.of(leaves, run="run", round=3, asked={"a"}, sum="", key=key)
    record = replace(made.record, **changes)
    return replace(made, record=replace(record, signature=keys.sign(key, record.statement)))


def split_root(leaves: list[Leaf]) -> tuple[str, int, float]:
    """The root by RFC 6962's own recursion: a left subtree of the largest power of two that leaves a right one."""
    if len(leaves) == 1:
        (leaf,) = leaves
        content = json.dumps(asdict(leaf), sort_keys=True).encode()
        return hashlib.sha256(b"\0" + content).hexdigest(), int(bool(leaf.reply)), leaf.weight
    size = 1
    while 2 * size < len(leaves):
        size *= 2
    left, right = split_root(leaves[:size]), split_root(leaves[size:])
    text = ", ".join(f'["{digest}", {included}, {weight}]' for digest, included, weight in (left, right))
    return hashlib.sha256(f"\1[{text}]".encode()).hexdigest(), left[1] + right[1], left[2] + right[2]


@pytest.mark.parametrize("number", range(1, 18))
def test_the_root_is_that_of_the_recursion_and_every_position_has_a_path_to_it(make, key, number):
    made = make(leaves_of(number))
    digest, included, weight = split_root(leaves_of(number))
    assert (made.record.root, made.record.included, made.record.weight) == (digest, included, weight)
    for position in range(number):
        (proof,) = proofs_in(made.proof(position).text())
        proof.check(keys.public_line(key))
        assert proof.leaf == made.leaves[position]
    assert len(make(leaves_of(100), run="f" * 32, sum=REPLY(7)).proof(number).text()) < 1000, "less than a kilobyte"


def packed(node: tuple[str, int, float]) -> bytes:
    """A sibling as a path has it."""
    return struct.pack(">32sId", bytes.fromhex(node[0]), *node[1:])


def refused(proof: InclusionProof, key: Path) -> bool:
    """Whether the check names it, also after it has travelled as text."""
    try:
        for each in proofs_in(proof.text()):
            each.check(keys.public_line(key))
    except ValueError as error:
        return "\n" not in str(error)
    return False


def test_no_leaf_position_path_or_total_can_be_another(make, key):
    made = make(leaves_of(7))
    proof, path = made.proof(4), base64.b64decode(made.proof(4).path)
    assert not refused(proof, key)
    leaves = [replace(proof.leaf, **change) for change in ({"weight": 2.0}, {"reply": REPLY(9)}, {"position": 5})]
    paths = [path[:-44], path + path[-44:], path[44:] + path[:44], b"", path[:-1]]
    paths += [path[:i] + bytes([path[i] ^ 1]) + path[i + 1 :] for i in range(len(path))]
    changed = [replace(proof, leaf=leaf) for leaf in leaves]
    changed += [replace(proof, path=base64.b64encode(each).decode()) for each in paths]
    changed += [replace(proof, path=f"{proof.path[:-4]}!!!!")]
    assert all(refused(each, key) for each in changed)
    # Under its own signature the coordinator cannot state another total or shape either.
    for lie in ({"weight": made.record.weight + 1}, {"included": 9}, {"positions": 5}, {"positions": 3}, {"root": ""}):
        assert refused(make(leaves_of(7), **lie).proof(4), key), lie


@pytest.mark.parametrize("number", range(1, 13))
def test_a_further_leaf_in_a_tree_that_states_fewer_is_named_by_a_holder(make, key, number):
    """A copy of an upload beyond the last position: who stands at the tree's edge has no path to its root."""
    for more in range(1, number + 2):
        made = make(leaves_of(number + more), positions=number)
        assert any(refused(made.proof(position), key) for position in range(number))


def test_only_the_coordinators_key_signs(make, key, tmp_path):
    proof = make(leaves_of(3)).proof(0)
    keys.make_key_pair(tmp_path / "other.key")
    others = signed(leaves_of(3), tmp_path / "other.key").proof(0)
    unsigned = replace(proof, record=replace(proof.record, signature=""))
    moved = replace(proof, record=replace(proof.record, round=4))
    assert [refused(each, key) for each in (proof, others, unsigned, moved)] == [False, True, True, True]


def test_an_inner_node_passes_for_no_leaf_and_no_level_repeats_its_last_node(make, key):
    """The second preimage of trees that hash both alike, and the double of trees that pair an odd node with itself."""
    leaves = leaves_of(3)
    assert make(leaves).record.root != make([*leaves, leaves[-1]]).record.root
    two = inclusion._above(leaves[0].node, leaves[1].node)
    content = json.dumps([leaf.node for leaf in leaves[:2]]).encode()
    assert two.digest not in (hashlib.sha256(start + content).hexdigest() for start in (b"", b"\0"))
    # A coordinator states a tree of two, over an inner node and the third leaf: the root is that of all three.
    short = make(leaves, positions=2).proof(0)
    above = base64.b64encode(packed(leaves[2].node)).decode()
    assert refused(short, key)
    assert refused(replace(short, path=above), key)


@pytest.mark.parametrize("weight", [-100.0, float("nan"), float("inf")])
def test_no_sibling_of_a_negative_or_no_weight_makes_room_for_a_double(make, key, weight):
    """The coordinator doubles position 0, and takes the rest out of the total beside it."""
    own = Leaf(position=0, reply=REPLY(1), weight=20.0)
    other = inclusion._Node(REPLY(0), 1, weight)
    top = inclusion._above(own.node, other)
    path = base64.b64encode(packed(other)).decode()
    total = top.weight if 0 <= top.weight < float("inf") else 0.0
    record = make(leaves_of(2), root=top.digest, weight=total, included=top.included).record
    assert refused(InclusionProof(record=record, leaf=own, path=path), key)


@pytest.mark.parametrize(
    "text", ["x", "[]", "{}", "null", "[" * 10**5, "x" * 10**5, '{"record": {}, "leaf": {}, "path": 7}', "\ud800"]
)
def test_malformed_texts_are_named_in_one_line(text):
    with pytest.raises(ValueError, match=r"\A[^\n]*a line[^\n]*\Z"):
        proofs_in(text)


def owed(proof: InclusionProof, **changes: object) -> str:
    """The objection of a node at position 1 of 3 whose upload of round 3 has weight 11.5; empty if there is none."""
    own = {"position": 1, "positions": 3, "weight": 11.5} | changes
    try:
        check_owed([proof], {3: {REPLY(1)}}, **own)
    except ValueError as error:
        return str(error)
    return ""


def test_a_node_names_each_way_in_which_its_upload_is_not_in_the_sum(make):
    def leaf(**changes: object) -> InclusionProof:
        return make([leaves_of(3)[0], Leaf(**{"position": 1, **changes}), leaves_of(3)[2]]).proof(1)

    assert owed(leaf(reply=REPLY(1), weight=11.5)) == ""
    assert owed(leaf(reason="no reply within 600 s")) == ""
    for proof, said in (
        (leaf(), "left out, and no reason is given"),
        (leaf(reason=" "), "left out, and no reason is given"),
        (leaf(reason="no reply", weight=1.0), "left out, and no reason is given"),
        (leaf(reply=REPLY(1), weight=23.0), "has weight 23, agreed is 11.5"),
        (leaf(reply=REPLY(1)), "has weight 0, agreed is 11.5"),
        (leaf(reply=REPLY(2), weight=11.5), "another upload stands in place of this node's"),
        (make(leaves_of(3)).proof(0), "position 1 of 3 is this node's, and the record shows another"),
        (make(leaves_of(4)).proof(1), "position 1 of 3 is this node's, and the record shows another"),
        (make(leaves_of(3), round=2).proof(1), "no record says whether this node's upload is in the sum"),
    ):
        assert said in owed(proof), (said, owed(proof))


@pytest.mark.parametrize("run", ["run", 'a "quoted" one', "Zürich\n", ""])
def test_of_one_run_a_file_gives_its_records_alone(make, run, tmp_path):
    own, other = make(leaves_of(2), run=run), make(leaves_of(2), run="another run")
    texts = [each.proof(1).text() for each in (other, own, other)]
    file = tmp_path / "inclusions.jsonl"
    file.write_text("\n".join([*texts, texts[1][:-5]]))
    assert [*kept_in(file, InclusionProof, run)] == [own.proof(1)]
    assert [each.record.run for each in kept_in(file, InclusionProof)] == ["another run", run, "another run"]


def test_the_digest_of_a_sum_is_that_of_exact_arithmetic():
    rng = np.random.default_rng(1)
    shapes = {"B": (2, 3), "A": (4,)}
    floats = [({name: rng.normal(size=s).astype("f4") for name, s in shapes.items()}, w) for w in (3.0, 7.5)]
    expected = hashlib.sha256()
    for name in ("A", "B"):  # element by element, in Python's own floats
        (one, first), (other, second) = ((arrays[name].ravel().tolist(), weight) for arrays, weight in floats)
        values = [x * first + y * second for x, y in zip(one, other, strict=True)]
        expected.update(name.encode() + b"\0" + struct.pack(f"<{len(values)}d", *values))
    assert digest_of_sum(floats) == expected.hexdigest()
    words = [({"sum": np.array([2**32 - 1, 5], "u4")}, 9.0), ({"sum": np.array([3, 6], "u4")}, 2.0)]
    assert digest_of_sum(words) == hashlib.sha256(b"sum\0" + struct.pack("<2I", 2, 11)).hexdigest()
    assert digest_of_sum([floats[0], words[0]]) == digest_of_sum([]) == ""
