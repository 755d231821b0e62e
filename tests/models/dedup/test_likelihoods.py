"""A language model that answers otherwise is not taken for the same: its utility is the likelihood of responses."""

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from fedpriv.config import parse
from fedpriv.learning.training.evaluation import evaluate
from fedpriv.learning.training.workbench import workbench
from fedpriv.models.dedup import DedupSettings
from fedpriv.models.dedup.adapter_variants import AdapterEvaluator
from fedpriv.models.dedup.pipeline import deduplicate
from fedpriv.models.dedup.validation import PublicValidation, loss_limit, proof_records
from fedpriv.models.variants.store import Store
from tests.simulations.test_run import causal_folder
from tests.stores import described
from tests.tiny import write_table

BOUND = 0.01


@pytest.fixture(scope="module")
def evaluator(small_run, tiny_bert, tmp_path_factory) -> AdapterEvaluator:
    place = tmp_path_factory.mktemp("causal")
    folder, table = causal_folder("llama", tiny_bert, place / "llama"), write_table(place / "table.csv", 4000)
    model = LlamaForCausalLM.from_pretrained(folder)
    model.lm_head.weight.data *= 15  # at random every model says nearly the same
    model.save_pretrained(folder)
    values = {"model": str(folder), "task": "CAUSAL_LM", "layers": "all", "rank": 8}
    values |= {"target_modules": "q_proj,v_proj,down_proj", "data": str(table)}
    return AdapterEvaluator(workbench(parse({**small_run, **values})))


@pytest.fixture(scope="module")
def variants(evaluator):
    """Two adapters of one model: the second one answers otherwise, and by right tokens no worse."""
    generator = torch.Generator().manual_seed(1)
    first, second = (
        {
            name: (scale * torch.randn(parameter.shape, generator=generator)).numpy()
            for name, parameter in evaluator.parameters.items()
        }
        for scale in (0.02, 1.2)
    )
    return {"global": first, "round-1": second}


def test_it_is_minus_the_logarithm_of_each_responses_perplexity(evaluator, variants):
    everyone = np.arange(evaluator.num_records)
    assert evaluator.utility == "log likelihood"
    with evaluator._with_adapter(variants["global"]):
        tokens = evaluate(evaluator.model, evaluator._test).tokens
    found = evaluator.utilities(variants["global"], everyone)
    assert found == pytest.approx(-tokens.sums / tokens.counts, rel=1e-5)
    some = everyone[1::3]
    assert evaluator.utilities(variants["global"], some) == pytest.approx(found[some], rel=1e-5)


def test_one_that_is_as_good_by_tokens_and_worse_by_likelihood_passes_neither_search_nor_proof(evaluator, variants):
    hits = {}
    for name, tensors in variants.items():
        with evaluator._with_adapter(tensors):
            hits[name] = evaluate(evaluator.model, evaluator._test).accuracy * evaluator.num_records
    assert hits["round-1"] >= hits["global"] - BOUND * evaluator.num_records, "it shows by tokens: choose another"
    before = evaluator.utilities(variants["global"], np.arange(evaluator.num_records))
    validation = PublicValidation(evaluator, before, BOUND)
    assert not validation.accept(variants["round-1"])
    assert not validation.proves(variants["round-1"])


@pytest.mark.parametrize(
    ("algorithm", "options"), [pytest.param("drd", {"min_batch": 1}, marks=pytest.mark.slow), ("greedy", {"batch": 12})]
)
def test_no_search_makes_its_perplexity_rise_beyond_the_bound(evaluator, variants, tmp_path, algorithm, options):
    bounds = {"architecture": "llama", "epsilon_bound": 5.0, "utility_bound": BOUND}
    both = [described(name, rounds, **bounds) for name, rounds in (("round-1", 1), ("global", 3))]
    settings = DedupSettings(block_size=64, algorithm=algorithm, options=options, fairness="outcome")
    judged = dict.fromkeys(variants, evaluator)
    with Store(tmp_path / "s") as store:
        outcomes = deduplicate(both, variants.__getitem__, judged, store, settings)
        restored = store.tensors("global")
    (outcome,) = (each for each in outcomes if each.name == "global")
    assert outcome.bases == ("round-1",)
    assert outcome.num_replaced < outcome.num_blocks
    proof = proof_records(evaluator.num_records)
    losses = evaluator.utilities(variants["global"], proof) - evaluator.utilities(restored, proof)
    assert losses.mean() <= loss_limit(losses) <= BOUND
