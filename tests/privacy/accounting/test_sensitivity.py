"""Clipping rules: their parts contain every tensor once, and the sensitivity follows from them."""

import math

import pytest

from fedpriv.config import parse
from fedpriv.privacy.accounting.sensitivity import (
    CLIPPING_RULES,
    clipping_parts,
    clipping_rule,
    num_parts,
    sensitivity_factor,
)

LORA = [f"base.layer.{layer}.{which}.lora_{m}.weight" for layer in (0, 1) for which in ("q", "v") for m in "AB"]
HEAD = ["base.classifier.weight", "base.classifier.bias"]


# Which parts of a per-sample gradient are clipped to C determines the sensitivity, here for 8 + 2 tensors.
@pytest.mark.parametrize(
    ("rule", "head", "factor"),
    [
        ("joint", False, 1.0),
        ("joint", True, 1.0),
        ("split", False, math.sqrt(2)),
        ("split", True, math.sqrt(3)),
        ("per-tensor", False, math.sqrt(8)),
        ("per-tensor", True, math.sqrt(10)),
        ("batch", False, 2 * math.sqrt(2)),
        ("batch", True, 2 * math.sqrt(3)),
    ],
)
def test_factor_follows_from_names_and_from_numbers_alike(rule, head, factor):
    names = LORA + (HEAD if head else [])
    parts = clipping_parts(rule, names)
    assert sorted(name for part in parts for name in part) == sorted(names)
    assert sensitivity_factor(rule, len(parts)) == pytest.approx(factor)
    assert num_parts(rule, num_tensors=len(names), head=head) == len(parts)
    a, b, head = clipping_parts("split", LORA + HEAD)
    assert all("lora_A" in name for name in a)
    assert all("lora_B" in name for name in b)
    assert list(head) == HEAD


def test_unknown_rules_and_empty_inputs_are_refused_by_name():
    for call in (lambda: clipping_parts("ghost", LORA), lambda: sensitivity_factor("ghost", 1)):
        with pytest.raises(ValueError, match="clipping = 'ghost'"):
            call()
    with pytest.raises(ValueError, match="num_parts = 0"):
        sensitivity_factor("joint", 0)
    with pytest.raises(ValueError, match="num_tensors = 0"):
        num_parts("per-tensor", num_tensors=0, head=False)
    for rule in CLIPPING_RULES:
        with pytest.raises(ValueError, match="at least one"):
            clipping_parts(rule, [])


def test_rules_are_also_known_by_the_names_that_other_libraries_use():
    assert [clipping_rule(rule) for rule in CLIPPING_RULES] == list(CLIPPING_RULES)
    assert (clipping_rule("flat"), clipping_rule("per-layer")) == ("joint", "per-tensor")
    assert parse({"clipping": "per-layer"}) == parse({"clipping": "per-tensor"})
    with pytest.raises(ValueError, match="clipping = 'ghost'"):
        clipping_rule("ghost")
