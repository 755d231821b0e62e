"""The sections of a configuration on the model, on the records and who holds them, and on variants and the machine."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from fedpriv.config._section import ConfigSection, Count, Fact, Layers, Maybe, Names, NonNegative, Positive, Sizes

Train = Literal["all", "head", "auto"]
"""Which of the adapter and the head a run trains."""

Separator = Literal["auto", "comma", "semicolon", "tab"]
"""The character between the fields of a CSV file; with `auto` the header decides."""

Encoding = Literal["utf-8", "latin-1", "cp1252"]
"""The encoding of a CSV or JSONL file. Each of them writes a line break as one byte, so that lines are records."""

TableChecks = Literal["refuse", "warn"]
"""The answer to a likely mistake in a table of records."""

EMBEDDED = "embedded"
"""The value of `data` that stands for the synthetic corpus inside the package."""

ON_NODES = "on-nodes"
"""The value of `data` with which every node trains on the data that its own configuration names.

The server then knows only what the node registers.
"""

IN_MEMORY = "in-memory"
"""The value of `data`, and of `test_data`, that stands for the records which a program gave to `fedpriv.run`."""

OWN_MODEL = "own:"
"""The beginning of a `model` that a program gave to `fedpriv.run`; a digest of the model follows."""

# Characters of a text that the run puts into every record. A record's own label chooses its answer, so without a bound
# answers of very different lengths would let the memory that a holder needs, and whether it replies, tell its labels.
_MOST_CHARACTERS = {"system_prompt": 20_000, "prompt_template": 20_000, "answers": 1_000}

# Each variant lists all uploads before its own, and a coordinator holds the kept ones in memory and in checkpoints.
_MOST_KEPT = 100

BaseFormat = Literal["auto", "float32", "bfloat16", "nf4"]
"""Formats of the frozen weights."""

Track = Literal["none", "mlflow", "tensorboard", "wandb"]
"""Trackers that show a run's figures while it goes on."""


@dataclass(frozen=True, kw_only=True)
class ModelSection(ConfigSection, title="Model and adapter", facts=Fact.RELEASE | Fact.RELOADS):
    """The model that is fine-tuned, and its adapter."""

    model: Annotated[str, Fact.PATH] = "all-MiniLM-L6-v2"
    """a folder with safetensors, a [`.gguf` file](base_models.md#models-in-gguf-files), the bundled encoder, `mpnet`
    (`make mpnet`), `SmolLM2-135M-Instruct` (`make llm`) or a name on the Hugging Face Hub, tried in this order; or
    `own:DIGEST`, [your module](training.md#a-federation)"""
    task: Annotated[Literal["SEQ_CLS", "CAUSAL_LM"], Fact.RECORDS | Fact.TEXTS] = "SEQ_CLS"
    """`SEQ_CLS` also trains a classification head"""
    rank: Annotated[Count, Fact.TEXTS] = 4
    """LoRA's r"""
    alpha: Annotated[Positive, Fact.TEXTS] = 8.0
    """B A is scaled by `alpha` / `rank`"""
    target_modules: Annotated[Names, Fact.TEXTS] = ()
    """linear layers by name; empty: peft's choice for the model type"""
    layers: Annotated[Layers, Fact.TEXTS] = "last-1"
    """`all`, `last-N`, or indices such as `4,5`"""
    factors: Annotated[Literal["weights", "answers", "inputs"], Fact.TEXTS] = "weights"
    """what [frozen factors](aggregation.md#what-each-rule-does) are made of. `answers`: [the
    run's](recipes.md#answers-that-are-classes); `inputs`: [a layer's](recipes.md#instruction)"""
    max_length: Annotated[Count, Fact.TEXTS] = 64
    """the most tokens of a record; longer ones are truncated, prompts before responses"""
    normalize_features: Annotated[bool, Fact.TEXTS] = True
    """scales the head's input to unit length; [heads of several layers](base_models.md#encoders)
    become linear"""
    train: Annotated[Train, Fact.TEXTS] = "all"
    """`all`: A, B and head. `auto`: by N, K and epsilon, the head or [R between frozen
    factors](recipes.md#r-between-frozen-factors)"""


