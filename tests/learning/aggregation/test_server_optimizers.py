"""Server optimizers against torch's SGD and plain numpy, over several rounds."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedpriv.config import parse
from fedpriv.errors import InputError
from fedpriv.learning.aggregation._fedavg import GlobalModel
from fedpriv.learning.aggregation.rules import RULES, SERVER_OPTIMIZERS, ServerOptimizer, server_step
from server.strategy import server_optimizer

ROUNDS = 6


def named(name: str, learning_rate: float = 1.0, momentum: float = 0.9) -> ServerOptimizer:
    return ServerOptimizer(name=name, learning_rate=learning_rate, momentum=momentum)


def drawn(seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"A": scale * torch.randn(3, 5, generator=generator), "b": scale * torch.randn(4, generator=generator)}


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


@pytest.mark.parametrize(
    ("key", "value"), [("server_optimizer", "yogi"), ("lora_server_optimizer", "adam"), ("train", "auto")]
)
def test_fedsvd_takes_no_optimizer_whose_state_cannot_follow_the_basis(key, value):
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
