"""Refuse keys of a run's configuration that do not fit together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fedpriv.config._keys import ON_NODES, ConfigValues
from fedpriv.mechanisms.registry import FOR_SUMS, MECHANISMS

LINEAR_RULES = ("dp-lora", "fedavg", "ffa-lora", "rolora", "fedsvd", "fed-sb")
"""Aggregation rules whose global model is the weighted sum of the uploads, from which a server optimizer may step."""

# The rules with rounds that train some of the tensors.
PARTIAL_RULES = ("rolora", "fedsvd")
# The rules that neither train, decompose nor add to the frozen weights, which may then be in 4 bits.
RULES_ON_QUANTISED = ("dp-lora", "ffa-lora", "rolora", "fedsvd")
# Characters of a text that the run puts into every record. A record's own label chooses its answer, so without a bound
# answers of very different lengths would let the memory that a holder needs, and whether it replies, tell its labels.
_MOST_CHARACTERS = {"system_prompt": 20_000, "prompt_template": 20_000, "answers": 1_000}
# The rules whose uploads hold one factor of the map alone; the others are frozen in every model.
_ONE_FACTOR_RULES = ("ffa-lora", "fed-sb")


class _MisfitError(ValueError):
    """Keys do not fit together; its text is the first of `lines`.

    Attributes:
        lines: the problems, one line for each set of keys.
    """

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__(lines[0])
        self.lines = tuple(lines)


def check_fit(config: ConfigValues) -> None:
    """Refuse keys that do not fit together.

    Raises:
        _MisfitError: names the keys, the values and what would be right.
    """
    lines = []
    for rule in _RULES:
        try:
            rule(config)
        except ValueError as error:
            lines.append(str(error))
    if lines:
        raise _MisfitError(list(dict.fromkeys(lines)))


def _check_data(config: ConfigValues) -> None:
    if config.data == ON_NODES and config.task == "SEQ_CLS" and len(config.labels) < 2:
        raise ValueError("data = on-nodes: needs labels, the classes that all holders agreed on")
    if config.max_records and config.data == ON_NODES:
        raise ValueError(
            f"max_records = {config.max_records}: with data = on-nodes every node uses all of its own records; use 0"
        )


def _check_partition(config: ConfigValues) -> None:
    if config.partition == "natural" and not config.client_column:
        raise ValueError("partition = natural: needs client_column, the column that says who holds a record")
    if config.partition == "sizes" and not config.client_sizes:
        raise ValueError("partition = sizes: needs client_sizes, for instance [1200, 1000, 800]")


def _check_variants(config: ConfigValues) -> None:
    if config.integral_epsilon is not None and config.aggregation in _ONE_FACTOR_RULES:
        raise ValueError(
            f"integral_epsilon: it compares products of uploaded factors; aggregation = {config.aggregation} uploads "
            "one factor alone; use dp-lora"
        )
    if config.dedup and config.aggregation == "fed-sb":
        raise ValueError(
            f"dedup = {config.dedup}: aggregation = fed-sb trains R alone, and its variants, which hold B R and A, do "
            "not fit the model that would validate them; use dp-lora"
        )
    if max(config.variant_rounds, default=0) > config.rounds:
        raise ValueError(f"variant_rounds = {list(config.variant_rounds)}: the run has {config.rounds} rounds")


def _check_weight_decay(config: ConfigValues) -> None:
    if config.weight_decay > 0 and config.optimizer == "sgd":
        raise ValueError(f"weight_decay = {config.weight_decay}: only adamw applies it; use 0 with sgd")


def _check_aggregation(config: ConfigValues) -> None:
    if config.client_ranks and config.aggregation != "flora":
        raise ValueError(
            f"client_ranks = {list(config.client_ranks)}: aggregation = {config.aggregation} averages tensors of one "
            "shape; clients of different ranks need flora"
        )
    if config.aggregation == "t-fedavg" and config.upload_codec not in ("float32", "ternary"):
        raise ValueError(f"upload_codec = {config.upload_codec}: t-fedavg sends ternary codes; leave the key out")
    if config.aggregation in PARTIAL_RULES and config.optimizer != "sgd":
        raise ValueError(f"optimizer = {config.optimizer}: aggregation = {config.aggregation} needs sgd")
    if config.base_dtype == "nf4" and config.aggregation not in RULES_ON_QUANTISED:
        raise ValueError(
            f"base_dtype = nf4: aggregation = {config.aggregation} trains, decomposes or adds to the frozen weights, "
            f"which must not be in 4 bits then; use bfloat16, or one of {', '.join(RULES_ON_QUANTISED)}"
        )


def _check_upload_noise(config: ConfigValues) -> None:
    if config.noise_on == "upload" and config.clipping != "joint":
        raise ValueError(f"clipping = {config.clipping}: with noise_on = upload the whole update is clipped; use joint")


def _check_instructions(config: ConfigValues) -> None:
    """Refuse prompts, responses and answers that do not fit each other."""
    if config.text_pair_column and config.task == "CAUSAL_LM":
        raise ValueError(
            f"text_pair_column = {config.text_pair_column}: task = CAUSAL_LM would join the two texts; give "
            "prompt_column and response_column"
        )
    if not config.instructs:
        for key in ("response_column", "system_prompt", "prompt_template", "answers"):
            if value := getattr(config, key):
                raise ValueError(f"{key} = {value}: goes with prompt_column or messages_column; give one")
        return
    if config.task != "CAUSAL_LM":
        raise ValueError(f"task = {config.task}: prompts with responses need CAUSAL_LM; leave task out")
    if config.messages_column:
        for key in ("prompt_column", "response_column", "prompt_template"):
            if value := getattr(config, key):
                raise ValueError(
                    f"{key} = {value}: messages_column holds prompts and responses; leave one of the two out"
                )
    elif not config.response_column:
        raise ValueError(f"prompt_column = {config.prompt_column}: needs response_column, with what is to be learned")
    if config.prompt_template and config.prompt_template.count("{}") != 1:
        raise ValueError(f"prompt_template = {config.prompt_template!r}: must have {{}} once, where the prompt goes")
    for key, most in _MOST_CHARACTERS.items():
        value = getattr(config, key)
        longest = max(map(len, (value,) if isinstance(value, str) else value), default=0)
        if longest > most:
            raise ValueError(f"{key}: {longest} characters in one text; must be at most {most}")
    _check_answers(config.answers, config.labels)


def _check_answers(answers: tuple[str, ...], labels: tuple[str, ...]) -> None:
    if labels and not answers:
        raise ValueError(f"labels = {','.join(labels)}: a model that answers needs answers, one for each label")
    if labels and (len(labels) != len(answers) or len(set(labels)) < len(labels)):
        raise ValueError(
            f"labels = {','.join(labels)}: must be as many as answers = {','.join(answers)}, and each once"
        )
    texts = {answer.strip() for answer in answers}
    if answers and (len(answers) < 2 or len(texts) < len(answers) or "" in texts):
        raise ValueError(f"answers = {','.join(answers)}: must be two or more texts, each once")


def _check_secure_aggregation(config: ConfigValues) -> None:
    """Refuse keys that do not fit a sum of integers of which nobody sees a single one."""
    if not config.secure_aggregation:
        return
    from fedpriv.accounting.views import num_readers  # deferred: few runs need it

    threshold, colluding = config.min_clients, config.colluding_clients
    for key, needed in (("mechanism", FOR_SUMS), ("upload_codec", "float32"), ("max_update_norm", None)):
        if (value := getattr(config, key)) != needed:
            raise ValueError(f"{key} = {value}: secure_aggregation = true needs {needed or 'none'}")
    if config.aggregation not in LINEAR_RULES:
        raise ValueError(
            f"aggregation = {config.aggregation}: not a weighted sum of the uploads; secure_aggregation = true needs "
            f"one of {', '.join(LINEAR_RULES)}"
        )
    if config.noise_on == "gradients" and (config.local_steps, config.optimizer) != (1, "sgd"):
        raise ValueError(
            f"local_steps = {config.local_steps}, optimizer = {config.optimizer}: secure_aggregation = true sums the "
            "noised gradients of one step, so use 1 and sgd, or noise_on = upload"
        )
    if config.noise_multiplier == 0:
        raise ValueError("noise_multiplier = 0: secure_aggregation = true adds up noise; use more, or false")
    if threshold < (least := num_readers(colluding) + 2):
        raise ValueError(
            f"min_clients = {threshold}: with secure_aggregation = true and colluding_clients = {colluding} a sum "
            f"needs at least {least} uploads, so that noise of another client hides each from those who know their own"
        )
    if config.integral_epsilon is not None:
        raise ValueError(
            "integral_epsilon: it compares single uploads; with secure_aggregation = true, nobody sees those"
        )
    if config.audit:
        raise ValueError("audit: it tests the local epsilon of one client; audit a run with secure_aggregation = false")


def _check_audit(config: ConfigValues) -> None:
    if not config.audit:
        return
    if config.data == ON_NODES:
        raise ValueError(
            "audit: its canaries go into the clients' data, which are on their nodes; audit a simulation instead"
        )
    if config.aggregation in ("fedex-lora", "flora"):
        raise ValueError(f"audit: the global model of aggregation = {config.aggregation} is more than one adapter")
    if config.noise_on == "upload":
        raise ValueError("audit: canaries are records; noise_on = upload protects whole clients")


def _check_private_evaluation(config: ConfigValues) -> None:
    if config.evaluation_noise_multiplier is None:
        return
    key = f"evaluation_noise_multiplier = {config.evaluation_noise_multiplier}"
    if config.test_data:
        raise ValueError(f"{key}: with test_data the server has a test set of its own; leave one of the two out")
    if config.noise_on == "upload":
        raise ValueError(f"{key}: protects records, noise_on = upload whole clients; the two have no common epsilon")
    if config.audit:
        raise ValueError(f"{key}: an audit puts canaries among all of a client's records; leave one of the two out")


def _check_without_test_set(config: ConfigValues) -> None:
    if config.has_test_set:
        return
    if config.dedup:
        raise ValueError(f"dedup = {config.dedup}: validated on the server's test set; give test_data")
    if config.comparison and (config.data_are_public or config.simulate):  # elsewhere no run without noise is allowed
        raise ValueError("comparison = true: accuracies are compared on the server's test set; give test_data")


def _check_baselines(config: ConfigValues) -> None:
    if not config.baselines:
        return
    if config.task != "SEQ_CLS":
        raise ValueError(f"baselines = true: these are classifiers, and task = {config.task} trains none; leave it out")
    if not config.has_test_set:
        raise ValueError("baselines = true: baselines are tested on the server's test set; give test_data")
    if config.data != ON_NODES and not config.data_are_public:
        raise ValueError(
            "baselines = true: baselines would train on the clients' private records without noise; leave it out, or "
            "set public_data = true if nobody's privacy depends on them"
        )


def _check_mechanism(config: ConfigValues) -> None:
    mechanism = MECHANISMS.named(config.mechanism)
    if mechanism.parameters_hint and not config.mechanism_parameters:
        raise ValueError(f"mechanism = {config.mechanism}: needs mechanism_parameters, {mechanism.parameters_hint}")
    if config.client_ranks and mechanism.cost_depends_on_dimension:
        raise ValueError(
            f"client_ranks: with mechanism = {config.mechanism}, epsilon depends on the adapter's number of values; "
            "use gaussian"
        )
    if config.mechanism_parameters_are_a_file:
        return
    MECHANISMS.checked_parameters(config.mechanism, config.mechanism_parameters, config.noise_multiplier)
    if config.caveat and (config.target_epsilon or config.budget_epsilon):
        raise ValueError(
            f"mechanism_parameters: their cost is no privacy guarantee ({config.caveat}), so no target or budget of "
            "epsilon can be kept"
        )


def _check_server_optimizer(config: ConfigValues) -> None:
    plain = config.server_optimizer == "sgd" and config.server_learning_rate == 1
    plain = plain and config.lora_server_optimizer == "same" and config.server_rate_decay == "none"
    if not plain and config.aggregation not in LINEAR_RULES:
        raise ValueError(
            f"server_optimizer = {config.server_optimizer}, server_learning_rate = {config.server_learning_rate}, "
            f"server_rate_decay = {config.server_rate_decay}, lora_server_optimizer = {config.lora_server_optimizer}: "
            f"aggregation = {config.aggregation} is no weighted sum of the uploads; use sgd, 1, none and same, or one "
            f"of {', '.join(LINEAR_RULES)}"
        )
    if config.aggregation == "fedsvd":
        _check_fedsvd(config)


def _check_fedsvd(config: ConfigValues) -> None:
    adaptive = ("adam", "yogi")
    remedies = {
        "server_optimizer": (config.server_optimizer in adaptive, "sgd or momentum"),
        "lora_server_optimizer": (config.lora_server_optimizer in adaptive, "same"),
        "train": (config.train == "auto", "all or head, since auto may choose adam"),
    }
    for key, (is_adaptive, remedy) in remedies.items():
        if is_adaptive:
            raise ValueError(
                f"{key} = {getattr(config, key)}: aggregation = fedsvd rotates B after every round, and the squares of "
                f"single values, which adam and yogi keep, cannot follow; use {remedy}"
            )


def _check_recipe(config: ConfigValues) -> None:
    """Refuse parts of the recipe `fedpriv` without the other parts that they need."""
    remedy = "or use recipe = dp-lora-paper"
    one_clipped_sum = ("task", "noise_on", "optimizer", "clipping", "mechanism")
    parts = {
        "head_start = true": (config.head_start, one_clipped_sum),
        "learning_rate = auto": (config.learning_rate == "auto", (*one_clipped_sum, "local_steps")),
        f"train = {config.train}": (config.train != "all", one_clipped_sum),
        f"lora_rounds = {config.lora_rounds}": (config.lora_rounds is not None, one_clipped_sum),
    }
    known = {key: getattr(type(config), key) for key in (*one_clipped_sum, "local_steps")}
    for part, (is_used, needed) in parts.items():
        for key in needed:
            value = getattr(config, key)
            # Rates and phases are derived from noise of standard deviation z C that adds up, of whichever kind.
            fits = value == known[key] or (key == "mechanism" and MECHANISMS.named(value).noise_adds_up)
            if is_used and not fits:
                raise ValueError(f"{part}: needs {key} = {known[key]}, not {value}, {remedy}")
    if config.head_start and not config.normalize_features:
        raise ValueError(f"head_start = true: needs normalize_features = true, {remedy}")
    if config.head_start and config.rounds < 2:
        raise ValueError("rounds = 1: the start of the head is the first round; use at least 2")
    if config.normalize_features and config.task != "SEQ_CLS":
        raise ValueError(f"normalize_features = true: a model with task = {config.task} has no head; use false")


_RULES: tuple[Callable[[ConfigValues], None], ...] = (
    _check_data,
    _check_partition,
    _check_instructions,
    _check_audit,
    _check_private_evaluation,
    _check_without_test_set,
    _check_baselines,
    _check_secure_aggregation,
    _check_variants,
    _check_weight_decay,
    _check_aggregation,
    _check_mechanism,
    _check_recipe,
    _check_server_optimizer,
    _check_upload_noise,
)