@dataclass(frozen=True, kw_only=True)
class DataSection(ConfigSection, title="Data", facts=Fact.RELOADS):
    """The records of a run: where they are, how they are read, and how they are split among clients."""

    data: Annotated[str, Fact.PATH | Fact.RECORDS] = EMBEDDED
    """`embedded`, synthetic messages to hospitals; `on-nodes`, what each node names (a classifier needs `labels`); a
    CSV, TSV, JSONL or Parquet file; a data set on the Hub (`name:split`); or `in-memory`, what a program gives"""
    test_data: Annotated[str, Fact.PATH | Fact.RECORDS] = ""
    """the server's test set, without a record or person of private `data`. Empty: a random share of `data` if nobody's
    privacy depends on them (embedded, `public_data` or `simulate`); else accuracies stay empty unless
    `evaluation_noise_multiplier` is set"""
    test_fraction: Annotated[float, Field(gt=0, lt=1), Fact.RELEASE | Fact.RECORDS] = 0.2
    """the share held out, or set aside by each holder for private evaluation"""
    evaluation_noise_multiplier: Annotated[Positive | None, Maybe, Fact.RELEASE] = None
    """instead of `test_data`: the standard deviation of the Gaussian noise on each holder's counts of hits and misses,
    [charged](privacy.md#private-evaluation) like any release"""
    separator: Annotated[Separator, Fact.RECORDS | Fact.TEXTS] = "auto"
    """of CSV files; `auto`: by the header"""
    encoding: Annotated[Encoding, Fact.RECORDS | Fact.TEXTS] = "utf-8"
    """of CSV and JSONL files, never guessed; `cp1252` is that of Windows"""
    table_checks: Annotated[TableChecks, Fact.OUTSIDE | Fact.TEXTS] = "refuse"
    """the answer to [likely mistakes](tables.md); with `warn` values are taken as written"""
    text_column: Annotated[str, Fact.RECORDS | Fact.TEXTS] = "text"
    """holds the text"""
    text_pair_column: Annotated[str, Fact.RECORDS | Fact.TEXTS] = ""
    """holds a second text, for tasks on pairs"""
    prompt_column: Annotated[str, Fact.RECORDS | Fact.TEXTS] = ""
    """holds what is asked, of [instruction data](language_models.md); implies `task = "CAUSAL_LM"`"""
    response_column: Annotated[str, Fact.RECORDS | Fact.TEXTS] = ""
    """holds the responses to learn"""
    messages_column: Annotated[str, Fact.RECORDS | Fact.TEXTS] = ""
    """holds lists of chat messages, `{"role": ..., "content": ...}`; implies `task = "CAUSAL_LM"`"""
    system_prompt: Annotated[str, Fact.RELEASE | Fact.TEXTS] = ""
    """stands before each chat without a system turn"""
    prompt_template: Annotated[str, Fact.RELEASE | Fact.TEXTS] = ""
    """stands around each prompt, which replaces its one `{}`"""
    answers: Annotated[Names, Fact.RELEASE | Fact.RECORDS | Fact.TEXTS] = ()
    """the allowed responses, where they are few. `response_column` holds them, or `labels` in the same order; other
    records are omitted"""
    choice_columns: Annotated[Names, Fact.RECORDS | Fact.TEXTS] = ()
    """hold [the choices](language_models.md#choices-of-each-record) of each record: one column with lists, or several
    with a text each; `response_column` says which is right, by its text, its number from 0 or its name in `labels`"""
    max_choices: Annotated[int, Field(ge=1, le=100), Fact.RELEASE | Fact.TEXTS] = 4
    """public: the most choices of a record; on a node every record is evaluated as if it had so many"""
    label_column: Annotated[str, Fact.RECORDS | Fact.TEXTS] = "label"
    """holds the label"""
    client_column: Annotated[str, Fact.RECORDS | Fact.TEXTS] = ""
    """names the holder of each record"""
    unit: Annotated[Literal["record", "person"], Fact.RECORDS | Fact.TEXTS] = "record"
    """whom epsilon protects: a record, or a [person](privacy.md#persons) with all records at one client, implied by
    `person_column`"""
    person_column: Annotated[str, Fact.RECORDS | Fact.TEXTS] = ""
    """says whom a record is about; with `data = on-nodes` each node names its own"""
    max_records_per_person: Annotated[Count, Fact.TEXTS] = 8
    """m, public: the most records of a person that count in a step, at the cost in time and memory of m for each"""
    holders_per_person: Annotated[Count, Fact.TEXTS] = 1
    """h, public: at how many clients [a person](privacy.md#a-person-at-several-holders) may have records"""
    labels: Annotated[Names, Fact.RELEASE | Fact.RECORDS | Fact.TEXTS] = ()
    """the classes; empty: those of the training records. Other records are omitted"""
    partition: Annotated[Literal["auto", "natural", "iid", "dirichlet", "sizes"], Fact.RECORDS | Fact.TEXTS] = "auto"
    """`natural`: by `client_column`. `dirichlet`: by label. `sizes`: by `client_sizes`. `auto`: `natural` with a client
    column or the embedded corpus (five hospitals), else `iid`"""
    num_clients: Annotated[Count, Fact.RECORDS] = 5
    """for `iid`, `dirichlet`; another partition refuses other numbers than its own; on-nodes: the nodes to wait for"""
    client_sizes: Annotated[Sizes, Fact.RECORDS | Fact.TEXTS] = ()
    """for `sizes`: each client's records (or persons), such as `[1200, 1000, 800]`"""
    dirichlet_alpha: Annotated[Positive, Fact.RECORDS | Fact.TEXTS] = 0.5
    """for `dirichlet`; smaller is more uneven"""
    max_records: Annotated[int, Field(ge=0), Fact.RECORDS | Fact.TEXTS] = 0
    """the most training records (or persons) of a simulated client; 0: all"""
    public_data: bool = False
    """your statement that nobody's privacy depends on the data; permits a comparison run without noise"""

    @property
    def splits_off_test_set(self) -> bool:
        """Whether the data are in a table that a test set can be split off."""
        return self.data not in (ON_NODES, IN_MEMORY)

    @property
    def instructs(self) -> bool:
        """Whether records are prompts with responses, which alone are learned."""
        return bool(self.prompt_column or self.messages_column)

    @property
    def most_of_a_person(self) -> int:
        """m, at most how many records of a person count in a step; 0 where the unit is the record."""
        return self.max_records_per_person if self.unit == "person" else 0

    @property
    def data_are_public(self) -> bool:
        """Whether nobody's privacy depends on the data: the embedded corpus is synthetic."""
        return self.public_data or self.data == EMBEDDED

    @property
    def partition_rule(self) -> str:
        """The rule that splits records among clients; `auto` means `natural` if a client column is set, else `iid`."""
        if self.partition != "auto":
            return self.partition
        return "natural" if self.client_column else "iid"

    def _check_max_records(self) -> None:
        if self.max_records and self.data == ON_NODES:
            raise ValueError(
                f"max_records = {self.max_records}: with data = on-nodes every node uses all of its own records; use 0"
            )

    def _check_unit(self) -> None:
        if self.unit == "record" and self.person_column:
            raise ValueError(
                f"unit = record: person_column = {self.person_column} is for unit = person; leave one of the two out"
            )
        if self.unit == "person" and not self.person_column and self.data not in (EMBEDDED, ON_NODES):
            raise ValueError("unit = person: needs person_column, the column that says whom a record is about")

    def _check_partition(self) -> None:
        if self.partition == "natural" and not self.client_column:
            raise ValueError("partition = natural: needs client_column, the column that says who holds a record")
        if self.partition == "sizes" and not self.client_sizes:
            raise ValueError("partition = sizes: needs client_sizes, for instance [1200, 1000, 800]")

    def _check_instructions(self) -> None:
        """Refuse prompts, responses and answers that do not fit each other."""
        if not self.instructs:
            for key in ("response_column", "system_prompt", "prompt_template", "answers", "choice_columns"):
                if value := getattr(self, key):
                    raise ValueError(f"{key} = {value}: goes with prompt_column or messages_column; give one")
            return
        if self.choice_columns and self.answers:
            raise ValueError("answers: are the same for all records, whose choices differ; leave one of the two out")
        if self.messages_column:
            for key in ("prompt_column", "response_column", "prompt_template", "choice_columns"):
                if value := getattr(self, key):
                    raise ValueError(
                        f"{key} = {value}: messages_column holds prompts and responses; leave one of the two out"
                    )
        elif not self.response_column:
            raise ValueError(f"prompt_column = {self.prompt_column}: needs response_column, with what is to be learned")
        if self.prompt_template and self.prompt_template.count("{}") != 1:
            raise ValueError(f"prompt_template = {self.prompt_template!r}: must have {{}} once, where the prompt goes")
        for key, most in _MOST_CHARACTERS.items():
            value = getattr(self, key)
            longest = max(map(len, (value,) if isinstance(value, str) else value), default=0)
            if longest > most:
                raise ValueError(f"{key}: {longest} characters in one text; must be at most {most}")

    def _check_answers(self) -> None:
        if not self.instructs:
            return
        labels, answers = self.labels, self.answers
        if self.choice_columns:
            return
        if labels and not answers:
            raise ValueError(f"labels = {','.join(labels)}: a model that answers needs answers, one for each label")
        if labels and len(labels) != len(answers):
            raise ValueError(f"labels = {','.join(labels)}: must be as many as answers = {','.join(answers)}")
        texts = {answer.strip() for answer in answers}
        if answers and (len(answers) < 2 or len(texts) < len(answers) or "" in texts):
            raise ValueError(f"answers = {','.join(answers)}: must be two or more texts, each once")


