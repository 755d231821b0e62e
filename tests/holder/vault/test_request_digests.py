"""A request that was answered before an upgrade still finds its stored reply: its digest in the ledger is the same."""

from pathlib import Path

import numpy as np
import pytest

from fedpriv.config import ON_NODES, parse, to_flower
from fedpriv.holder.vault.answer import answer
from fedpriv.holder.vault.holder import Holder, bench_of, run_of
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import EVALUATE, TRAIN, Request
from fedpriv.learning.training import workbench
from fedpriv.learning.training.private_evaluation import EvaluationSpec
from fedpriv.learning.training.rounds import RunSchedule
from fedpriv.privacy.ledger.reader import reading
from tests.tiny import LABELS
from tests.vaults import make_vault, write_records

pytestmark = pytest.mark.usefixtures("quick_nodes")

RUN = {
    **{"model": "tiny", "layers": "last-1", "rank": 4, "data": ON_NODES, "labels": list(LABELS), "num_clients": 3},
    **{"learning_rate": 0.5, "lora_learning_rate": 0.1, "lora_head_learning_rate": 0.2, "seed": 4},
    **{"noise_multiplier": 1.5, "start_noise_multiplier": 2.0, "lora_noise_multiplier": 3.0},
    "evaluation_noise_multiplier": 2.0,
}

# {round: the digest under which it is charged from 0.2.0 on}, of an adapter of zeros.
BEFORE = {
    1: "389b9bc83383f86f2d1bafa2699c9131e9d7612a8b373334538a4e44b4e7b1ba",
    2: "8d66f1a8f3124f01e2e0ebc37ab5f015308ec96b81837b62e4315747fa8692fe",
    40: "4384833114e9485c00262c0dd27474e6b935f56030c1d8bf4e10184de1060b39",
    41: "9c095e75a1db960b22dfdc7920d89c9e6dd2c633472988a70dc22fc0d5b2e929",
}


def test_requests_have_the_digests_that_they_had_before(tiny_bert, tmp_path, monkeypatch):
    workbench.forget()
    monkeypatch.chdir(tmp_path)
    Path("tiny").symlink_to(tiny_bert)
    data = write_records(tmp_path / "data.csv", [(f"note {i}", LABELS[i % 3]) for i in range(60)])
    settings = make_vault(tmp_path / "node", data, Path("tiny"))
    holder = Holder.of(settings)
    run_config = to_flower(parse(RUN))
    config = run_of(run_config, holder)
    zeros = {name: np.zeros(tensor.shape, np.float32) for name, tensor in bench_of(config, holder).initial.items()}
    for round_ in BEFORE:
        is_last = round_ > config.rounds
        spec = EvaluationSpec(noise_multiplier=2.0) if is_last else RunSchedule.of(config).spec(round_)
        fields = kinds.pack_instruction("run", round_, spec)
        asked = {"run_config": run_config, "fields": fields, "arrays": {kinds.ADAPTER: zeros}}
        response = answer(Request.of(kind=EVALUATE if is_last else TRAIN, **asked), holder)
        assert not response.code, response.reason
    with reading(settings.ledger) as db:
        requests = [entry.request for entry in db.entries() if entry.request]
    assert requests == [digest for digest in BEFORE.values() for _ in ("charged", "released")]
