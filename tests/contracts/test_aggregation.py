"""The contract of every aggregation rule: fixed points, independence of client order, exact averages of products."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.learning.adapters._arithmetic import (
    A_SUFFIX,
    B_SUFFIX,
    INNER_SUFFIX,
    as_one_adapter,
    difference,
    factors_of,
)
from fedpriv.learning.aggregation._cmfl import pack_signs, relevance, threshold, unpack_signs
from fedpriv.learning.aggregation._fedavg import GlobalModel, ternary_codes
from fedpriv.learning.aggregation._products import fresh_start
from fedpriv.learning.aggregation.rules import RULES, SERVER_OPTIMIZERS, ServerOptimizer, server_step

LAYERS = {"m.query": (7, 5), "m.value": (6, 9)}  # name: (out, in)
EXACT = ("fedex-lora", "flora")
WEIGHTS = [0.5, 0.3, 0.2]


def lora(seed: int, rank: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    adapter = {}
    for name, (out_features, in_features) in LAYERS.items():
        adapter[name + A_SUFFIX] = torch.randn(rank, in_features, generator=generator)
        adapter[name + B_SUFFIX] = torch.randn(out_features, rank, generator=generator)
    adapter["head.weight"] = torch.randn(3, 4, generator=generator)
    return adapter


def ternary(seed: int, start: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    moved = lora(seed)
    result = {}
    for name, tensor in start.items():
        codes, scale = ternary_codes(moved[name].reshape(1, -1))
        result[name] = tensor + (codes * scale).view(tensor.shape)
    return result


def uploads_of(rule: str, num: int) -> list[dict[str, torch.Tensor]]:
    start = lora(0)
    return [ternary(seed + 1, start) if RULES[rule].ternary else lora(seed + 1) for seed in range(num)]


def start_of(rule: str) -> GlobalModel:
    """The model at the start of a run: B is zero, so its function is that of the base model."""
    adapter = {name: torch.zeros_like(t) if name.endswith(B_SUFFIX) else t for name, t in lora(0).items()}
    return GlobalModel(initial=lora(0) if RULES[rule].ternary else adapter, adapter=adapter)


def function(model: GlobalModel) -> dict[str, torch.Tensor]:
    """What the global model adds to each frozen weight, and the rest of its tensors."""
    combined = as_one_adapter(model.adapter, model.merged)
    return products(combined) | {"head.weight": combined["head.weight"].double()}


def assert_same(one: GlobalModel, other: GlobalModel) -> None:
    for name, value in function(one).items():
        torch.testing.assert_close(function(other)[name], value, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("weights", [[1.0], [0.4, 0.3, 0.2, 0.1]], ids=len)
@pytest.mark.parametrize("rule", RULES)
def test_the_upload_of_one_client_or_of_several_alike_becomes_the_global_model(rule, weights):
    (upload,) = uploads_of(rule, 1)
    expected = GlobalModel(initial={}, adapter=upload)
    assert_same(RULES[rule].aggregate(start_of(rule), [upload] * len(weights), weights), expected)


@pytest.mark.parametrize("rule", [name for name in RULES if not RULES[name].restarts])
def test_unchanged_uploads_leave_the_global_model_unchanged(rule):
    model = dataclasses.replace(start_of(rule), adapter=uploads_of(rule, 1)[0])
    again = RULES[rule].aggregate(model, [model.adapter] * 3, [0.5, 0.25, 0.25])
    assert_same(again, model)


@pytest.mark.parametrize("rule", [name for name in RULES if RULES[name].restarts])
def test_fresh_adapters_that_stay_unchanged_leave_the_global_model_unchanged(rule):
    model = RULES[rule].aggregate(start_of(rule), uploads_of(rule, 3), [0.5, 0.25, 0.25])
    fresh = fresh_start(model, rank=2, seed=0, round_=2)
    assert_same(RULES[rule].aggregate(model, [fresh] * 3, [0.5, 0.25, 0.25]), model)


@pytest.mark.parametrize("rule", RULES)
def test_the_order_of_clients_does_not_matter(rule):
    uploads = uploads_of(rule, 3)
    first, *others = [
        RULES[rule].aggregate(start_of(rule), [uploads[k] for k in order], [WEIGHTS[k] for k in order])
        for order in itertools.permutations(range(3))
    ]
    for model in others:
        assert_same(model, first)


@pytest.mark.parametrize("weights", [[0.5, 0.4], [1.0, 1.0], [0.5, 0.5, 0.0]])
@pytest.mark.parametrize("rule", RULES)
def test_weights_that_do_not_sum_to_one_for_each_upload_are_refused(rule, weights):
    with pytest.raises(ValueError, match="weights"):
        RULES[rule].aggregate(start_of(rule), uploads_of(rule, 2), weights)


def products(adapter: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: left.double() @ right.double() for name, (left, right) in factors_of(adapter).items()}


def assert_average_of_products(found: dict, uploads: list[dict[str, torch.Tensor]], base: dict | None = None) -> None:
    """Whether each layer's product is the weighted average of the uploads' products, on top of the base."""
    for name in LAYERS:
        average = sum(w * products(upload)[name] for w, upload in zip(WEIGHTS, uploads, strict=True))
        torch.testing.assert_close(found[name], average + (base or {}).get(name, 0.0), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("rule", EXACT)
def test_exact_rules_give_the_average_of_the_products(rule, rounds):
    model = start_of(rule)
    for round_ in range(rounds):
        base = {name: product.matrix().double() for name, product in model.merged.items()}
        uploads = [lora(100 * round_ + k) for k in range(3)]
        model = RULES[rule].aggregate(model, uploads, WEIGHTS)
        assert_average_of_products(function(model), uploads, base)


def test_stacking_accepts_clients_of_different_rank():
    uploads = [lora(k, rank=k + 1) for k in range(3)]
    assert_average_of_products(function(RULES["flora"].aggregate(start_of("flora"), uploads, WEIGHTS)), uploads)


def test_averaging_factors_does_not_give_the_average_of_products():
    uploads, weights = uploads_of("dp-lora", 2), [0.5, 0.5]
    exact, plain = (RULES[name].aggregate(start_of(name), uploads, weights) for name in ("flora", "dp-lora"))
    assert any((function(exact)[name] - function(plain)[name]).abs().max() > 0.1 for name in LAYERS)


def with_inner(upload: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The adapter of factors B R and A, of R alone."""
    factors = {}
    for name, (b, a) in factors_of(lora(0)).items():
        factors |= {name + B_SUFFIX: b.double() @ upload[name + INNER_SUFFIX].double(), name + A_SUFFIX: a}
    return factors


