"""Private steps of own modules: exact gradients, the event that pays, and refusal of whatever couples records."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedpriv.errors import InputError
from fedpriv.learning.data.tensors import num_records
from fedpriv.learning.training import OwnModel, PoissonSampler, per_sample_gradients, private_step
from fedpriv.learning.training.per_sample import Stack
from fedpriv.privacy.mechanisms import SeededSource
from tests.learning.training.test_per_sample import looped
from tests.marks import slow

WIDTH, CLASSES = 6, 3


def rows(num: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, WIDTH, generator=generator), torch.randint(CLASSES, (num,), generator=generator)


def cross_entropy(module: nn.Module):
    return lambda batch: F.cross_entropy(module(batch[0]), batch[1], reduction="none")


def seeded(build) -> nn.Module:
    torch.manual_seed(0)
    return build()


def network(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 8), *between, nn.Tanh(), nn.Linear(8, CLASSES))


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def bias_alone(module: nn.Module) -> nn.Module:
    module.weight.requires_grad_(False)
    return module


def sampler(num: int, probability: float, seed: int = 0) -> PoissonSampler:
    return PoissonSampler.with_probability(probability, num_registered=num, source=SeededSource(seed, "inclusion"))


class Tokens(nn.Module):
    """Embeddings with padding, their mean, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(11, 5, padding_idx=0), nn.Linear(5, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(tokens).mean(dim=1).tanh())


def sentences(num: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(11, (num, 4), generator=generator)
    return tokens, torch.randint(CLASSES, (num,), generator=generator)


def images(num: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, 2, 7, 6, generator=generator), torch.randint(CLASSES, (num,), generator=generator)


def filtered(*layers: nn.Module, ndim: int = 2) -> nn.Sequential:
    """Layers over images, or over their rows or as one slice, and a head."""
    form = {1: (14, 6), 2: (2, 7, 6), 3: (2, 1, 7, 6)}[ndim]
    return nn.Sequential(nn.Flatten(), nn.Unflatten(1, form), *layers, nn.Tanh(), nn.Flatten(), nn.LazyLinear(CLASSES))


CONVOLUTIONS = {
    "plain": lambda: nn.Conv2d(2, 4, 3),
    "strides, padding and dilation": lambda: nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(2, 1), dilation=(1, 2)),
    "groups without bias": lambda: nn.Conv2d(2, 6, 3, groups=2, bias=False),
    "depthwise, padded to the same size": lambda: nn.Conv2d(2, 2, 3, groups=2, padding="same"),
    "reflected": lambda: nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"),
    "around": lambda: nn.Conv2d(2, 4, 3, padding=2, padding_mode="circular"),
}

RARE = ("plain", "depthwise, padded to the same size", "around", "no bias", "frozen convolution")

CASES = {
    "linear": (network, rows),
    **{name: (lambda layer=layer: filtered(layer()), images) for name, layer in CONVOLUTIONS.items()},
    "over rows": (lambda: filtered(nn.Conv1d(14, 5, 3, stride=2, padding=1, groups=1), ndim=1), images),
    "in space": (lambda: filtered(nn.Conv3d(2, 3, (1, 3, 2), dilation=(1, 2, 1)), ndim=3), images),
    "group norm": (lambda: filtered(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 2, 2)), images),
    "layer norm": (lambda: filtered(nn.Linear(6, 5), nn.LayerNorm((7, 5)), nn.LayerNorm(5, bias=False)), images),
    "a bias alone": (lambda: filtered(bias_alone(nn.Conv2d(2, 4, 3)), bias_alone(nn.GroupNorm(2, 4))), images),
    "no bias": (lambda: nn.Sequential(nn.Linear(WIDTH, CLASSES, bias=False)), rows),
    "embedding": (Tokens, sentences),
    "frozen batch norm": (lambda: network(frozen(nn.BatchNorm1d(8)).eval()), rows),
    "frozen convolution": (
        lambda: nn.Sequential(nn.Unflatten(1, (1, WIDTH)), frozen(nn.Conv1d(1, 2, 3)), nn.Flatten(), nn.Linear(8, 3)),
        rows,
    ),
}


