"""The configuration of a run: one flat, frozen list of keys, the same in TOML, after `-c` and with `flwr run`."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

from pydantic import ConfigDict, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs

from fedpriv.config._federation_and_privacy import RULE_FACTS, FederationSection, Phase, PrivacySection, UpdateSection
from fedpriv.config._model_and_data import (
    IN_MEMORY,
    ON_NODES,
    OWN_MODEL,
    AuditSection,
    DataSection,
    ExperimentSection,
    MachineSection,
    ModelSection,
    VariantsSection,
)
from fedpriv.config._recipes import RecipeSection, with_recipe
from fedpriv.config._section import Fact
from fedpriv.privacy.mechanisms.registry import FOR_SUMS, MECHANISMS


class _MisfitError(ValueError):
    """Keys do not fit together: a line for each set of them, of which the first is the error's text."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__(lines[0])
        self.lines = tuple(lines)


# Bases stand from the last section to the first, as Python orders the fields of dataclasses.
@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class RunConfig(
    MachineSection,
    ExperimentSection,
    AuditSection,
    VariantsSection,
    PrivacySection,
    UpdateSection,
    FederationSection,
    DataSection,
    ModelSection,
    RecipeSection,
):
    """Everything that a run depends on, except its data. docs/configuration.md explains each key.

    A function that needs one section takes that; its callers pass the configuration as it is.

    Raises:
        pydantic.ValidationError: a value has the wrong type or is out of range; `parse` turns it into one line.
    """

    @model_validator(mode="before")
    @classmethod
    def _with_recipe(cls, given: ArgsKwargs) -> dict[str, Any]:
        return with_recipe(given.kwargs or {})

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        lines = []
        for check in self.checks():
            try:
                check()
            except ValueError as error:
                lines.append(str(error))
        if lines:
            raise _MisfitError(list(dict.fromkeys(lines)))
        return self

    @property
    def without_noise(self) -> RunConfig:
        """The configuration of the comparison run: z = 0, clipping kept, since clipping is part of the optimiser."""
        return replace(
            self,
            noise_multiplier=0.0,
            start_noise_multiplier=0.0 if self.head_start and not self.noise_schedule else None,
            lora_noise_multiplier=None if self.lora_rounds is None or self.noise_schedule else 0.0,
            mechanism="gaussian",
            mechanism_parameters="",
            target_epsilon=None,
            target_risk="",
            target_epsilon_published=None,
            budget_epsilon=(),
            privacy_view="local",
            secure_aggregation=False,
            secure_masks=None,
            client_weights="records" if self.weighting == "records" else self.client_weights,
            comparison=False,
            baselines=False,
            variant_rounds=(),
            dedup="",
            integral_epsilon=None,
            track="none",
            ledger="",
            out="",
            resume="",
        )

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of all keys except those of `Fact.OUTSIDE`."""
        left_out = self.keys_with(Fact.OUTSIDE)
        values = {key: value for key, value in asdict(self).items() if key not in left_out}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    @property
    def values_of_release(self) -> dict[str, Any]:
        """{key of `Fact.RELEASE`: its value}."""
        return {key: getattr(self, key) for key in self.keys_with(Fact.RELEASE)}

    @property
    def is_own_model(self) -> bool:
        """Whether a program gave the model, and the records with it."""
        return self.model.startswith(OWN_MODEL)

    @property
    def protects_nobody(self) -> bool:
        """Whether figures without noise may be shown: the data are public, or the run is marked as not private."""
        return self.data_are_public or self.simulate

    @property
    def has_test_set(self) -> bool:
        """Whether the server evaluates on records of its own, or on some that nobody's privacy depends on."""
        if self.test_data:
            return True
        return self.splits_off_test_set and self.protects_nobody and self.evaluation_noise_multiplier is None

    @property
    def compares(self) -> bool:
        """Whether a comparison run follows; by default, wherever releases without noise are allowed and tested."""
        if self.noise_multiplier == 0:
            return False
        if self.comparison is not None:
            return self.comparison
        return self.has_test_set and self.protects_nobody

    @property
    def computes_baselines(self) -> bool:
        """Whether plain classifiers are compared with the run; by default, wherever public data are tested on."""
        if self.baselines is not None:
            return self.baselines
        return self.task == "SEQ_CLS" and self.has_test_set and self.data_are_public and not self.is_own_model

    @property
    def generates_answers(self) -> bool:
        """Whether the run answers prompts: it needs prompts, a test set and leave to."""
        return self.instructs and self.has_test_set and self.generated_answers > 0

    @property
    def weighting(self) -> Literal["uniform", "records", "root-records"]:
        """The quantity that the clients' weights are in proportion to: none, N_k or N_k^1.5."""
        if self.client_weights != "auto":
            return self.client_weights
        return "records" if self.secure_aggregation else "root-records"

    @property
    def masks(self) -> bool:
        """Whether uploads are masked, or simulated clients send what the masks would cancel out to."""
        return self.secure_masks if self.secure_masks is not None else self.data == ON_NODES

    @property
    def start_phase(self) -> Phase | None:
        """The first round, if it starts the head: one release of every record's features."""
        if not self.head_start:
            return None
        return Phase(
            name="start",
            num_rounds=1,
            noise_multiplier=self.scheduled[0][0] if self.scheduled else self.start_noise_multiplier,
            sampling_probability=1.0,
            learning_rate=1.0,
        )

    @property
    def main_phase(self) -> Phase:
        """The rounds with the keys that have no prefix: those of the head, or all after the start."""
        trains_head = self.train == "head" or self.lora_rounds is not None
        num_rounds = self.rounds - self.head_start - self.lora_phase.num_rounds
        noise, probability = self._typical(
            self.head_start, num_rounds, self.noise_multiplier, self.sampling_probability
        )
        return Phase(
            name="head" if trains_head else "all",
            num_rounds=num_rounds,
            noise_multiplier=noise,
            sampling_probability=probability,
            learning_rate=self.learning_rate,
        )

    @property
    def lora_phase(self) -> Phase:
        """The last rounds, which train A and B too, with noise, sampling and rates of their own where these are given.

        It has no rounds where all after the start are alike.
        """
        num_rounds = 0 if self.train == "head" or self.lora_rounds is None else self.lora_rounds
        num_rounds = min(num_rounds, self.rounds - self.head_start)
        noise = self.noise_multiplier if self.lora_noise_multiplier is None else self.lora_noise_multiplier
        probability = self.lora_sampling_probability or self.sampling_probability
        noise, probability = self._typical(self.rounds - num_rounds, num_rounds, noise, probability)
        return Phase(
            name="all",
            num_rounds=num_rounds,
            noise_multiplier=noise,
            sampling_probability=probability,
            learning_rate=self.lora_head_learning_rate,
            lora_learning_rate=self.lora_learning_rate,
        )

    def _typical(self, after: int, num_rounds: int, z: float, q: float | None) -> tuple[float, float | None]:
        """z and q of a phase, which stand for those that a `noise_schedule` gives its rounds.

        With them the rounds leave as much noise per unit of signal, whose squares add up.
        """
        own = self.scheduled[after : after + num_rounds]
        if not own:
            return z, q
        drawn = [probability or q or 1.0 for _, probability in own]
        mean = math.fsum(drawn) / len(own)
        ratios = [noise / each for (noise, _), each in zip(own, drawn, strict=True)]
        most = max(ratios) or 1.0  # squares of it cannot overflow
        share = math.sqrt(math.fsum((ratio / most) ** 2 for ratio in ratios) / len(own))
        return mean * most * share, mean if own[0][1] else q

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The run's phases that have rounds, in order."""
        phases = (self.start_phase, self.main_phase, self.lora_phase)
        return tuple(phase for phase in phases if phase and phase.num_rounds)

    @property
    def num_lora_rounds(self) -> int:
        """How many of the run's last rounds train A and B as well."""
        return sum(phase.num_rounds for phase in self.phases if phase.name == "all")

    def rank_of(self, client: int) -> int:
        """The rank of a client's adapter, by partition id."""
        return self.client_ranks[client] if self.client_ranks else self.rank

    def _check_own_model(self) -> None:
        """Refuse what a model of a program's own has no part in."""
        if self.is_own_model != (self.data == IN_MEMORY):
            raise ValueError(
                f"model = {self.model}, data = {self.data}: a model of your own and records in memory go together, as "
                "in fedpriv.run(model=..., data=...)"
            )
        if not self.is_own_model:
            return
        if self.engine not in (engines := ("stacked", "in-process")):
            raise ValueError(
                f"engine = {self.engine}: a model of your own is in one process alone; use {' or '.join(engines)}"
            )
        if self.recipe != "per-sample":
            raise ValueError(f"recipe = {self.recipe}: is for language models; leave it out with a model of your own")
        if self.learning_rate == "auto":
            raise ValueError("learning_rate = auto: is derived for language models alone; give a number")
        if not self.rule.is_plain:
            raise ValueError(
                f"aggregation = {self.aggregation}: needs the adapters of a language model; with a model of your own "
                f"use {RULE_FACTS.names_of(lambda rule: rule.is_plain)}"
            )

    def _check_published_target(self) -> None:
        if self.target_epsilon_published and self.data == ON_NODES:
            raise ValueError(
                f"target_epsilon_published = {self.target_epsilon_published:g}: is no privacy guarantee, and for "
                "simulations alone; data = on-nodes needs target_epsilon"
            )

    def _check_task(self) -> None:
        if len(set(self.labels)) < len(self.labels):
            raise ValueError(f"labels = {','.join(self.labels)}: name each class once")
        if self.data == ON_NODES and self.task == "SEQ_CLS" and len(self.labels) < 2:
            raise ValueError("data = on-nodes: needs labels, the classes that all holders agreed on")
        if self.text_pair_column and self.task == "CAUSAL_LM":
            raise ValueError(
                f"text_pair_column = {self.text_pair_column}: task = CAUSAL_LM would join the two texts; give "
                "prompt_column and response_column"
            )
        if self.instructs and self.task != "CAUSAL_LM":
            raise ValueError(f"task = {self.task}: prompts with responses need CAUSAL_LM; leave task out")

    def _check_variants(self) -> None:
        if self.integral_epsilon is not None and self.rule.has_one_factor:
            raise ValueError(
                f"integral_epsilon: it compares products of uploaded factors; aggregation = {self.aggregation} uploads "
                "one factor alone; use dp-lora"
            )
        if self.validates_variants and self.rule.trains == "lora-r":
            raise ValueError(
                f"dedup = {self.dedup}: aggregation = {self.aggregation} trains R alone, and its variants, which hold "
                "B R and A, do not fit the model that would validate them; use dp-lora, or lossless"
            )
        if max(self.variant_rounds, default=0) > self.rounds:
            raise ValueError(f"variant_rounds = {list(self.variant_rounds)}: the run has {self.rounds} rounds")

    def _check_factors(self) -> None:
        trains, why = {
            "weights": (self.rule.trains, ""),
            "answers": ("lora-r", "R lies between them"),
            "inputs": ("lora-b", "B is trained behind them"),
        }[self.factors]
        if self.factors == "answers" and not self.answers:
            raise ValueError("factors = answers: needs answers, the allowed responses")
        if self.factors == "inputs" and self.base_dtype == "nf4":
            raise ValueError(
                "factors = inputs: with base_dtype = nf4 machines round what layers read differently, and would find "
                "other directions; use factors = weights"
            )
        if self.rule.trains != trains:
            rules = RULE_FACTS.names_of(lambda rule: rule.trains == trains)
            raise ValueError(f"factors = {self.factors}: {why}; use {rules}, not {self.aggregation}")

    def _check_trained_rank(self) -> None:
        if self.trained_rank is None:
            return
        if self.rule.trains != "lora-r" or self.factors != "weights":
            rules = RULE_FACTS.names_of(lambda rule: rule.trains == "lora-r")
            raise ValueError(
                f"trained_rank = {self.trained_rank}: is of R between factors of weights; leave it out, or use {rules}"
            )
        if self.trained_rank > self.rank:
            raise ValueError(f"trained_rank = {self.trained_rank}: must be at most rank = {self.rank}")

    def _check_rule(self) -> None:
        """Refuse an optimizer, a format or a mechanism that does not fit the aggregation rule."""
        if self.rule.is_partial and self.optimizer != "sgd":
            raise ValueError(f"optimizer = {self.optimizer}: aggregation = {self.aggregation} needs sgd")
        if self.base_dtype == "nf4" and not (self.rule.keeps_frozen_weights or self.factors == "answers"):
            raise ValueError(
                f"base_dtype = nf4: aggregation = {self.aggregation} trains, decomposes or adds to the frozen weights, "
                f"which must not be in 4 bits then; use bfloat16, or one of "
                f"{RULE_FACTS.names_of(lambda rule: rule.keeps_frozen_weights)}"
            )
        if self.client_ranks and MECHANISMS.named(self.mechanism).cost_depends_on_dimension:
            raise ValueError(
                f"client_ranks: with mechanism = {self.mechanism}, epsilon depends on the adapter's number of values; "
                "use gaussian"
            )

    def _check_noise_schedule(self) -> None:
        """Refuse a noise schedule of another length than the run's, or with keys that would say something else."""
        if not self.noise_schedule:
            return
        num, pairs = len(self.noise_schedule), [each for each in self.noise_schedule if isinstance(each, tuple)]
        if num != self.rounds:
            raise ValueError(f"noise_schedule: has {num} values for rounds = {self.rounds}; give one for every round")
        if len(pairs) not in (0, num) or any(q > 1 for _, q in pairs):
            raise ValueError("noise_schedule: must be z of every round, or for every round [z, q] with q in (0, 1]")
        if pairs and self.head_start and pairs[0][1] != 1:
            raise ValueError(
                f"noise_schedule: round 1 has q = {pairs[0][1]}; the head's start is of all records, so give it 1"
            )
        if self.train == "auto":
            raise ValueError("noise_schedule: train = auto chooses the rounds, and their noise; use all or head")
        for key in ("start_noise_multiplier", "lora_noise_multiplier"):
            if getattr(self, key) is not None:
                raise ValueError(
                    f"{key} = {getattr(self, key)}: noise_schedule has the noise of every round; leave it out"
                )

    def _check_finish(self) -> None:
        adaptive = ("adam", "yogi")
        remedies = {
            "server_optimizer": (self.server_optimizer in adaptive, "sgd or momentum"),
            "lora_server_optimizer": (self.lora_server_optimizer in adaptive, "same"),
            "train": (self.train == "auto", "all or head, since auto may choose adam"),
        }
        for key, (is_adaptive, remedy) in remedies.items():
            if self.rule.rebases and is_adaptive:
                raise ValueError(
                    f"{key} = {getattr(self, key)}: aggregation = {self.aggregation} rotates B after every round, and "
                    f"the squares of single values, which adam and yogi keep, cannot follow; use {remedy}"
                )
        if self.train == "auto" and not self.rule.linear:
            raise ValueError(
                f"train = auto: may choose adam at the server, and aggregation = {self.aggregation} is no weighted sum "
                "of the uploads; use all or head"
            )

    def _check_secure_aggregation(self) -> None:
        """Refuse keys that do not fit a sum of integers of which nobody sees a single one."""
        if not self.secure_aggregation:
            return
        from fedpriv.privacy.accounting.views import num_readers  # deferred: few runs need it

        threshold, colluding = self.min_clients, self.colluding_clients
        for key, needed in (("mechanism", FOR_SUMS), ("upload_codec", "float32"), ("max_update_norm", None)):
            if (value := getattr(self, key)) != needed:
                raise ValueError(f"{key} = {value}: secure_aggregation = true needs {needed or 'none'}")
        if not self.rule.linear:
            raise ValueError(
                f"aggregation = {self.aggregation}: not a weighted sum of the uploads; secure_aggregation = true needs "
                f"one of {RULE_FACTS.names_of(lambda rule: rule.linear)}"
            )
        if self.noise_on == "gradients" and (self.local_steps, self.optimizer) != (1, "sgd"):
            raise ValueError(
                f"local_steps = {self.local_steps}, optimizer = {self.optimizer}: secure_aggregation = true sums the "
                "noised gradients of one step, so use 1 and sgd, or noise_on = upload"
            )
        if self.noise_multiplier == 0:
            raise ValueError("noise_multiplier = 0: secure_aggregation = true adds up noise; use more, or false")
        if threshold < (least := num_readers(colluding) + 2):
            raise ValueError(
                f"min_clients = {threshold}: with secure_aggregation = true and colluding_clients = {colluding} a sum "
                f"needs at least {least} uploads, so that noise of another client hides each from those who know their "
                "own"
            )
        if self.integral_epsilon is not None:
            raise ValueError(
                "integral_epsilon: it compares single uploads; with secure_aggregation = true, nobody sees those"
            )

    def _check_audit(self) -> None:
        if not self.audit:
            return
        if self.data == ON_NODES:
            raise ValueError(
                "audit: its canaries go into the clients' data, which are on their nodes; audit a simulation instead"
            )
        if self.rule.merges:
            raise ValueError(f"audit: the global model of aggregation = {self.aggregation} is more than one adapter")
        if self.noise_on == "upload":
            raise ValueError("audit: canaries are records; noise_on = upload protects whole clients")

    def _check_persons(self) -> None:
        """Refuse what has no proof for a person's records together."""
        if self.unit != "person":
            return
        if self.noise_on == "upload":
            raise ValueError(
                "noise_on = upload: protects whole clients, and unit = person persons; leave one of the two out"
            )
        if self.clipping == "batch":
            raise ValueError(
                "clipping = batch: clips the mean of records; unit = person needs joint, split or per-tensor"
            )

    def _check_holders(self) -> None:
        """Refuse what counts the account of one client where a person may be at several."""
        if self.holders_per_person == 1:
            return
        from fedpriv.privacy.accounting.gaussian import MAX_HOLDERS  # deferred: few runs need it

        key = f"holders_per_person = {self.holders_per_person}"
        if self.unit != "person":
            raise ValueError(f"{key}: is about persons; name person_column, or use 1")
        if self.holders_per_person > MAX_HOLDERS:
            raise ValueError(f"{key}: must be at most {MAX_HOLDERS}")
        if self.data != ON_NODES and self.partition_rule != "natural":
            raise ValueError(f"{key}: partition = {self.partition_rule} gives each person to one client; use 1")
        of_one_client = {
            "budget_epsilon": list(self.budget_epsilon),
            "dedup": self.dedup,
            "integral_epsilon": self.integral_epsilon,
            "secure_aggregation": self.secure_aggregation,
        }
        for name, value in of_one_client.items():
            if value:
                shown = "true" if value is True else value
                raise ValueError(f"{name} = {shown}: counts the account of one client; leave it out with {key}")

    def _check_private_evaluation(self) -> None:
        if self.evaluation_noise_multiplier is None:
            return
        key = f"evaluation_noise_multiplier = {self.evaluation_noise_multiplier}"
        if self.test_data:
            raise ValueError(f"{key}: with test_data the server has a test set of its own; leave one of the two out")
        if self.noise_on == "upload":
            raise ValueError(
                f"{key}: protects {self.unit}s, noise_on = upload whole clients; the two have no common epsilon"
            )
        if self.audit:
            raise ValueError(f"{key}: an audit puts canaries among all of a client's records; leave one of the two out")

    def _check_without_test_set(self) -> None:
        if self.has_test_set:
            return
        if self.validates_variants:
            raise ValueError(f"dedup = {self.dedup}: validated on the server's test set; give test_data, or lossless")
        if self.comparison and self.protects_nobody:  # elsewhere no run without noise is allowed
            raise ValueError("comparison = true: accuracies are compared on the server's test set; give test_data")

    def _check_baselines(self) -> None:
        if not self.baselines:
            return
        if self.task != "SEQ_CLS":
            raise ValueError(
                f"baselines = true: these are classifiers, and task = {self.task} trains none; leave it out"
            )
        if not self.has_test_set:
            raise ValueError("baselines = true: baselines are tested on the server's test set; give test_data")
        if self.data != ON_NODES and not self.data_are_public:
            raise ValueError(
                "baselines = true: baselines would train on the clients' private records without noise; leave it out, "
                "or set public_data = true if nobody's privacy depends on them"
            )

    def _check_recipe(self) -> None:
        """Refuse parts of the recipe `fedpriv` without the other parts that they need."""
        remedy = "or use recipe = per-sample"
        one_clipped_sum = ("task", "noise_on", "optimizer", "clipping", "mechanism")
        parts = {
            "head_start = true": (self.head_start, one_clipped_sum),
            "learning_rate = auto": (self.learning_rate == "auto", (*one_clipped_sum, "local_steps")),
            f"train = {self.train}": (self.train != "all", one_clipped_sum),
            f"lora_rounds = {self.lora_rounds}": (self.lora_rounds is not None, one_clipped_sum),
        }
        known = {key: getattr(type(self), key) for key in (*one_clipped_sum, "local_steps")}
        for part, (is_used, needed) in parts.items():
            for key in needed:
                value = getattr(self, key)
                # Rates and phases are derived from noise of standard deviation z C that adds up, of whichever kind.
                fits = value == known[key] or (key == "mechanism" and MECHANISMS.named(value).noise_adds_up)
                # Between these factors gradients are as long as a head's, so its rates suit them.
                fits = fits or (key == "task" and self.factors == "answers" and part == "learning_rate = auto")
                if is_used and not fits:
                    raise ValueError(f"{part}: needs {key} = {known[key]}, not {value}, {remedy}")
            if is_used and self.rule.ternary:
                raise ValueError(f"{part}: {self.aggregation} is ternary and a head's steps are not, {remedy}")
        if self.head_start and not self.normalize_features:
            raise ValueError(f"head_start = true: needs normalize_features = true, {remedy}")
        if self.head_start and self.rounds < 2:
            raise ValueError("rounds = 1: the start of the head is the first round; use at least 2")
        if self.normalize_features and self.task != "SEQ_CLS":
            raise ValueError(f"normalize_features = true: a model with task = {self.task} has no head; use false")