@pytest.mark.parametrize(
    ("rule", "trained"), [("ffa-lora", B_SUFFIX), ("rolora", B_SUFFIX), ("rolora", A_SUFFIX), ("fed-sb", INNER_SUFFIX)]
)
def test_averaging_what_is_trained_alone_is_exact(rule, trained):
    """All clients share the rest: they were sent it, and upload it as it was, or not at all."""
    sent, generator = lora(0), torch.Generator().manual_seed(1)
    if trained == INNER_SUFFIX:
        uploads = [{name + trained: torch.randn(2, 2, generator=generator) for name in LAYERS} for _ in range(3)]
    else:
        uploads = [{name: t for name, t in lora(k + 1).items() if name.endswith(trained)} for k in range(3)]
    if rule == "rolora":
        uploads = [sent | upload for upload in uploads]
    average = RULES[rule].aggregate(GlobalModel(initial={}, adapter=uploads[0]), uploads, WEIGHTS).adapter
    found, *expected = [with_inner(u) if rule == "fed-sb" else sent | u for u in (average, *uploads)]
    assert_average_of_products(products(found), expected)


# Rules that rewrite the model after the server's step

FINISHING = [name for name, rule in RULES.items() if rule.finish]
SHAPES = [(7, 5, 2), (3, 9, 4), (6, 4, 4), (5, 8, 1)]  # (out, in, rank); one rank is above the number of outputs