@pytest.mark.parametrize("case", [*(case for case in CASES if case not in RARE), *slow(*RARE)])
def test_gradients_of_a_step_are_those_of_a_loop_over_records(case):
    build, make = CASES[case]
    module, records = seeded(build), make(23, seed=1)
    losses = cross_entropy(module)
    losses(make(6))  # once, for layers that learn their size
    model = OwnModel(module, losses, make(6), rows=8)
    found = torch.cat(list(model.gradient_rows(records, range(23))))
    single = [tuple(tensor[k : k + 1] for tensor in records) for k in range(23)]
    expected = model.layout.flatten(looped(module, losses, single))
    assert expected.abs().amax(dim=1).gt(0).all(), "the oracle sees no gradient"
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    together, _ = per_sample_gradients(model.layers, lambda: losses(records))
    torch.testing.assert_close(model.layout.flatten(together), expected, atol=1e-6, rtol=1e-5)
    clients = {name: torch.stack([p.detach(), 2 * p.detach(), -p.detach()]) for name, p in model.parameters.items()}
    owners = torch.arange(23) % 3
    stacked, _ = per_sample_gradients(model.layers, lambda: losses(records), Stack(parameters=clients, owners=owners))
    for client in range(3):
        for name, parameter in model.parameters.items():
            parameter.data.copy_(clients[name][client])
        alone = model.layout.flatten(looped(module, losses, single))[owners == client]
        torch.testing.assert_close(model.layout.flatten(stacked)[owners == client], alone, atol=2e-6, rtol=2e-5)


def of(build):
    module = seeded(build)
    return module, cross_entropy(module)


class Centred(nn.Module):
    """Couples records between its layers by a share so small that rounding would hide it."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share, self.inner, self.head = share, nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)

    def forward(self, x):
        hidden = self.inner(x)
        return self.head((hidden - self.share * hidden.mean(dim=0)).tanh())


class Through(nn.Module):
    """Applies a function."""

    def __init__(self, function) -> None:
        super().__init__()
        self.forward = function


class OverBatch(nn.Module):
    """Attention whose tokens are the records."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = frozen(nn.MultiheadAttention(WIDTH, 2)), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(self.attention(x, x, x)[0])


class Counting(nn.Module):
    """Keeps a running mean that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        self.seen += x.detach().mean(dim=0)
        return x


class SharedGradient(torch.autograd.Function):
    """Couples records on the way back alone."""

    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, g):
        return g + g.mean(dim=0)


def mask(shape, **drawn) -> torch.Tensor:
    return torch.rand(shape, **drawn) > 0.5


class Tied(Tokens):
    """Uses the embedding's weight again at the output."""

    def forward(self, tokens):
        return super().forward(tokens) * self.words.weight.sum()


def same_masks(x: torch.Tensor) -> torch.Tensor:
    """In every pass, one for each place."""
    return x * mask(x.shape, generator=torch.Generator().manual_seed(0))


COUPLED, INEXACT = "couples records", "is not trained exactly"
# {(why, how): (a layer between two linear ones, message)}
BETWEEN = {
    (COUPLED, "batch norm"): (
        lambda: frozen(nn.BatchNorm1d(8)),
        r"1 \(BatchNorm1d\): couples .* call \.eval\(\) on it",
    ),
    (COUPLED, "dropout"): (lambda: nn.Dropout(0.5), r"1 \(Dropout\): draws random numbers .* call \.eval"),
    (COUPLED, "one mask"): (lambda: Through(lambda x: x * mask(x.shape[1])), r"1 \(Through\): draws random numbers"),
    (COUPLED, "masks by place"): (lambda: Through(same_masks), r"1 \(Through\): couples records: .* their order"),
    # Which most records do not move.
    (COUPLED, "largest"): (lambda: Through(lambda x: x / x.abs().max().clamp(min=100.0)), r"1 \(Through\): couples"),
    (COUPLED, "a buffer"): (Counting, r"1 \(Counting\): keeps seen"),
    (COUPLED, "gradients"): (lambda: Through(SharedGradient.apply), "the backward pass of Sequential: couples"),
    (INEXACT, "batch norm"): (lambda: nn.BatchNorm1d(8), "1.weight: .* BatchNorm1d, .* freeze it, or use GroupNorm"),
    (INEXACT, "others"): (lambda: nn.PReLU(8), "1.weight: .* PReLU, .* or train Linear, .* and LayerNorm layers"),
    (INEXACT, "in place"): (lambda: nn.ReLU(inplace=True), "1: overwrites what 0.weight gave, so use inplace=False"),
}
# {(why, how): (module, its records, message)}
WHOLE = {
    (COUPLED, "mean between layers"): (lambda: Centred(1.0), rows, "Centred: couples"),
    (COUPLED, "far below rounding"): (lambda: Centred(1e-6), rows, "Centred: couples"),
    (COUPLED, "attention"): (OverBatch, rows, r"attention \(MultiheadAttention\): couples .* batch_first=True"),
    (INEXACT, "a shared layer"): (lambda: network(*[nn.Linear(8, 8)] * 2), rows, "1: called twice in one forward pass"),
    (INEXACT, "a shared norm"): (lambda: network(*[nn.LayerNorm(8)] * 2), rows, "1: called twice in one forward pass"),
    (INEXACT, "tied"): (Tied, sentences, r"words\.weight: is used outside of its layer"),
    (INEXACT, "nothing"): (lambda: frozen(network()), rows, "trains no parameter"),
    (INEXACT, "max_norm"): (lambda: nn.Embedding(3, 4, max_norm=1.0), rows, "max_norm = 1.0"),
    (INEXACT, "frequency"): (lambda: nn.Embedding(3, 4, scale_grad_by_freq=True), rows, "scale_grad_by_freq = True"),
    (INEXACT, "shapes"): (lambda: nn.Linear(WIDTH + 1, 3), rows, r"a pass of the public records fails \(.*shapes"),
}


