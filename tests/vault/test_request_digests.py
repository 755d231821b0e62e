"""A request that was answered before an upgrade still finds its stored reply: its digest in the ledger is the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedpriv import protocol
from fedpriv.config import ON_NODES, parse, to_flower
from fedpriv.ledger.reader import reading
from fedpriv.training import workbench
from fedpriv.training.private_evaluation import EvaluationSpec
from fedpriv.training.schedule import RunSchedule
from fedpriv.vault.answer import answer
from fedpriv.vault.frames import EVALUATE, TRAIN, Request
from fedpriv.vault.holder import Holder, bench_of, run_of
from tests.tiny import LABELS
from tests.vaults import make_vault, write_records

pytestmark = pytest.mark.usefixtures("quick_nodes")

RUN = {
    **{"model": "tiny", "layers": "last-1", "rank": 4, "data": ON_NODES, "labels": list(LABELS), "num_clients": 3},
    **{"learning_rate": 0.5, "lora_learning_rate": 0.1, "lora_head_learning_rate": 0.2, "seed": 4},
    **{"noise_multiplier": 1.5, "start_noise_multiplier": 2.0, "lora_noise_multiplier": 3.0},
    "evaluation_noise_multiplier": 2.0,
}

# {round: the digest under which the version before sections charged for it}, of an adapter of zeros.
BEFORE = {
    1: "fe097454f807f9a3f4e10144e32b4b9d044bbc35ee0957ec3a8469de4e4e43ed",
    2: "b72de387b29362e7d510878ddb2373fe4f46a5f092d41c6ec84ea84630df3c21",
    40: "3b1614aad5271ab754d5f76aed3bdb4838ce6b7b1327bbb5ab569f31d4868818",
    41: "b0e2dfd7eca19ff498d98567f2f0f203032010d0cafe2a9286437ac8e341a86d",
}


@pytest.mark.parametrize("round_", BEFORE)
def test_a_request_has_the_digest_that_it_had_before(tiny_bert, tmp_path, monkeypatch, round_):
    workbench.forget()
    monkeypatch.chdir(tmp_path)
    Path("tiny").symlink_to(tiny_bert)
    data = write_records(tmp_path / "data.csv", [(f"note {i}", LABELS[i % 3]) for i in range(60)])
    settings = make_vault(tmp_path / "node", data, Path("tiny"))
    holder = Holder.of(settings)
    run_config = to_flower(parse(RUN))
    config = run_of(run_config, holder)
    is_last = round_ > config.rounds
    spec = EvaluationSpec(noise_multiplier=2.0) if is_last else RunSchedule.of(config).spec(round_)
    zeros = {name: np.zeros(tensor.shape, np.float32) for name, tensor in bench_of(config, holder).initial.items()}
    response = answer(
        Request(
            kind=EVALUATE if is_last else TRAIN,
            run_config=run_config,
            fields=protocol.pack_instruction("run", round_, spec),
            arrays={protocol.ADAPTER: zeros},
        ),
        holder,
    )
    assert not response.code, response.reason
    with reading(settings.ledger) as db:
        assert [entry.request for entry in db.entries() if entry.request] == [BEFORE[round_]] * 2