def finished(rule: str, shape: tuple[int, int, int], rank_of_b: int) -> tuple[GlobalModel, GlobalModel]:
    """A model with momentum whose B has this rank, and what the rule makes of it."""
    out_features, in_features, rank = shape
    generator = torch.Generator().manual_seed(rank_of_b)

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator)

    adapter = {
        "m" + A_SUFFIX: drawn(rank, in_features),
        "m" + B_SUFFIX: drawn(out_features, rank_of_b) @ drawn(rank_of_b, rank),
        "head.weight": drawn(3, 4),
    }
    moments = {"first": {"m" + B_SUFFIX: drawn(out_features, rank), "head.weight": drawn(3, 4)}}
    model = GlobalModel(initial=adapter, adapter=adapter, optimizer_state=moments)
    finish = RULES[rule].finish
    assert finish is not None
    return model, finish(model)


@pytest.mark.parametrize("rank_of_b", [0, 1, 4])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", FINISHING)
def test_what_is_made_of_a_finished_model_has_the_same_function_and_the_same_momentum(rule, shape, rank_of_b):
    model, after = finished(rule, shape, rank_of_b)
    assert list(after.adapter) == list(model.adapter)
    assert {t.dtype for t in after.adapter.values()} == {torch.float32}
    assert_same(model, after)
    one, other = (
        m.optimizer_state["first"]["m" + B_SUFFIX].double() @ m.adapter["m" + A_SUFFIX].double() for m in (model, after)
    )
    torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-5)
    assert torch.equal(after.optimizer_state["first"]["head.weight"], model.optimizer_state["first"]["head.weight"])