@pytest.mark.parametrize("case", [*BETWEEN, *WHOLE], ids=": ".join)
def test_a_module_that_couples_records_or_has_no_exact_gradients_is_refused_by_name(case):
    build, make, message = WHOLE.get(case) or (lambda: network(BETWEEN[case][0]()), rows, BETWEEN[case][1])
    with pytest.raises(InputError, match=message) as caught:
        OwnModel(*of(build), make(6))
    assert "\n" not in str(caught.value)


each_alone = partial(F.cross_entropy, reduction="none")
LOSSES = {
    "mean": (lambda x, y: F.cross_entropy(x, y), r"losses: returns shape \[\] for \d records"),
    "spread mean": (lambda x, y: F.cross_entropy(x, y).expand(len(x)), "losses: couples records"),
    "over their number": (lambda x, y: each_alone(x, y) / len(x), "losses: couples records"),
    "in-batch negatives": (lambda x, y: each_alone(x @ x.T, torch.arange(len(x))), "losses: couples records"),
    "no gradient": (lambda x, y: 0 * each_alone(x, y), "no trained parameter has a gradient"),
    "not finite": (lambda x, y: each_alone(x, y).log().neg().sqrt(), "not finite"),
}


@pytest.mark.parametrize("case", LOSSES)
def test_a_loss_that_couples_records_is_refused(case):
    module, (losses, message) = seeded(network), LOSSES[case]
    with pytest.raises(InputError, match=message):
        OwnModel(module, lambda batch: losses(module(batch[0]), batch[1]), rows(6))


@pytest.mark.parametrize("public", [rows(3), tuple(tensor[:1].repeat_interleave(6, 0) for tensor in rows(1))])
def test_public_records_that_would_see_nothing_are_refused(public):
    with pytest.raises(InputError, match=r"public: \d records; must be >= 4, and not all equal"):
        OwnModel(*of(network), public)


def test_trying_a_module_leaves_it_and_the_generator_as_they_were():
    module = seeded(lambda: network(frozen(nn.BatchNorm1d(8)).eval()))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    state = torch.get_rng_state()
    OwnModel(module, cross_entropy(module), rows(6))
    with pytest.raises(InputError):
        OwnModel(module.train(), cross_entropy(module), rows(6))
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in module.parameters())


def step(model, records, *, probability=0.5, seed=0, **given):
    given = {"clip_norm": 0.1, "noise_multiplier": 1.0, "noise": SeededSource(seed, "noise")} | given
    return private_step(model, records, sampler(num_records(records), probability, seed), **given)


@pytest.fixture
def model():
    return OwnModel(*of(network), rows(6), rows=8)


def test_what_else_is_drawn_changes_no_bit_of_a_records_gradient(model):
    records = rows(30, seed=1)
    (expected,) = model.gradient_rows(records, [7])
    for drawn in ([7, 3], [3, 7], [*range(30)], [*range(30)][::-1]):
        assert torch.equal(torch.cat(list(model.gradient_rows(records, drawn)))[drawn.index(7)], expected[0])
    broken = tuple(torch.where(torch.arange(30).eq(3).view(-1, *[1] * (t.dim() - 1)), -99, t) for t in records)
    found = torch.cat(list(model.gradient_rows(broken, [3, 7])))  # no class -99: the record fails, and has no row
    assert torch.equal(found, expected)