@dataclass(frozen=True, kw_only=True)
class VariantsSection(ConfigSection, title="Variants and deduplication"):
    """The variants that a run keeps, and how the server stores them."""

    variant_rounds: Sizes = ()
    """rounds whose global models are kept as variants, in addition to the final one, such as `[5, 10]`"""
    variant_clients: Annotated[bool | None, Maybe] = None
    """keeps each client's last upload as a variant; empty: with at most 100 clients"""
    dedup: Annotated[Literal["", "drd", "dred", "greedy", "mcts", "dedup", "mistique", "lossless"], Fact.TEXTS] = ""
    """how the server [stores variants](deduplication.md) after the last round; empty: left to `fedpriv dedup run`"""
    dedup_block_size: Annotated[Count, Fact.TEXTS] = 256
    """values in a block"""
    dedup_records: Annotated[int, Field(ge=0), Fact.TEXTS] = 0
    """test records for validation, drawn with the seed; 0: all"""
    dedup_epsilon_bound: Annotated[NonNegative, Fact.TEXTS] = 0.5
    """the most by which a variant's epsilon may rise"""
    dedup_utility_bound: Annotated[float, Field(ge=0, le=1), Fact.TEXTS] = 0.01
    """the most by which a variant's accuracy may fall, or responses' mean log perplexity rise,
    [proven](deduplication.md#what-is-proven) with 95 % confidence"""
    integral_epsilon: Annotated[NonNegative | None, Maybe, Fact.TEXTS] = None
    """keeps as [a variant](integral.md) the mean of uploads of the last round within this distance in every weight.
    This is not differential privacy"""

    def keeps_uploads_of(self, num_clients: int) -> bool:
        """Whether the last upload of each of so many clients is kept as a variant."""
        return num_clients <= _MOST_KEPT if self.variant_clients is None else self.variant_clients

    @property
    def validates_variants(self) -> bool:
        """Whether what is stored of the variants is validated on the server's test set."""
        return self.dedup not in ("", "lossless")


