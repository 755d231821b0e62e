"""Keys and values of rows of different lengths that come and go: every row ends at the same place.

Rows are padded on the left, as `fedpriv.training.decoding` reads prompts. A step writes all rows' new states at one
place behind the last, so nothing is copied until a row joins or leaves, or the room is used up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

# Places behind the last token that a new cache has, so that rows grow without being copied.
_ROOM = 64


class KeyValues:
    """The states of some rows, to be read by one model.

    Args:
        lengths: tokens that each row holds, or will hold once the next pass has written them.
        num_layers: of the model.

    Attributes:
        lengths: tokens of each row.
        end: the place behind every row's last token.
    """

    def __init__(self, lengths: Sequence[int], num_layers: int) -> None:
        self.lengths = list(lengths)
        self.end = max(self.lengths, default=0)
        self._capacity = self.end + _ROOM
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * num_layers

    @classmethod
    def for_prompts(cls, lengths: Sequence[int], num_layers: int) -> KeyValues:
        """Room for prompts of these lengths, which one pass of `max(lengths)` tokens a row is about to write."""
        empty = cls(lengths, num_layers)
        empty.end = 0
        return empty

    @property
    def begin(self) -> int:
        """The place of the longest row's first token."""
        return max(0, self.end - max(self.lengths, default=0))

    def mask(self, num_new: int) -> Tensor:
        """int64 [rows, end - begin + num_new], 1 for each row's own tokens, in a pass of so many new places."""
        width = self.end - self.begin + num_new
        own = torch.tensor(self.lengths if not self.end else [length + num_new for length in self.lengths])
        return (torch.arange(width) >= width - own.unsqueeze(1)).long()

    def for_pass(self) -> Cache:
        """What the model writes the states of a pass into; `advance` makes them part of the rows."""
        layers: list[Any] = [_Layer(self, index) for index in range(len(self._layers))]
        return Cache(layers=layers)

    def advance(self, num_new: int) -> None:
        """A pass has written so many places of every row; without this it is as if it had not been."""
        if self.end:
            self.lengths = [length + num_new for length in self.lengths]
        self.end += num_new

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The states of a layer with those of a pass behind them.

        Args:
            layer: its index.
            keys, values: [rows, heads, new places, width].
        """
        num_new = keys.shape[2]
        held = self._layers[layer]
        if held is None or self.end + num_new > held[0].shape[2]:
            held = self._layers[layer] = (self._grown(held, 0, keys), self._grown(held, 1, values))
        places = slice(self.end, self.end + num_new)
        for buffer, new in zip(held, (keys, values), strict=True):
            buffer[:, :, places] = new
        begin = self.begin
        return held[0][:, :, begin : places.stop], held[1][:, :, begin : places.stop]

    def _grown(self, held: tuple[Tensor, Tensor] | None, which: int, new: Tensor) -> Tensor:
        rows, heads, num_new, width = new.shape
        buffer = new.new_zeros(rows, heads, max(self._capacity, self.end + num_new + _ROOM), width)
        if held is not None:
            buffer[:, :, : self.end] = held[which][:, :, : self.end]
        return buffer

    @classmethod
    def of_rows(cls, parts: Sequence[tuple[KeyValues, int]]) -> KeyValues:
        """The given rows of given states, copied, so that what they came from may be freed.

        Args:
            parts: (states of one model, a row of them); at least one.
        """
        num_layers = len(parts[0][0]._layers)
        made = cls([held.lengths[row] for held, row in parts], num_layers)
        for layer in range(num_layers):
            sources = [held._layers[layer] for held, _ in parts]
            if any(source is None for source in sources):
                continue  # a layer that keeps nothing
            buffers = []
            for which in (0, 1):
                like = sources[0][which]  # type: ignore[index]
                buffer = like.new_zeros(len(parts), like.shape[1], made._capacity, like.shape[3])
                for index, ((held, row), source) in enumerate(zip(parts, sources, strict=True)):
                    length = held.lengths[row]
                    own = source[which][row, :, held.end - length : held.end]  # type: ignore[index]
                    buffer[index, :, made.end - length : made.end] = own
                buffers.append(buffer)
            made._layers[layer] = (buffers[0], buffers[1])
        return made


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of `KeyValues`, as transformers' attention asks for it."""

    is_sliding = False

    def __init__(self, held: KeyValues, index: int) -> None:
        super().__init__()
        self._held, self._index = held, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: `KeyValues` makes room when states are written."""

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """See `KeyValues.write`."""
        return self._held.write(self._index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(places that attention sees, the first of them)."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Places before those of the pass."""
        return self._held.end - self._held.begin if self._held.end else 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1
