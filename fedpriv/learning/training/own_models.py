"""Private steps of a model of one's own: linear layers, convolutions, embeddings, layer and group norms, any loss.

The clipped gradient of a record bounds its influence only if no other record changes it. So in a private step each
record has a pass of its own. A model is tried when it is built, on records that are public: one that keeps a state from
one pass to the next, or whose losses have no meaning for a record by itself, is refused with the layer at fault.
"""

import hashlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fedpriv.errors import InputError, first_line
from fedpriv.learning.adapters import Adapter
from fedpriv.learning.data.tensors import Batch, form_of, num_records, rows_of
from fedpriv.learning.training._coordinates import VectorLayout
from fedpriv.learning.training.independence import LOSSES, Change, culprit, dependence, isolated
from fedpriv.learning.training.per_sample import FUNCTIONS, per_sample_gradients, trainable_layers
from fedpriv.learning.training.private_sums import PoissonSampler, noised_sum
from fedpriv.privacy.accounting.events import Event
from fedpriv.privacy.mechanisms.sources import RandomSource, SecureSource

# The share of a row's largest value that may be rounding.
_TOLERANCE = 1e-4

# Two records to watch and two to replace; more than so many see nothing new.
_FEWEST, _MOST = 4, 8

_EFFECTS = {
    "repeated": "draws random numbers or keeps a state, so the same records have other results in every pass",
    "permuted": "couples records: the result of one depends on their order",
    "joined": "couples records: the result of one changes when others join",
    "replaced": "couples records: the result of one changes when others are replaced",
    "dropped": "couples records: the result of one changes when others are left out",
}

_REMEDIES: dict[type[nn.Module], str] = {
    nn.modules.batchnorm._BatchNorm: "call .eval() on it, or use GroupNorm or LayerNorm",
    nn.modules.dropout._DropoutNd: "call .eval() on it",
    nn.MultiheadAttention: "let it see one record's tokens alone: batch_first=True, and [records, tokens, width]",
}


