"""A data holder's policy file: what its node lets a coordinator ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from fedpriv import config as configuration
from fedpriv.errors import InputError

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Limits:
    """What a data holder lets a coordinator ask for; the node's policy file overrides it key by key.

    Attributes:
        min_effective_noise_multiplier: noise relative to the sensitivity under the clipping rule.
        max_effective_noise_multiplier: of the same. A release with more costs next to nothing, and could be asked for
            again and again for the sake of what it costs the node to compute it.
        max_releases: charges on a data set, whatever each costs; one of which nothing was released counts too.
        max_sampling_probability: of q. A full batch, q = 1, is no less private: what it costs is charged.
        max_local_steps: noisy steps in a round.
        max_rounds: rounds in a run.
        min_clip_norm: of C; far below it, clipping would work on rounding errors.
        max_clip_norm: of C; a larger one would hardly clip anything.
        max_learning_rate: of the local optimizer.
        max_broadcast_value: magnitude of any value that the server sends; also finite.
        max_length: tokens of a record.
    """

    min_effective_noise_multiplier: _Positive = 0.3
    max_effective_noise_multiplier: _Positive = 1000.0
    max_releases: _Count = 10_000
    max_sampling_probability: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_local_steps: _Count = 100
    max_rounds: _Count = 1000
    min_clip_norm: _Positive = 1e-4
    max_clip_norm: _Positive = 100.0
    max_learning_rate: _Positive = 1000.0
    max_broadcast_value: _Positive = 1e4
    max_length: _Count = 512

    @staticmethod
    def read(path: Path) -> Limits:
        """The limits in a policy file: TOML with any of these keys; the others keep their defaults.

        Raises:
            InputError: one line that names the file, and the key and value that are wrong.
        """
        values = configuration.read(path)
        try:
            return Limits(**values)
        except ValidationError as error:
            first = error.errors()[0]
            key = str(first["loc"][0])
            raise InputError(f"{path}: {key} = {values.get(key)!r}: {first['msg'].lower()}") from None