@dataclass(frozen=True, kw_only=True)
class AuditSection(ConfigSection, title="Variants and deduplication"):
    """The questions that a language model is asked before and after, and canaries that test the run's epsilon."""

    generated_answers: Annotated[int, Field(ge=0), Fact.TEXTS] = 50
    """test prompts that a language model answers before and after training"""
    max_new_tokens: Annotated[Count, Fact.TEXTS] = 96
    """the most tokens of an answer"""
    audit: Annotated[Literal["", "tokens", "mislabelled"], Fact.RELOADS | Fact.TEXTS] = ""
    """inserts [canaries](audit.md) into every client's data: random tokens, or records mislabelled; in simulations
    only"""
    audit_canaries: Annotated[int, Field(ge=2), Fact.RELOADS | Fact.TEXTS] = 50
    """canaries of each client; `fedpriv audit power` says how much they can find"""
    audit_repeats: Annotated[Count, Fact.RELOADS | Fact.TEXTS] = 1
    """records of an included canary: one person's where persons are the unit, else the bound is divided"""


@dataclass(frozen=True, kw_only=True)
class ExperimentSection(ConfigSection, title="Execution"):
    """How a run is repeated, and what it is compared with."""

    seed: Annotated[int, Field(ge=0), Fact.RELEASE | Fact.RECORDS | Fact.RELOADS] = 0
    """of the initial adapter, the selection of clients and, without `data_seed`, the data; with `simulate`, of
    everything"""
    data_seed: Annotated[Annotated[int, Field(ge=0)] | None, Maybe, Fact.RECORDS | Fact.RELOADS] = None
    """of the partition and the test split alone, so that runs of several seeds share their data; empty: `seed`"""
    simulate: Annotated[bool, Fact.RELOADS] = False
    """noise and sampling use the seed: the run can be reproduced to the bit, and is marked *not private*"""
    comparison: Annotated[bool | None, Maybe] = None
    """a second run with z = 0 and the same clipping; empty: with a test set, if data are synthetic or public or
    `simulate` is set"""
    baselines: Annotated[bool | None, Maybe, Fact.RELOADS | Fact.TEXTS] = None
    """plain classifiers [to compare with](configuration.md#what-an-accuracy-is-compared-with); empty: for classifiers
    tested on public data"""

    @property
    def seed_of_data(self) -> int:
        """The seed of the partition and the test split."""
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def noise_source(self) -> str:
        """`seeded` in a run marked `simulate`, otherwise `secure`."""
        return "seeded" if self.simulate else "secure"


