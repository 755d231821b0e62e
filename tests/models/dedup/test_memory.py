"""The peak memory of a search, as a plan tells it, against what its arrays were seen to take."""

import tracemalloc

import numpy as np
import pytest

from fedpriv.models.dedup.pipeline import deduplicate
from fedpriv.models.dedup.planning import DedupSettings, plan, search_memory
from fedpriv.models.variants import folders
from fedpriv.models.variants.composition import History
from fedpriv.models.variants.store import Store
from tests import stores

WITHIN = 1.15


class Agreeable:
    """Every form is as good as the one before, and magnitude is the saliency."""

    num_records, utility, private = 900, "accuracy", None

    def utilities(self, tensors, records):
        return np.ones(len(records))

    def saliency(self, tensors, records):
        return {name: np.abs(values) for name, values in tensors.items()}


@pytest.mark.parametrize(
    ("megabytes", "block_size", "strategy", "expected"),
    [
        (4, 1024, "single", lambda own, bases: 2 * own + 48 * 1024**2),  # distances
        (4, 16384, "single", lambda own, bases: 3 * own),  # forms
        (4, 16384, "multi", lambda own, bases: own + 2 * bases),  # several bases
    ],
)
def test_a_search_holds_what_its_plan_says(tmp_path, megabytes, block_size, strategy, expected):
    rng, size = np.random.default_rng(0), megabytes * 2**18
    where = {}
    for name in ("round-1", "round-2", "round-3"):  # of a data set each, so that more bases cost less
        own = {"deltas": {name: 1e-5}, "history": History(name=name, ancestors=stores.uploads(1, name))}
        where[name] = stores.described(name, utility=1.0, epsilon_bound=9.0, utility_bound=0.5, **own)
        folders.write(tmp_path / name, where[name], {"w": rng.normal(size=size).astype(np.float32)})
    settings = DedupSettings(
        block_size=block_size, algorithm="greedy", strategy=strategy, fairness="outcome", max_distance=2.0
    )
    targets = plan(list(where.values()), settings).assignments.values()
    most_bases = max(len(a.bases) for a in targets)
    assert (most_bases > 1) == (strategy == "multi")
    told = [search_memory(4 * size, 4 * size * len(a.bases), block_size)["memory_bytes"] for a in targets]
    assert max(told) == expected(4 * size, 4 * size * most_bases)
    with Store(tmp_path / "store") as store:
        tracemalloc.start()
        deduplicate(
            list(where.values()),
            lambda name: folders.read_tensors(tmp_path / name),
            dict.fromkeys(where, Agreeable()),
            store,
            settings,
        )
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert max(told) / WITHIN <= peak <= max(told) * WITHIN