def test_a_step_is_the_sum_of_clipped_gradients_over_the_expected_batch_size(model):
    records = rows(40, seed=1)
    drawn = sampler(40, 0.5).draw(40)
    assert len(drawn) != 20, "the sample's size and the expected one must differ for this test"
    whole = torch.cat(list(model.gradient_rows(records, drawn))).double()
    clipped = whole * (0.1 / whole.norm(dim=1, keepdim=True)).clamp(max=1)
    found, event = step(model, records, noise_multiplier=0.0)
    torch.testing.assert_close(model.layout.flatten_one(found).double(), clipped.sum(dim=0) / 20, atol=1e-6, rtol=1e-4)
    assert (event.sampling_probability, event.noise_multiplier) == (0.5, 0.0)
    assert all(torch.equal(parameter.grad, found[name]) for name, parameter in model.parameters.items())


def test_a_charge_that_is_refused_ends_the_step_before_a_record_is_touched(model):
    def refuse(event):
        raise RuntimeError(f"spent: {event}")

    touched = []
    model._losses = lambda batch: touched.append(batch)
    with pytest.raises(RuntimeError, match="spent"):
        step(model, rows(40), charge=refuse)
    assert not touched
    assert all(parameter.grad is None for parameter in model.parameters.values())


def test_a_module_that_changed_since_it_was_tried_is_refused_before_the_charge():
    for change in (
        lambda module: module.train(),
        lambda module: module[0].weight.requires_grad_(False),
        lambda module: module.append(nn.Linear(CLASSES, CLASSES)),
    ):
        module = seeded(lambda: network(frozen(nn.BatchNorm1d(8)))).eval()
        model, charged = OwnModel(module, cross_entropy(module), rows(6)), []
        change(module)
        with pytest.raises(InputError, match="others than when it was tried"):
            step(model, rows(20), charge=charged.append)
        assert not charged


@pytest.mark.parametrize(
    "records",
    [rows(20)[0], rows(20)[::-1], (rows(20)[0][:, :4], rows(20)[1]), (rows(20)[0], rows(19)[1]), ()],
    ids=["no labels", "order", "width", "lengths", "nothing"],
)
def test_records_of_another_form_are_refused_before_the_charge(model, records):
    charged = []
    with pytest.raises(InputError, match="records: "):
        private_step(model, records, sampler(20, 0.5), clip_norm=1.0, noise_multiplier=1.0, charge=charged.append)
    assert not charged


def test_clipping_and_noise_are_those_of_opacus():
    """Its optimizer on the same batch: the same clipped sum without noise, the same scale with it."""
    opacus = pytest.importorskip("opacus")
    records, model, twin = rows(64, seed=1), OwnModel(*of(network), rows(6)), seeded(network)

    def theirs(noise_multiplier: float) -> torch.Tensor:
        wrapped = opacus.GradSampleModule(twin)
        sgd, batch = torch.optim.SGD(wrapped.parameters(), lr=0.0), {"expected_batch_size": 64, "max_grad_norm": 0.1}
        how = {"noise_multiplier": noise_multiplier, "generator": torch.Generator().manual_seed(0)}
        optimizer = opacus.optimizers.DPOptimizer(sgd, **batch, **how)
        F.cross_entropy(wrapped(records[0]), records[1], reduction="mean").backward()
        optimizer.step()
        found = torch.cat([parameter.grad.flatten() for parameter in wrapped.parameters()])
        wrapped.to_standard_module()
        return found

    def ours(noise_multiplier: float) -> torch.Tensor:
        return model.layout.flatten_one(step(model, records, probability=1.0, noise_multiplier=noise_multiplier)[0])

    torch.testing.assert_close(ours(0.0), theirs(0.0), atol=1e-6, rtol=1e-4)
    noises = [float((each(50.0) - each(0.0)).std()) for each in (ours, theirs)]
    assert noises[0] == pytest.approx(50 * 0.1 / 64, rel=0.3)  # 83 values: 4 standard errors
    assert noises[1] == pytest.approx(noises[0], rel=0.6)


def test_an_empty_sample_is_charged_and_adds_noise_of_its_scale_and_no_other(model):
    charged = []
    steps = [step(model, rows(8), probability=1e-9, seed=seed, charge=charged.append) for seed in range(40)]
    assert charged == [event for _, event in steps]
    assert {event.sampling_probability for event in charged} == {1e-9}
    values = torch.stack([model.layout.flatten_one(found) for found, _ in steps])
    assert (values != 0).all()
    assert (values[1:] != values[0]).all(), "a value was left without noise"
    scale = float(values.std()) * 8e-9
    assert 0.95 * 0.1 < scale < 1.05 * 0.1  # 3320 values: 4 standard errors; 2/3 and 3/2 are refused