@pytest.mark.parametrize("rank_of_b", [1, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_fedsvd_gives_singular_vectors_by_falling_singular_value(shape, rank_of_b):
    model, after = finished("fedsvd", shape, rank_of_b)
    b, a = after.adapter["m" + B_SUFFIX].double(), after.adapter["m" + A_SUFFIX].double()
    torch.testing.assert_close(a @ a.T, torch.eye(len(a), dtype=torch.float64), atol=1e-6, rtol=0)
    product = model.adapter["m" + B_SUFFIX].double() @ model.adapter["m" + A_SUFFIX].double()
    expected = torch.zeros(len(a), dtype=torch.float64)
    values = torch.linalg.svdvals(product)[: len(a)]
    expected[: len(values)] = values
    torch.testing.assert_close(b.T @ b, expected.square().diag(), atol=1e-4, rtol=1e-5)


def test_fedsvd_keeps_a_while_b_is_zero():
    model, after = finished("fedsvd", (7, 5, 2), 0)
    assert all(torch.equal(after.adapter[name], tensor) for name, tensor in model.adapter.items())


@pytest.mark.parametrize("rule", [name for name in RULES if not RULES[name].restarts])
def test_rules_that_average_tensors_refuse_mixed_ranks(rule):
    with pytest.raises(ValueError, match="shapes"):
        RULES[rule].aggregate(start_of(rule), [lora(0, rank=2), lora(1, rank=3)], [0.5, 0.5])


def test_a_fresh_start_adds_nothing_keeps_the_head_and_differs_between_rounds():
    model = RULES["flora"].aggregate(start_of("flora"), uploads_of("flora", 2), [0.5, 0.5])
    places = itertools.product((1, 4), (1, 2))
    starts = {(rank, round_): fresh_start(model, rank=rank, seed=3, round_=round_) for rank, round_ in places}
    for (rank, _), start in starts.items():
        assert all(not left.any() and right.shape[0] == rank for left, right in factors_of(start).values())
        assert torch.equal(start["head.weight"], model.adapter["head.weight"])
    name = "m.query" + A_SUFFIX
    assert torch.equal(starts[4, 1][name], fresh_start(model, rank=4, seed=3, round_=1)[name])
    assert not torch.equal(starts[4, 1][name], starts[4, 2][name])
    assert starts[4, 1][name].abs().max() <= 5**-0.5


# Server optimizers, on top of every linear rule

LINEAR = [name for name, rule in RULES.items() if rule.linear]
OPTIMIZED = [(rule, optimizer) for rule in LINEAR for optimizer in SERVER_OPTIMIZERS]


def optimized(
    rule: str, optimizer: str, rounds: list[tuple[list[dict[str, torch.Tensor]], list[float]]]
) -> GlobalModel:
    """The model after rounds with these uploads and weights."""
    model = start_of(rule)
    for uploads, weights in rounds:
        aggregated = RULES[rule].aggregate(model, uploads, weights)
        model = server_step(model, aggregated, ServerOptimizer(name=optimizer, learning_rate=0.5, momentum=0.9))
    return model


@pytest.mark.parametrize(("rule", "optimizer"), OPTIMIZED)
def test_a_server_optimizer_leaves_a_model_that_no_upload_changed(rule, optimizer):
    start = start_of(rule)
    model = optimized(rule, optimizer, [([start.adapter] * 2, [0.5, 0.5])] * 3)
    assert all(torch.equal(model.adapter[name], tensor) for name, tensor in start.adapter.items())


@pytest.mark.parametrize(("rule", "optimizer"), OPTIMIZED)
def test_a_server_optimizer_sees_nothing_but_the_weighted_average(rule, optimizer):
    weights = [0.5, 0.25, 0.25]  # exact in binary, so that both averages are the same to the bit
    several = [([lora(10 * round_ + k) for k in range(3)], weights) for round_ in range(3)]
    single = [([RULES[rule].aggregate(start_of(rule), uploads, weights).adapter], [1.0]) for uploads, _ in several]
    one, other = (optimized(rule, optimizer, rounds) for rounds in (several, single))
    assert all(torch.equal(one.adapter[name], tensor) for name, tensor in other.adapter.items())


# T-FedAvg


@given(st.integers(0, 2**31), st.integers(1, 40))
@settings(deadline=None)
def test_ternary_codes_of_ternary_values_are_the_values_themselves(seed, num):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-1, 2, (1, num), generator=generator).double()
    recovered, scale = ternary_codes(0.37 * codes)
    torch.testing.assert_close(recovered * scale, 0.37 * codes)


def test_t_fedavg_leaves_three_values_in_each_tensor():
    model = RULES["t-fedavg"].aggregate(start_of("t-fedavg"), uploads_of("t-fedavg", 3), [0.5, 0.3, 0.2])
    for name, moved in difference(model.adapter, model.initial).items():
        sizes = moved.abs().unique()
        assert len(sizes[sizes > 1e-6].double().round(decimals=5).unique()) == 1, name


# CMFL


def test_relevance_is_the_fraction_of_agreeing_signs():
    update = {"a": torch.tensor([1.0, -2.0, 0.0, 3.0])}
    signs = {"a": torch.tensor([1.0, 1.0, 0.0, 1.0])}
    assert relevance(update, signs) == 0.75


def test_threshold_falls_with_the_square_root_of_the_round():
    assert [threshold(0.8, t) for t in (1, 4, 16)] == pytest.approx([0.8, 0.4, 0.2])


@given(st.integers(0, 2**31))
@settings(deadline=None)
def test_signs_survive_packing_exactly(seed):
    generator = torch.Generator().manual_seed(seed)
    update = {"b": torch.randn(3, 4, generator=generator), "a": torch.randint(-1, 2, (7,), generator=generator).float()}
    packed = pack_signs(update)
    assert packed.numel() == 4  # 19 signs, five to a byte
    unpacked = unpack_signs(packed, update)
    assert all(torch.equal(unpacked[name], update[name].sign()) for name in update)


def test_the_change_of_the_round_is_the_reference_for_the_next_relevance():
    start = start_of("cmfl")
    model = RULES["cmfl"].aggregate(start, uploads_of("cmfl", 2), [0.5, 0.5])
    for name, tensor in start.adapter.items():
        assert torch.allclose(model.last_update[name], model.adapter[name] - tensor)