class OwnModel:
    """A module whose losses belong to a record each, ready for private steps.

    Guarantee: in a private step, a record's gradient depends on this record and the module alone, to the bit, since
    nothing else is in its pass. A trial finds out whether passes leave the module as it is; a state that changes only
    with what no public record holds goes unseen.

    Args:
        module: on its device, with what is not trained frozen; trained are Linear, Embedding, Conv1d to Conv3d,
            GroupNorm and LayerNorm layers, each called at most once in a pass.
        losses: takes a batch, lets the module compute it, and returns one loss for each record, [records].
        public: public or made-up records, at least four and not all equal, in the form of the private ones: tensors
            with one row per record, or a tuple, list or dictionary of them. They try the module.
        rows: of a pass in a simulation, at most; >= 1. Fewer take less memory: each has a gradient of all trained
            values.
        evaluate: takes a batch and returns how right the module is on each record, [records] in [0, 1]. Without it,
            where the losses are a cross-entropy over logits, that is 1 where the likeliest class is the right one, else
            0. `fedpriv.run` needs it where it tests the model.

    Attributes:
        layers: those that are trained, by name.
        parameters: {name in the module: trained parameter}.
        layout: of their values in a row.
        public: the public records, on the device.

    Raises:
        InputError: a trained layer is of another kind; or records touch each other, or a pass fails, draws random
            numbers or keeps a state. One line names the layer and what would help.
    """

    def __init__(
        self,
        module: nn.Module,
        losses: Callable[[Any], Tensor],
        public: Any,
        *,
        rows: int = 32,
        evaluate: Callable[[Any], Tensor] | None = None,
    ) -> None:
        if rows < 1:
            raise InputError(f"rows = {rows}: must be at least 1")
        self._module, self._losses, self.evaluate = module, losses, evaluate
        try:
            self.layers = trainable_layers(module, FUNCTIONS)
        except ValueError as error:
            raise InputError(f"module: {error}") from None
        trained = {name for layer in self.layers.values() for name in layer.parameters}
        self.parameters = {name: p for name, p in module.named_parameters() if name in trained}
        if not self.parameters:
            raise InputError("module: trains no parameter; a layer, such as a Linear one, must require gradients")
        shapes = {name: parameter.shape for name, parameter in self.parameters.items()}
        self.layout = VectorLayout.of(shapes, [list(shapes)])
        if num_records(public) < _FEWEST or not any(bool((leaf != leaf[:1]).any()) for leaf in tree_leaves(public)):
            raise InputError(f"public: {num_records(public)} records; must be >= {_FEWEST}, and not all equal")
        self.device = next(iter(self.parameters.values())).device
        self.public = tree_map(lambda tensor: tensor.to(self.device), public)
        self.rows = rows
        with _refusing_failures(), _left_as_it_is(module):
            self._try()
        self._tried = self._state()

    def gradient_rows(self, records: Any, positions: Sequence[int]) -> Iterator[Tensor]:
        """Gradients of the records at the positions, each by itself, [1, values]; a record that fails has none."""

        def compute(alone: list[int]) -> Tensor:
            return self._results(self.together([(records, alone)]))

        for position in positions:
            for _, rows in isolated(compute, [position]):
                if rows is not None:
                    yield rows[:, 1:]

    def check_fits(self, records: Any) -> None:
        """Refuse, by what differs, records of another form than the public ones, and a module changed since its trial.

        No content of a record decides this, so it may precede the charge.
        """
        num_records(records)
        of_records, of_public = map(form_of, (records, self.public))
        if of_records != of_public:
            raise InputError(f"records: are {of_records}; must be {of_public}, as the public ones")
        self.check_unchanged()

    def check_unchanged(self) -> None:
        """Refuse, with an InputError, a module that has changed since it was tried."""
        if self._state() != self._tried:
            raise InputError(
                "module: layers, modes or trained parameters are others than when it was tried; build a new OwnModel"
            )

    def _state(self) -> Hashable:
        """Everything that the trial's verdict depends on and a program may change."""
        modes = tuple((name, type(layer), layer.training) for name, layer in self._module.named_modules())
        trained = tuple((name, id(p), p.requires_grad) for name, p in self._module.named_parameters())
        return modes, trained

    def digest(self) -> str:
        """SHA-256, in hex, of the module: its layers, and the names, formats and values of parameters and buffers."""
        digest = hashlib.sha256(repr(self._module).encode())
        for name, tensor in (*self._module.named_parameters(), *self._module.named_buffers()):
            digest.update(f"\0{name} {tensor.dtype} {list(tensor.shape)} {tensor.requires_grad}\0".encode())
            digest.update(tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    @property
    def num_frozen_values(self) -> int:
        """The number of values of the module that are not trained."""
        return sum(p.numel() for p in self._module.parameters() if not p.requires_grad)

    def together(self, pieces: Sequence[tuple[Batch, Sequence[int]]]) -> Batch:
        """The records at the positions of each piece as a batch, on the device."""
        rows = [rows_of(records, positions) for records, positions in pieces]
        return tree_map(lambda public, *leaves: torch.cat([leaf.to(public) for leaf in leaves]), self.public, *rows)

    def _results(self, batch: Batch) -> Tensor:
        """[records, 1 + values] Loss and gradient of each record in one pass of the batch."""
        compute = partial(self.losses_of, batch)
        with torch.enable_grad():
            gradients, losses = per_sample_gradients(self.layers, compute)
        rows = self.layout.flatten(gradients)
        return torch.cat([losses.unsqueeze(1).to(rows.dtype), rows], dim=1)

    def losses_of(self, batch: Batch) -> Tensor:
        """[records] The losses of a batch; InputError if they have another shape."""
        losses, num = self._losses(batch), num_records(batch)
        if losses.shape != (num,):
            raise InputError(
                f"losses: returns shape {list(losses.shape)} for {num} records; must be [{num}], one for each, as "
                "reduction='none' gives"
            )
        return losses

    def _try(self) -> None:
        """Refuse the module if its records touch each other."""
        num = min(_MOST, num_records(self.public))
        finite = rows_of(self.public, range(num))
        # Records that no arithmetic hides.
        pool = tree_map(lambda t: torch.cat([t, t * torch.nan if t.is_floating_point() else t]), finite)
        records, turned, broken = list(range(num)), [*range(1, num), 0], list(range(num, 2 * num))

        def together(items: Sequence[int]) -> Tensor:
            return self._results(rows_of(pool, items))

        results = together(records)
        if not results.isfinite().all() or not results[:, 1:].any():
            raise InputError("losses: are not finite on the public records, or no trained parameter has a gradient")
        for others in (turned, broken):
            self._refuse(pool, records, others, dependence(together, records, others, _close))
        self._refuse_missed_gradients(finite, results[:, 1:].sum(dim=0))

    def _refuse(self, pool: Batch, records: Sequence[int], others: Sequence[int], change: Change[int] | None) -> None:
        if change is None:
            return
        layer = culprit(
            self._module,
            lambda items: self.losses_of(rows_of(pool, items)),
            records,
            others,
            change,
            close=_close,
        )
        raise InputError(f"{self._named(layer)}: {_EFFECTS[change.name]}; {self._remedy(layer)}")

    def _named(self, layer: str | None) -> str:
        if layer is None:
            return f"the backward pass of {type(self._module).__name__}"
        if layer == LOSSES:
            return LOSSES
        kind = type(self._module.get_submodule(layer)).__name__
        return f"{layer} ({kind})" if layer else kind

    def _remedy(self, layer: str | None) -> str:
        if layer == LOSSES:
            return "return one loss for each record, as reduction='none' gives, from this record alone"
        module = self._module.get_submodule(layer or "")
        fitting = (text for kind, text in _REMEDIES.items() if isinstance(module, kind))
        return next(fitting, "compute each record by itself")

    def _refuse_missed_gradients(self, batch: Batch, found: Tensor) -> None:
        """Refuse a trained parameter that the module also uses outside of the layer's own pass, as tied weights are.

        The sum of the batch's gradients, [values], was found layer by layer. A layer behind it that works in place
        hides what it returned.
        """
        with torch.enable_grad():
            total = self.losses_of(batch).sum()
            expected = torch.autograd.grad(total, list(self.parameters.values()), allow_unused=True)
        for (name, own), whole in zip(self.layout.unflatten_one(found).items(), expected, strict=True):
            if not _close(own.reshape(1, -1), (torch.zeros_like(own) if whole is None else whole).reshape(1, -1)):
                inplace = [n for n, layer in self._module.named_modules() if getattr(layer, "inplace", False)]
                if inplace:
                    raise InputError(f"{inplace[0]}: overwrites what {name} gave, so use inplace=False")
                raise InputError(
                    f"{name}: is used outside of its layer, as tied weights are, so gradients per record would miss a "
                    "part; freeze it or untie it"
                )


def private_step(
    model: OwnModel,
    records: Any,
    sampler: PoissonSampler,
    *,
    clip_norm: float,
    noise_multiplier: float,
    noise: RandomSource | None = None,
    charge: Callable[[Event], object] | None = None,
) -> tuple[Adapter, Event]:
    """The noised gradient {parameter name: tensor} of one step of DP-SGD, and the event that pays for it.

    It is (sum_i clip(g_i) + N(0, (z C)^2)) / B over a Poisson sample, with B the expected batch size; an empty sample
    gives noise alone, at the same cost. It is also the parameters' `grad`, for any optimizer's step.

    Guarantee: under add-or-remove adjacency of one record, the event bounds the privacy loss of what is returned. How
    long the step takes depends on the sample.

    Args:
        model: tried, see `OwnModel`.
        records: the private ones, in the form of the model's public ones.
        sampler: draws the batch; its q is that of the event.
        clip_norm: C, finite, > 0, gradient units.
        noise_multiplier: z >= 0; 0 adds nothing, and the event costs infinity.
        noise: source of the noise; a `SecureSource` by default.
        charge: records the event durably before a record is touched, as `Ledger.charge` can; what it raises ends the
            step. Without it the caller must account for the event before anything else learns the gradient.

    Raises:
        InputError: the records have another form than the public ones, or the module has changed since it was tried.
        ValueError: clip_norm or noise_multiplier is out of range.

    Source: Abadi et al. 2016, Algorithm 1.
    """
    model.check_fits(records)

    def drawn() -> Iterator[Tensor]:  # after the charge
        yield from model.gradient_rows(records, sampler.draw(num_records(records)))

    like = model.layout.flatten_one({name: parameter.detach() for name, parameter in model.parameters.items()})
    noised, event = noised_sum(
        drawn(),
        like,
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
        sampling_probability=sampler.sampling_probability,
        source=noise or SecureSource(),
        charge=charge,
    )
    gradient = model.layout.unflatten_one(noised / sampler.expected_batch_size)
    for name, parameter in model.parameters.items():
        parameter.grad = gradient[name].to(parameter.dtype)
    return gradient, event


def _close(one: Tensor, other: Tensor) -> bool:
    """Whether rows [records, values] are equal up to rounding."""
    bound = _TOLERANCE * other.abs().amax(dim=1, keepdim=True) + torch.finfo(torch.float32).tiny
    return bool(((one - other).abs() <= bound).all())


@contextmanager
def _refusing_failures() -> Iterator[None]:
    """Within this context a failure refuses the module: no private record has caused it."""
    try:
        yield
    except (InputError, MemoryError):
        raise
    except Exception as error:  # a stranger's module raises anything
        raise InputError(f"module: a pass of the public records fails ({first_line(error)})") from error


@contextmanager
def _left_as_it_is(module: nn.Module) -> Iterator[None]:
    """Within this context trained parameters are moved, so that no gradient vanishes; then all is as it was before.

    A module whose pass changes a buffer, in which records would be kept, is refused.
    """
    generator = torch.Generator().manual_seed(0)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    kept = {tensor: tensor.detach().clone() for tensor in (*trained, *module.buffers())}
    with torch.random.fork_rng():
        try:
            with torch.no_grad():
                for parameter in trained:
                    moves = 0.05 * torch.randn(parameter.shape, generator=generator)
                    parameter.add_(moves.to(parameter.device, parameter.dtype))
            yield
            for name, buffer in module.named_buffers():
                if not torch.equal(buffer, kept[buffer]):
                    layer, _, state = name.rpartition(".")
                    kind = type(module.get_submodule(layer)).__name__
                    raise InputError(
                        f"{layer or 'module'} ({kind}): keeps {state} of a pass's records; call .eval() on it"
                    )
        finally:
            with torch.no_grad():
                for tensor, before in kept.items():
                    tensor.copy_(before)
