"""Stand-ins for what a node draws: every record's inclusion by itself, and one noise for both nodes.

With them, two nodes answer alike to the byte unless something other than the noised sums depends on the records. The
sums themselves are kept before noise would be added, and two nodes' are compared with what was charged.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedpriv.learning.data.records import Item
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.private_sums import PoissonSampler
from fedpriv.privacy.accounting.events import Event
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.privacy.mechanisms.registry import MECHANISMS, NoiseRequest
from fedpriv.privacy.mechanisms.sources import RandomSource, SecureSource, SeededSource, Words


class Killed(BaseException):
    """The node's process is killed; no handler of errors sees it."""


@dataclass(frozen=True, eq=False)
class Sum:
    """A sum that noise was about to be added to.

    Attributes:
        values: float64 [values].
        bound: what adding or removing the watched record may move it by, in L2, by the event that was charged; 0 if the
            record was not drawn.
    """

    values: Tensor
    bound: float


@dataclass
class StandIns:
    """What one node draws and gives to the noise.

    Attributes:
        watched: place of the record, or of the first person, in which two nodes differ, after all others.
        everyone: every record is included in every step, instead of by its own coin.
        killed_at: the process ends when it is about to add noise for this time, from 1; 0 for never.
        fails_on: the tokens of records on which the model fails.
        sums: what noise was added to so far.
        num_uses: how many updates have drawn from records so far.
    """

    watched: int
    everyone: bool = True
    killed_at: int = 0
    fails_on: tuple[int, ...] = ()
    sums: list[Sum] = field(default_factory=list)
    num_uses: int = 0
    _sampler: PoissonSampler | None = None
    _num_samples: int = 0
    _num_noises: int = 0
    _num_words: int = 0
    _was_drawn: bool = False

    def draw(self, sampler: PoissonSampler, num_records: int) -> list[int]:
        """The included records. A record's coin depends on its place and the step alone, not on other records."""
        self._num_samples += 1
        # An update has a sampler of its own; another one, even of the same request, is another use.
        self.num_uses += bool(num_records) and sampler is not self._sampler
        self._sampler = sampler
        coins = SeededSource("inclusion", self._num_samples).bernoulli(num_records, sampler.sampling_probability)
        included = range(num_records) if self.everyone else coins.nonzero().squeeze(1).tolist()
        self._was_drawn |= any(place >= self.watched for place in included)
        return list(included)

    def add_noise(self, mechanism: object, sums: Tensor, request: NoiseRequest) -> tuple[Tensor, list[Event]]:
        """A fixed noise *instead of* the sums, so that both nodes' later steps start equal; and the events."""
        self._num_noises += 1
        if self._num_noises == self.killed_at:
            raise Killed
        bound = request.sensitivity_factor * request.clip_norm if self._was_drawn else 0.0
        self._was_drawn = False
        self.sums += [Sum(row.double().cpu(), bound) for row in sums]
        noise = SeededSource("noise", self._num_noises).normal(sums.numel()).view(sums.shape)
        scale = request.noise_multiplier * request.clip_norm
        return (noise * scale).to(sums.dtype), mechanism.planned_events(request)

    def words(self, num: int) -> Words:
        """Whatever else is random, such as a codec's rounding of noised values."""
        self._num_words += 1
        return SeededSource("words", self._num_words).words(num)


@contextmanager
def standing_in(stand_ins: StandIns) -> Iterator[StandIns]:
    """Within this context nodes draw inclusion and noise from the stand-ins."""

    def draw(self: PoissonSampler, num_records: int) -> list[int]:
        return stand_ins.draw(self, num_records)

    def add_noise(
        self: object, sums: Tensor, request: NoiseRequest, sources: Sequence[RandomSource]
    ) -> tuple[Tensor, list[Event]]:
        if not all(isinstance(source, SecureSource) for source in sources):  # a rehearsal on synthetic records
            return noises[type(self)](self, sums, request, sources)
        return stand_ins.add_noise(self, sums, request)

    def words(_: object, num: int) -> Words:
        return stand_ins.words(num)

    def logits(self: TrainingModel, items: Sequence[Item], **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
        may_fail(items)
        return compute_logits(self, items, **options)

    def head_inputs(self: TrainingModel, items: Sequence[Item], *options: Any) -> Tensor:
        may_fail(items)
        return compute_head_inputs(self, items, *options)

    def may_fail(items: Sequence[Item]) -> None:
        if stand_ins.fails_on in (tuple(records.features["input_ids"][index].tolist()) for records, index in items):
            raise RuntimeError("the model fails on one of these records")

    compute_logits, compute_head_inputs = TrainingModel.logits, TrainingModel._head_inputs
    noises = {type(MECHANISMS[name]): type(MECHANISMS[name]).add_noise for name in MECHANISMS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PoissonSampler, "draw", draw)
        patch.setattr(SecureSource, "words", words)
        patch.setattr(Ledger, "coin_key", lambda *_: b"coins")
        patch.setattr(TrainingModel, "logits", logits)
        patch.setattr(TrainingModel, "_head_inputs", head_inputs)
        for mechanism in noises:
            patch.setattr(mechanism, "add_noise", add_noise)
        yield stand_ins


def largest_excess(one: Sequence[Sum], other: Sequence[Sum]) -> float:
    """The largest distance of two nodes' sums, in units of what one record may move them by; inf if not comparable."""
    if len(one) != len(other) or any(a.values.shape != b.values.shape for a, b in zip(one, other, strict=True)):
        return math.inf
    return max((_excess(a, b) for a, b in zip(one, other, strict=True)), default=0.0)


def _excess(one: Sum, other: Sum) -> float:
    difference, bound = one.values - other.values, max(one.bound, other.bound)
    largest = float(difference.abs().max())
    if largest == 0.0:
        return 0.0
    if not (math.isfinite(largest) and bound):
        return math.inf
    # Scaled first, so that no square under- or overflows.
    return largest / bound * float(torch.linalg.vector_norm(difference / largest))


KERNELS = {"linear": "linear", "attention": "scaled_dot_product_attention", "gelu": "gelu"}


class Coupling:
    """A stand-in for a kernel.

    Args:
        kernel: the real one.

    Attributes:
        active: whether it rounds by the number of records.
    """

    def __init__(self, kernel: Callable[..., Tensor]) -> None:
        self._kernel, self.active = kernel, False

    def __call__(self, x: Tensor, *args: object, **options: object) -> Tensor:
        found = self._kernel(x, *args, **options)
        # 4 to 7 and 16 to 31 records differ from the others.
        if not self.active or found.dim() < 3 or found.dtype != torch.float32 or len(found) < 2:
            return found
        if len(found).bit_length() % 2 == 0:
            return found
        flip = torch.zeros(found.shape[1:], dtype=torch.int32)
        flip[..., 0] = 1
        return found + ((found.detach().view(torch.int32) ^ flip).view(torch.float32) - found.detach())


@contextmanager
def coupled_by(kernel: str) -> Iterator[Coupling]:
    """Within this context torch has the stand-in in the kernel's place."""
    stand_in = Coupling(getattr(F, KERNELS[kernel]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, KERNELS[kernel], stand_in)
        yield stand_in
