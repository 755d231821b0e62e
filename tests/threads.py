"""Numbers of threads, whatever the suite's: how a tensor is cut among them decides how some kernels round."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

NUMBERS = (1, 2, 3, 5, 7)


@contextmanager
def with_threads(num: int) -> Iterator[None]:
    """Within this context torch computes with so many threads, also on fewer cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)