@dataclass(frozen=True, kw_only=True)
class MachineSection(ConfigSection, title="Execution", facts=Fact.RELOADS):
    """The machine's part in a run: formats, memory, devices, processes and folders."""

    base_dtype: Annotated[BaseFormat, Fact.TEXTS] = "auto"
    """of the frozen base: [`nf4`](base_models.md#the-frozen-base-in-4-bits) needs the extra `quantized`; `auto` is
    bfloat16 on a GPU, and on a CPU where that is faster. Each node decides its own `auto`"""
    prefix_cache: Annotated[bool, Fact.TEXTS] = True
    """caches records' states below the first trainable layer, beyond `memory_limit_mb` in a nameless temporary file"""
    activation_checkpointing: Annotated[bool, Fact.TEXTS] = False
    """recomputes trained layers in the backward pass: less memory for long records, up to half more time"""
    memory_limit_mb: Count = 1024
    """MiB for passes, and again for the prefix cache"""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$"), Fact.TEXTS] = "auto"
    """`cpu`, `cuda` or `cuda:1`; `auto`: a GPU if there is one. On a node `vault.toml` decides"""
    engine: Literal["stacked", "in-process", "ray", "flower"] = "stacked"
    """`stacked`: clients share passes of the frozen base. `in-process`: one client at a time. `ray`: an actor per core
    or GPU. `flower`: set by `flwr run`. Results differ by rounding alone"""
    ray_address: Annotated[str, Fact.HIDDEN | Fact.TEXTS] = ""
    """a [Ray cluster](ray_cluster.md), such as `auto` or `head:6379`; empty: `RAY_ADDRESS`, or a new one here"""
    ray_workers: Annotated[int, Field(ge=0), Fact.TEXTS] = 0
    """the most actors; 0: one per GPU, or per core without a GPU"""
    track: Annotated[Track, Fact.OUTSIDE] = "none"
    """a [tracker](trackers.md) for the figures, with the extra of its name"""
    ledger: Annotated[str, Fact.LOCATION | Fact.BY_SWEEP] = ""
    """an SQLite file in which spending accumulates over runs, [by holder](ledger.md#whose-account-it-is); simulated
    nodes keep theirs in `<ledger>.nodes/`. Empty: a new one in the run's folder, with nothing spent before"""
    out: Annotated[str, Fact.LOCATION | Fact.BY_SWEEP | Fact.ARGUMENT] = ""
    """a new or empty folder for the results"""
    resume: Annotated[str, Fact.LOCATION | Fact.ARGUMENT] = ""
    """an interrupted run's folder or one of its checkpoints; `fedpriv run --resume DIR` reads all other keys from
    there"""
