"""The two kinds of basis from which models are restored, each kept once for all of its models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from numpy.typing import NDArray

from fedpriv.variants import lossless
from fedpriv.variants.blocks import BlockLayout, Tensors, tensors_in
from fedpriv.variants.lossless import Reference
from fedpriv.variants.shared_basis import SharedBasis


class Basis(Protocol):
    """A thing from which models are restored, together with what is held of each."""

    def tensors(self, held: Mapping[str, NDArray[Any]]) -> Tensors:
        """A model's tensors.

        Args:
            held: of the model.

        Raises:
            ValueError: in one line, why it is none of this basis.
        """

    def to_bytes(self) -> bytes:
        """The basis's file: equal bases give equal bytes."""


def read_basis(content: bytes, layout: BlockLayout) -> Basis:
    """The basis in a file that its `to_bytes` wrote, of models of this layout.

    Raises:
        ValueError: in one line, why it is none.
    """
    tensors = tensors_in(content)
    kind = Reference if all(name.startswith(lossless.PREFIX) for name in tensors) else SharedBasis
    return kind.from_tensors(tensors, layout)
