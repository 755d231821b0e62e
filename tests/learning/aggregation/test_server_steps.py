"""What a server makes of a round: the weighted average of Eq. 8, the start of a head, and the step of its optimizer.

A head starts with class means from noised sums, whatever the noise did to a count. Optimizers are compared with
torch and numpy.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedpriv.config import parse
from fedpriv.errors import InputError
from fedpriv.learning.adapters.pooling import BIAS_SCALE, STATE_SCALE
from fedpriv.learning.aggregation._fedavg import GlobalModel, weighted_average, weights_by_size
from fedpriv.learning.aggregation._head_start import head_of, recentred, started
from fedpriv.learning.aggregation.rules import RULES, SERVER_OPTIMIZERS, ServerOptimizer, server_step
from server.strategy import server_optimizer


def drawn(seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"A": scale * torch.randn(3, 5, generator=generator), "b": scale * torch.randn(4, generator=generator)}


@given(st.dictionaries(st.integers(0, 99), st.integers(1, 10**9), min_size=1, max_size=20))
def test_weights_sum_to_one_and_follow_the_sizes(sizes):
    weights = weights_by_size(sizes)
    assert sum(weights.values()) == pytest.approx(1.0, abs=1e-12)
    total = sum(sizes.values())
    assert all(weights[client] == sizes[client] / total for client in sizes)


def test_it_is_the_plain_sum_in_double_precision_whatever_the_order_of_clients_and_names():
    parts, even = [drawn(seed) for seed in range(4)], [0.125, 0.25, 0.125, 0.5]  # exact in any order
    turned = [parts[0], *({name: part[name] for name in "bA"} for part in parts[1:])]
    for clients, weights in ((parts, [0.1, 0.2, 0.3, 0.4]), (parts[::-1], even[::-1]), (turned, even)):
        average = weighted_average(clients, weights)
        for name in "Ab":
            expected = sum(w * part[name].double() for w, part in zip(weights, clients, strict=True))
            assert torch.equal(average[name], expected.float())
            assert average[name].dtype == torch.float32
    one, other = weighted_average(parts, even), weighted_average(parts[::-1], even[::-1])
    assert all(torch.equal(one[name], other[name]) for name in "Ab")
    weighted_average(parts, [1.0, 0.0, 0.0, 0.0])["A"].zero_()
    assert all(torch.equal(part[name], drawn(seed)[name]) for seed, part in enumerate(parts) for name in "Ab"), "copied"


NO_B, TURNED = {"A": torch.zeros(3, 5)}, {"A": torch.zeros(5, 3), "b": torch.zeros(4)}


@pytest.mark.parametrize(
    ("weigh", "message"),
    [
        (lambda: weighted_average([], []), ">= 1"),
        (lambda: weighted_average([drawn(0)], [0.5, 0.5]), "equally many"),
        (lambda: weighted_average([drawn(0), drawn(1)], [0.5, 0.4]), "sum to"),
        (lambda: weighted_average([drawn(0), NO_B], [0.5, 0.5]), "names or shapes"),
        (lambda: weighted_average([drawn(0), TURNED], [0.5, 0.5]), "names or shapes"),
        *((lambda sizes=sizes: weights_by_size(sizes), "size") for sizes in ({}, {0: 0}, {0: 5, 1: -1})),
    ],
)
def test_uploads_that_do_not_fit_and_impossible_sizes_are_refused(weigh, message):
    with pytest.raises(ValueError, match=message):
        weigh()


# ---------------------------------------------------------------- the start of a head

WEIGHT, BIAS, B = "classifier.weight", "classifier.bias", "layer.lora_B.weight"


def model(classes=3, width=5, *, bias=True):
    adapter = {WEIGHT: torch.zeros(classes, width), B: torch.ones(2, 2)}
    adapter |= {BIAS: torch.zeros(classes)} if bias else {}
    return GlobalModel(initial=adapter, adapter=adapter)


def uploads(features, labels, classes, *, bias=True):
    """What the noiseless class sums of these records add to a head at zero."""
    one_hot = torch.nn.functional.one_hot(labels, classes).double()
    sums = {WEIGHT: (one_hot.T @ features.double() / len(labels)).float(), B: torch.ones(2, 2)}
    return sums | ({BIAS: (BIAS_SCALE**2 * one_hot.mean(dim=0)).float()} if bias else {})


def records(num=300, classes=3, width=5):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(num) % classes
    labels[: num // 4] = 0
    features = torch.randn(num, width, generator=generator) + 2 * torch.nn.functional.one_hot(labels, width)
    return torch.nn.functional.normalize(features, dim=1) * STATE_SCALE, labels


def test_without_noise_the_head_is_the_class_means_less_their_mean_and_its_rows_mean_is_that_of_all_features():
    features, labels = records()
    head = started(model(), uploads(features, labels, 3), noise=0.0).adapter
    means = torch.stack([features[labels == c].mean(dim=0) for c in range(3)])
    assert torch.allclose(head[WEIGHT], 20 * (means - means.mean(dim=0)) + features.mean(dim=0), atol=1e-4)
    assert torch.equal(head[BIAS], torch.zeros(3))
    assert torch.equal(head[B], torch.ones(2, 2))
    without = started(model(bias=False), uploads(features, labels, 3, bias=False), noise=0.0).adapter
    sums = uploads(features, labels, 3)[WEIGHT]
    even = 20 * 3 * (sums - sums.mean(dim=0))
    assert torch.allclose(without[WEIGHT], even, atol=1e-4), "without a bias, classes count as even"


@pytest.mark.parametrize("noise", [1e-4, 1e-2, 0.1])
def test_each_weight_starts_with_noise_of_a_quarter_at_most(noise):
    """Of even classes whose counts are known; a mean less the mean of all has less noise than a mean."""
    generator = torch.Generator().manual_seed(1)
    classes, width = 4, 4000
    aggregated = {
        WEIGHT: noise * torch.randn(classes, width, generator=generator),
        BIAS: torch.full((classes,), BIAS_SCALE**2 / classes),
        B: torch.ones(2, 2),
    }
    head = started(model(classes, width), aggregated, noise=noise).adapter[WEIGHT]
    largest = min(0.25, 20 * noise * classes)
    if noise < 0.03:  # beyond, the floor of the counts is above an even class's share
        assert head.std().item() == pytest.approx(largest * math.sqrt(1 - 1 / classes), rel=0.05)
    assert head.std().item() <= 1.05 * largest


def test_a_class_whose_count_noise_has_wiped_out_does_not_blow_up():
    for share in (-0.5, 0.0, 1e-9):
        aggregated = {WEIGHT: torch.full((3, 5), 0.1), BIAS: torch.full((3,), BIAS_SCALE**2 * 0.5), B: torch.ones(2, 2)}
        aggregated[BIAS][0] = share
        head = started(model(), aggregated, noise=0.01).adapter[WEIGHT]
        assert torch.isfinite(head).all()
        assert head.abs().max() < 20


def test_a_mean_that_noise_alone_makes_is_not_used_and_a_clear_one_is_kept():
    """20 classes of 400 values with noise 0.01 give a mean of length sqrt(8000) 0.01 = 0.9 by noise alone."""
    generator = torch.Generator().manual_seed(2)
    noise = 0.01 * torch.randn(20, 400, generator=generator)
    even = {BIAS: torch.full((20,), BIAS_SCALE**2 / 20), B: torch.ones(2, 2)}
    lengths = []
    for true in (0.0, 9.0):
        aggregated = {WEIGHT: noise + true / 20 / 400**0.5, **even}
        lengths.append(started(model(20, 400), aggregated, noise=0.01).adapter[WEIGHT].mean(dim=0).norm().item())
    assert lengths[0] < 0.2
    assert lengths[1] == pytest.approx(9.0, rel=0.05)


def test_a_round_s_noise_in_the_mean_of_the_rows_is_taken_out_and_no_prediction_changes():
    before, after = model(), model()
    before.adapter[WEIGHT] += torch.arange(5.0)
    after.adapter[WEIGHT] += torch.randn(3, 5, generator=torch.Generator().manual_seed(3))
    moved = recentred(after, before).adapter
    assert torch.allclose(moved[WEIGHT].mean(dim=0), torch.arange(5.0), atol=1e-6)
    features, _ = records()
    one, two = (torch.log_softmax(features @ head[WEIGHT].T, dim=1) for head in (after.adapter, moved))
    assert torch.allclose(one, two, atol=1e-5)


def test_the_head_s_earlier_weights_do_not_matter():
    features, labels = records()
    before = model()
    moved = {**before.adapter, WEIGHT: torch.randn(3, 5), BIAS: torch.randn(3)}
    sums = uploads(features, labels, 3)
    aggregated = {**sums, WEIGHT: moved[WEIGHT] + sums[WEIGHT], BIAS: moved[BIAS] + sums[BIAS]}
    other = started(GlobalModel(initial=before.initial, adapter=moved), aggregated, noise=0.0)
    for name, tensor in started(before, sums, noise=0.0).adapter.items():
        assert torch.allclose(tensor, other.adapter[name], atol=1e-4)


def test_a_head_of_several_layers_is_refused_by_name():
    with pytest.raises(ValueError, match=r"dense\.weight"):
        head_of({"dense.weight": torch.zeros(2, 2), "out.weight": torch.zeros(2, 2)})


# ---------------------------------------------------------------- optimizers

ROUNDS = 6


def named(name: str, learning_rate: float = 1.0, momentum: float = 0.9) -> ServerOptimizer:
    return ServerOptimizer(name=name, learning_rate=learning_rate, momentum=momentum)


def stepped(optimizer: str, *, learning_rate: float, momentum: float) -> list[tuple[GlobalModel, dict, GlobalModel]]:
    """(model before, its change D, model after) of each round; D is of the size of a noised update."""
    model, rounds = GlobalModel(initial=drawn(0), adapter=drawn(0)), []
    for round_ in range(ROUNDS):
        moved = {name: t + drawn(round_ + 1, 0.05)[name] for name, t in model.adapter.items()}
        change = {name: moved[name].double() - t.double() for name, t in model.adapter.items()}
        after = server_step(model, replace(model, adapter=moved), named(optimizer, learning_rate, momentum))
        rounds.append((model, change, after))
        model = after
    return rounds


def test_sgd_goes_a_part_of_the_way_and_with_rate_one_is_the_average_itself_to_the_bit():
    model = GlobalModel(initial={}, adapter={"a": torch.tensor([1.0, -3e8, 0.0])})
    average = replace(model, adapter={"a": torch.tensor([1e-20, 0.1, -0.0])})
    assert server_step(model, average, named("sgd")) is average
    for before, change, after in stepped("sgd", learning_rate=0.25, momentum=0.9):
        for name, t in before.adapter.items():
            expected = t.double() + 0.25 * change[name]
            torch.testing.assert_close(after.adapter[name].double(), expected, atol=1e-7, rtol=0)
        assert not after.optimizer_state


@pytest.mark.parametrize(("learning_rate", "momentum"), [(1.0, 0.9), (0.3, 0.5), (2.0, 0.0)])
def test_momentum_is_torchs_sgd_with_dampening(learning_rate, momentum):
    rounds = stepped("momentum", learning_rate=learning_rate, momentum=momentum)
    weights = {name: tensor.double().requires_grad_() for name, tensor in drawn(0).items()}
    torchs = torch.optim.SGD(weights.values(), lr=learning_rate, momentum=momentum, dampening=momentum)
    # torch does not dampen its first gradient, so that is zero here.
    for change in [{name: torch.zeros_like(t) for name, t in weights.items()}, *(change for _, change, _ in rounds)]:
        for name, weight in weights.items():
            weight.grad = -change[name]
        torchs.step()
    for name, weight in weights.items():
        torch.testing.assert_close(rounds[-1][2].adapter[name].double(), weight.detach(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("optimizer", ["adam", "yogi"])
@pytest.mark.parametrize(("learning_rate", "momentum"), [(0.1, 0.9), (1.0, 0.0)])
def test_adam_and_yogi_are_the_papers(optimizer, learning_rate, momentum):
    rounds = stepped(optimizer, learning_rate=learning_rate, momentum=momentum)
    for name, start in drawn(0).items():
        theta, m, v = start.double().numpy(), 0.0, np.full(start.shape, 1e-3**2)
        for _, change, _ in rounds:
            d = change[name].numpy()
            m = momentum * m + (1 - momentum) * d
            v = 0.99 * v + 0.01 * d**2 if optimizer == "adam" else v - 0.01 * d**2 * np.sign(v - d**2)
            theta = theta + learning_rate * m / (np.sqrt(v) + 1e-3)
        np.testing.assert_allclose(rounds[-1][2].adapter[name], theta, atol=1e-5)


def test_a_and_b_may_have_an_optimizer_of_their_own():
    """Each tensor takes the steps that it would take if its optimizer were the only one."""
    names = ("x.lora_A.weight", "x.lora_B.weight", "head.weight")
    of_lora, of_head = named("adam", 0.1), named("momentum", 2.0, 0.5)
    start = {name: torch.full((3,), 1.0) for name in names}
    both, adam, momentum = (GlobalModel(initial=start, adapter=start) for _ in range(3))
    for round_ in range(3):
        generator = torch.Generator().manual_seed(round_)
        change = {name: torch.randn(3, generator=generator) for name in names}

        def after(model, optimizer, change=change):
            moved = {name: model.adapter[name] + change[name] for name in names}
            return server_step(model, replace(model, adapter=moved), optimizer)

        both = after(both, replace(of_head, of_lora=of_lora))
        adam, momentum = after(adam, of_lora), after(momentum, of_head)
    for name in names:
        assert torch.allclose(both.adapter[name], (momentum if "head" in name else adam).adapter[name], atol=1e-5)


@pytest.mark.parametrize("optimizer", SERVER_OPTIMIZERS)
def test_a_step_is_float32_and_leaves_its_arguments_and_the_rest_of_the_model_alone(optimizer):
    model = GlobalModel(initial=drawn(0), adapter=drawn(0), last_update=drawn(9))
    after = server_step(model, replace(model, adapter=drawn(1)), named(optimizer, 0.5))
    again = server_step(after, replace(after, adapter=drawn(2)), named(optimizer, 0.5))
    assert all(torch.equal(model.adapter[name], drawn(0)[name]) for name in model.adapter)
    assert not model.optimizer_state
    assert list(again.adapter) == list(model.adapter)
    assert again.last_update is model.last_update
    tensors = [t for state in (again.adapter, *again.optimizer_state.values()) for t in state.values()]
    assert {t.dtype for t in tensors} == {torch.float32}


@pytest.mark.parametrize("optimizer", SERVER_OPTIMIZERS)
@pytest.mark.parametrize("learning_rate", [1.0, 0.5])
def test_a_tensor_that_a_round_did_not_train_rests_with_its_moments(optimizer, learning_rate):
    """Taking turns, each tensor moves as if its own rounds were the only ones."""
    both = alone = GlobalModel(initial={}, adapter=drawn(0))
    alone = replace(alone, adapter={"A": drawn(0)["A"]})
    for round_ in range(6):
        name = "bA"[round_ % 2]
        moved = {**both.adapter, name: both.adapter[name] + drawn(round_ + 1, 0.05)[name]}
        step = named(optimizer, learning_rate)
        both = server_step(both, replace(both, adapter=moved), step, trained=[name])
        if name == "A":
            alone = server_step(alone, replace(alone, adapter={"A": moved["A"]}), step)
    assert list(both.adapter) == ["A", "b"]
    assert torch.equal(both.adapter["A"], alone.adapter["A"])
    assert not torch.equal(both.adapter["A"], drawn(0)["A"])
    for moment, tensors in alone.optimizer_state.items():
        assert torch.equal(both.optimizer_state[moment]["A"], tensors["A"])


def test_fedsvd_takes_no_optimizer_whose_state_cannot_follow_the_basis():
    for key, value in {"server_optimizer": "yogi", "lora_server_optimizer": "adam", "train": "auto"}.items():
        with pytest.raises(InputError, match=f"{key} = {value}: aggregation = fedsvd .*cannot follow; use "):
            parse({"aggregation": "fedsvd", key: value})
    assert parse({"aggregation": "fedsvd"}).server_optimizer == "momentum"


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if not rule.linear])
def test_a_rule_that_is_no_weighted_sum_takes_no_server_optimizer(rule):
    for change in ({"server_optimizer": "adam"}, {"server_learning_rate": 0.5}, {"server_rate_decay": "linear"}):
        with pytest.raises(InputError, match=f"aggregation = {rule} is no weighted sum .*; use sgd, 1, none and same"):
            parse({"aggregation": rule, **change})
    assert parse({"aggregation": rule, "server_momentum": 0.5}).server_optimizer == "sgd"


def test_a_linear_decay_multiplies_every_rate_by_what_is_left_of_the_rounds():
    config = parse({"rounds": 4, "server_rate_decay": "linear", "lora_server_optimizer": "adam"})
    found = [server_optimizer(config, round_) for round_ in (1, 2, 3, 4, 5)]
    assert [each.learning_rate for each in found] == [1.0, 0.75, 0.5, 0.25, 0.25]
    assert [each.of_lora.learning_rate for each in found] == pytest.approx([0.02, 0.015, 0.01, 0.005, 0.005])
    constant = server_optimizer(parse({"rounds": 4}), 3)
    assert constant.learning_rate == 1.0
