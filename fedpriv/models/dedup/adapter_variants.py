"""A run's adapter variants for deduplication: their accuracy or likelihood, saliency of their values, their answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from peft import get_peft_model_state_dict
from torch import Tensor, nn

from fedpriv.errors import InputError
from fedpriv.learning.adapters import INNER_SUFFIX, as_tensor
from fedpriv.learning.data.records import usable
from fedpriv.learning.training.answers import answers_to, first_questions
from fedpriv.learning.training.evaluation import passes_by_length, text_of
from fedpriv.learning.training.workbench import Workbench, workbench
from fedpriv.models.dedup import saliency
from fedpriv.models.dedup.saliency import Saliency
from fedpriv.models.dedup.validation import PrivateRecords, Tensors, Utilities, Utility, proof_records
from fedpriv.models.dedup.work import Outcome
from fedpriv.runs import StoredAnswer
from fedpriv.runs.files import read_config

NUM_ANSWERS = 5
"""Questions that a variant answers before and after deduplication"""


class AdapterEvaluator:
    """A `fedpriv.models.dedup.validation.Evaluator` for the adapters of a run, on the server's test set.

    The run publishes its accuracy on this set after every round, so the set counts as public here.

    Args:
        bench: of the run; after each call its model has the same adapter as before, on the pretrained base.
        num_records: number of test records to use, chosen by the seed; 0 uses all.
        measure: of saliency.

    Raises:
        InputError: the run has no test set, or its model trains R alone, so that its variants do not fit it.

    Attributes:
        utility: of a record; the log likelihood of responses or texts for a causal model.
        private: None, since the records are public.
    """

    private: PrivateRecords | None = None

    def __init__(self, bench: Workbench, *, num_records: int = 0, seed: int = 0, measure: str = "gradient") -> None:
        if not len(bench.test):
            raise InputError("test_data: this run's server has no test set, on which its variants could be validated")
        chosen = np.random.default_rng(seed).permutation(len(bench.test))[: num_records or None]
        read = [item[1] for item in bench.test.items(np.sort(chosen).tolist()) if usable(item)]
        self.model, self._test = bench.model, bench.test.part(read)
        self._bench, self._read = bench, read
        if not read:
            raise InputError("test_data: the model can read none of the test records, on which variants are validated")
        self.num_records = len(self._test)
        self.utility: Utility = "accuracy" if len(self._test.labels) else "log likelihood"
        self.description = f"{self.num_records} of {len(bench.test)} test records, seed {seed}"
        self.description += f", {measure}" if measure != "gradient" else ""
        self._measure = saliency.MEASURES.named(measure)
        # Not only the trained ones: if only B is trained, a variant contains A too.
        by_address = {p.data_ptr(): (name, p) for name, p in self.model.peft_model.named_parameters()}
        stored = get_peft_model_state_dict(self.model.peft_model)
        if any(name.endswith(INNER_SUFFIX) for name in stored):
            raise InputError(
                "aggregation: the run trained R, and its variants hold B R, which its model cannot validate"
            )
        self._parameters = {name: by_address[tensor.data_ptr()] for name, tensor in stored.items()}

    @classmethod
    def of_run(
        cls, folder: Path, num_records: int | None = None, seed: int | None = None, measure: str = "gradient"
    ) -> AdapterEvaluator:
        """The evaluator of the run in a folder, on its `dedup_records` by its seed unless told otherwise; 0 is all.

        InputError if there is no run, or its data or model are no longer available.
        """
        config = read_config(folder)
        number = config.dedup_records if num_records is None else num_records
        chosen = config.seed if seed is None else seed
        return cls(workbench(config), num_records=number, seed=chosen, measure=measure)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The adapter's parameters by peft's names, frozen ones included."""
        return {name: parameter for name, (_, parameter) in self._parameters.items()}

    @torch.no_grad()
    def utilities(self, tensors: Tensors, records: NDArray[np.int64]) -> Utilities:
        """Whether each of these test records is predicted correctly, or the mean log likelihood of its targets."""
        items, found = self._test.items(records.tolist()), np.empty(len(records))
        with self._with_adapter(tensors):
            for places in passes_by_length(items):
                predicted = self.model.predictions([items[place] for place in places], cached=True)
                own = predicted.hits if self.utility == "accuracy" else -predicted.losses
                found[places] = own.double().cpu().numpy()
        return found

    def saliency(self, tensors: Tensors, records: NDArray[np.int64]) -> Saliency:
        """How much each value of the adapter matters to the loss on these test records."""
        names = {name: in_model for name, (in_model, _) in self._parameters.items()}
        items = self._test.items(records.tolist())
        # Of similar lengths, since padding costs as much as words.
        batches = [{"index": torch.tensor(records[positions])} for positions in passes_by_length(items)]
        with self._with_adapter(tensors):
            found = self._measure(self.model.peft_model, batches, self._losses, set(names.values()))
        return {name: found[in_model] for name, in_model in names.items()}

    def answers_side_by_side(
        self, outcomes: Sequence[Outcome], given: Callable[[str], Tensors], stored: Callable[[str], Tensors]
    ) -> list[StoredAnswer]:
        """Answers of the variant that may have lost most, by tensors as `given` and as `stored`, to the first questions
        by which nothing was chosen; none of a model that answers nothing, or if nothing was replaced.
        """
        changed = [each for each in outcomes if each.num_replaced and each.loss_limit is not None]
        if not changed or not self._bench.config.generates_answers:
            return []
        name = max(changed, key=lambda each: each.loss_limit or 0.0).name
        records = [self._read[place] for place in proof_records(self.num_records)]
        questions = first_questions(self._bench, min(NUM_ANSWERS, self._bench.config.generated_answers), records)
        texts = []
        for read in (given, stored):
            with self._with_adapter(read(name)):
                texts.append(answers_to(questions, self._bench))
        references = [text_of(self._bench.base.tokenizer, tokens) for tokens in questions.references]
        return [
            StoredAnswer(variant=name, prompt=prompt, reference=reference, before=before, after=after)
            for prompt, reference, before, after in zip(questions.texts, references, *texts, strict=True)
        ]

    def _losses(self, _model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return self.model.predictions(self._test.items(batch["index"].tolist()), cached=True).losses

    @contextmanager
    def _with_adapter(self, tensors: Tensors) -> Iterator[None]:
        """Within this context the model's adapter has these tensors, possibly of another rank."""
        self.model.merge({})
        if self._parameters.keys() != tensors.keys():
            unmatched = sorted(self._parameters.keys() ^ tensors.keys())
            raise ValueError(f"adapter: tensors {', '.join(unmatched)} are on one side only")
        before = {name: parameter.data for name, parameter in self.parameters.items()}
        try:
            for name, parameter in self.parameters.items():
                parameter.data = as_tensor(tensors[name]).to(parameter)
            yield
        finally:
            for name, parameter in self.parameters.items():
                parameter.data = before[name]
