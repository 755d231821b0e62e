"""A node trains an encoder whose head is replaced as it does any other: in every phase with its records."""

import pytest
import torch
from torch.nn import functional as F

from fedpriv.config import ON_NODES, parse, to_flower
from fedpriv.holder.vault.answer import answer
from fedpriv.holder.vault.holder import Holder, bench_of, run_of
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import REGISTER, TRAIN, Request
from fedpriv.learning.adapters import lora
from fedpriv.learning.aggregation._head_start import head_of
from fedpriv.learning.training import workbench
from fedpriv.learning.training.noise_plan import calibrated, with_learning_rates
from fedpriv.learning.training.rounds import RunSchedule
from fedpriv.privacy.ledger.reader import reading
from tests import architectures
from tests.architectures import random_model
from tests.marks import slow
from tests.tiny import LABELS, WORDS
from tests.vaults import make_vault, write_records
from tests.wire import arrays_of

pytestmark = pytest.mark.usefixtures("quick_nodes")

NUM = 60
ROWS = [(f"{WORDS[i % 13]} {WORDS[i % 7]} {LABELS[i % 3]}", LABELS[i % 3]) for i in range(NUM)]
POLICY = "min_effective_noise_multiplier = 1e-6\n"
ROUNDS = {"start": 1, "head": 2, "all": 4}


@pytest.fixture(params=["roberta", *slow("bert", "distilbert")])
def model(request, tmp_path, tiny_bert):
    yield architectures.save(random_model(request.param), tmp_path / request.param, tokenizer_of=tiny_bert)
    workbench.forget()


def test_it_registers_and_trains_start_head_and_adapter(model, tmp_path):
    data = write_records(tmp_path / "own.csv", ROWS)
    settings = make_vault(tmp_path / "node", data, model, policy=POLICY, budget_epsilon=1e12)
    holder = Holder.of(settings)
    run = {"model": str(model), "data": ON_NODES, "labels": list(LABELS), "num_clients": 3, "rounds": 4}
    config = parse(run | {"lora_rounds": 1, "noise_multiplier": 1e-4, "lora_noise_multiplier": 1e-4})
    run_config = to_flower(config)
    registered = answer(Request.of(kind=REGISTER, run_config=run_config), holder)
    assert kinds.unpack(kinds.Registration, registered.fields).num_records == NUM

    bench = bench_of(run_of(run_config, holder), holder)
    sizes = [NUM] * 3
    planned = with_learning_rates(calibrated(config, sizes, bench.initial), sizes, bench.initial)
    schedule, uploads = RunSchedule.of(planned), {}
    moved = {name: tensor + 0.05 for name, tensor in bench.initial.items()}
    for phase, round_ in ROUNDS.items():
        assert schedule.phase(round_).name == phase
        fields = kinds.pack_instruction("run", round_, schedule.spec(round_))
        asked = {"run_config": run_config, "fields": fields, "arrays": {kinds.ADAPTER: arrays_of(moved)}}
        response = answer(Request.of(kind=TRAIN, **asked), holder)
        assert not response.code, response.reason
        named = response.arrays[kinds.ADAPTER]
        uploads[phase] = {name: torch.from_numpy(array.copy()) - moved[name] for name, array in named.items()}
    with reading(settings.ledger) as db:
        assert [e.phase for e in db.entries() if e.phase in ("charged", "released")] == ["charged", "released"] * 3

    # The start by hand: each class's features, summed, over the number of records. Noise is of a thousandth of that.
    weight, _ = head_of(moved)
    lora.write(bench.model.peft_model, moved)
    seen = []
    head = bench.model.layers[bench.model.head].module
    handle = head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    records = bench.client(0)
    bench.model.logits(records.items(), cached=False)
    handle.remove()
    sums = F.one_hot(records.labels, 3).float().T @ seen[0] / NUM
    torch.testing.assert_close(uploads["start"][weight], sums, atol=1e-3, rtol=0)
    assert all(not tensor.any() for name, tensor in uploads["head"].items() if "lora" in name)
    assert all(tensor.any() for tensor in uploads["all"].values())
