"""The sections of a configuration on the model, and on the records and who holds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from fedpriv.config._section import ConfigSection, Count, Fact, Layers, Maybe, Names, Positive, Sizes

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


@dataclass(frozen=True, kw_only=True)
class ModelSection(ConfigSection, title="Model and adapter", facts=Fact.RELEASE | Fact.RELOADS):
    """The model that is fine-tuned, and its adapter."""

    model: Annotated[str, Fact.PATH] = "all-MiniLM-L6-v2"
    """a local folder with weights in safetensors, a [`.gguf` file](base_models.md#models-in-gguf-files), the bundled
    encoder, `SmolLM2-135M-Instruct` (from `make llm`), or a name on the Hugging Face Hub, tried in this order.
    `own:DIGEST` is [a module of your own](training.md#a-federation)"""
    task: Annotated[Literal["SEQ_CLS", "CAUSAL_LM"], Fact.RECORDS | Fact.TEXTS] = "SEQ_CLS"
    """what the model does; `SEQ_CLS` also trains a classification head"""
    rank: Annotated[Count, Fact.TEXTS] = 4
    """LoRA's r"""
    alpha: Annotated[Positive, Fact.TEXTS] = 8.0
    """the product B A is scaled by `alpha` / `rank`"""
    target_modules: Annotated[Names, Fact.TEXTS] = ()
    """names of linear layers; by default peft's choice for the model type"""
    layers: Annotated[Layers, Fact.TEXTS] = "last-1"
    """`all`, `last-N`, or indices such as `4,5`"""
    factors: Annotated[Literal["weights", "answers", "inputs"], Fact.TEXTS | Fact.LATER] = "weights"
    """what [frozen factors](aggregation.md#what-each-rule-does) are made of. `weights`: R lies between singular vectors
    of a weight, and an A before a B is random. `answers`: R [chooses between
    `answers`](recipes.md#answers-that-are-classes). `inputs`: an A before a B follows [a layer's
    inputs](recipes.md#instruction)"""
    max_length: Annotated[Count, Fact.TEXTS] = 64
    """the most tokens of a record; longer records are truncated, prompts [before their
    responses](language_models.md#what-the-model-sees-and-what-of-it-is-learned)"""
    normalize_features: Annotated[bool, Fact.TEXTS] = True
    """scales what the head reads to unit length, so that no record counts for more than another. Heads of several
    layers become [one linear layer](base_models.md#encoders-are-mean-pooled)"""
    train: Annotated[Train, Fact.TEXTS] = "all"
    """`all`: A, B and head. `head`: the head alone. `auto`: decides by N, K and epsilon between the head alone and LoRA
    as R between frozen factors of all layers, and says why"""


@dataclass(frozen=True, kw_only=True)
class DataSection(ConfigSection, title="Data", facts=Fact.RELOADS):
    """The records of a run: where they are, how they are read, and how they are split among clients."""

    data: Annotated[str, Fact.PATH | Fact.RECORDS] = EMBEDDED
    """`embedded`, the synthetic hospital corpus; `on-nodes`, the data that each node's own configuration names (a
    classifier needs `labels`); a CSV, TSV, JSONL or Parquet file; a data set on the Hub (`name:split`); or `in-memory`,
    the records that a program gives"""
    test_data: Annotated[str, Fact.PATH | Fact.RECORDS] = ""
    """the server's own test set. Without it, a random share of `data` is held out if nobody's privacy depends on them
    (embedded, `public_data` or `simulate`); otherwise accuracies stay empty unless `evaluation_noise_multiplier` is
    set"""
    test_fraction: Annotated[float, Field(gt=0, lt=1), Fact.RELEASE | Fact.RECORDS] = 0.2
    """the share that is held out, or that each holder sets aside for private evaluation"""
    evaluation_noise_multiplier: Annotated[Positive | None, Maybe, Fact.RELEASE] = None
    """instead of `test_data`: each holder counts hits and misses of the final model on records that it never trains on,
    and releases both with Gaussian noise of this standard deviation, [charged like any
    release](privacy.md#private-evaluation)"""
    separator: Annotated[Separator, Fact.RECORDS | Fact.LATER | Fact.TEXTS] = "auto"
    """of CSV files; with `auto` the header decides, and a TSV file has tabs"""
    encoding: Annotated[Encoding, Fact.RECORDS | Fact.LATER | Fact.TEXTS] = "utf-8"
    """of CSV and JSONL files, never guessed; `cp1252` is that of Windows, and UTF-8 may have a byte order mark"""
    table_checks: Annotated[TableChecks, Fact.OUTSIDE | Fact.TEXTS] = "refuse"
    """`refuse` a table with [likely mistakes](tables.md#what-is-likely-a-mistake), or `warn` and take every value as it
    is written"""
    text_column: Annotated[str, Fact.RECORDS | Fact.TEXTS] = "text"
    """the column with the text"""
    text_pair_column: Annotated[str, Fact.RECORDS | Fact.TEXTS] = ""
    """the column with a second text, for tasks on pairs"""
    prompt_column: Annotated[str, Fact.RECORDS | Fact.TEXTS] = ""
    """the column with what is asked, of [instruction data](language_models.md); implies `task = "CAUSAL_LM"`"""
    response_column: Annotated[str, Fact.RECORDS | Fact.TEXTS] = ""
    """the column with the responses to `prompt_column`, which are learned"""
    messages_column: Annotated[str, Fact.RECORDS | Fact.TEXTS] = ""
    """a column with lists of chat messages, `{"role": ..., "content": ...}`; implies `task = "CAUSAL_LM"`"""
    system_prompt: Annotated[str, Fact.RELEASE | Fact.TEXTS] = ""
    """a text before each chat that has no system turn"""
    prompt_template: Annotated[str, Fact.RELEASE | Fact.TEXTS] = ""
    """a text around each prompt, with one `{}` where it goes"""
    answers: Annotated[Names, Fact.RELEASE | Fact.RECORDS | Fact.TEXTS] = ()
    """the allowed responses, if prompts ask for one of a few. `response_column` holds `labels` in the same order, or
    the answers themselves; records with others are omitted"""
    label_column: Annotated[str, Fact.RECORDS | Fact.TEXTS] = "label"
    """the column with the label"""
    client_column: Annotated[str, Fact.RECORDS | Fact.TEXTS] = ""
    """the column that names the holder of each record"""
    unit: Annotated[Literal["record", "person"], Fact.RECORDS | Fact.LATER | Fact.TEXTS] = "record"
    """whom an epsilon protects: one record, or one [person](privacy.md#persons) with all records at one client, which
    `person_column` implies. N_k, B and q then count persons"""
    person_column: Annotated[str, Fact.RECORDS | Fact.LATER | Fact.TEXTS] = ""
    """the column that says whom a record is about. With `data = on-nodes` each node names its own"""
    max_records_per_person: Annotated[Count, Fact.LATER | Fact.TEXTS] = 8
    """m, with `unit = person`: the most records of a drawn person that count, chosen again in each step. It is public;
    time and memory are those of m records for each person"""
    holders_per_person: Annotated[Count, Fact.LATER | Fact.TEXTS] = 1
    """h, with `unit = person`: at how many clients a person may have records. It is public; the epsilon is that of a
    person at the [h costliest clients](privacy.md#a-person-at-several-holders)"""
    labels: Annotated[Names, Fact.RELEASE | Fact.RECORDS | Fact.TEXTS] = ()
    """the classes, by default those of the training records; records with other labels are omitted"""
    partition: Annotated[Literal["auto", "natural", "iid", "dirichlet", "sizes"], Fact.RECORDS | Fact.TEXTS] = "auto"
    """how records are split among clients: `natural` by `client_column`, `dirichlet` by label, `sizes` by
    `client_sizes`. `auto` is `natural` with a client column, else `iid`; the embedded corpus has five hospitals"""
    num_clients: Annotated[Count, Fact.RECORDS] = 5
    """the number of clients, for `iid` and `dirichlet`; with `data = on-nodes`, of nodes that the run waits for"""
    client_sizes: Annotated[Sizes, Fact.RECORDS | Fact.TEXTS] = ()
    """for `partition = sizes`: the records (or persons) of each client, such as `[1200, 1000, 800]`"""
    dirichlet_alpha: Annotated[Positive, Fact.RECORDS | Fact.TEXTS] = 0.5
    """the concentration of `partition = dirichlet`; smaller is more uneven"""
    max_records: Annotated[int, Field(ge=0), Fact.RECORDS | Fact.TEXTS] = 0
    """the most training records (or persons) of each simulated client, drawn with the seed; 0 takes all"""
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
            for key in ("response_column", "system_prompt", "prompt_template", "answers"):
                if value := getattr(self, key):
                    raise ValueError(f"{key} = {value}: goes with prompt_column or messages_column; give one")
            return
        if self.messages_column:
            for key in ("prompt_column", "response_column", "prompt_template"):
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
        if labels and not answers:
            raise ValueError(f"labels = {','.join(labels)}: a model that answers needs answers, one for each label")
        if labels and (len(labels) != len(answers) or len(set(labels)) < len(labels)):
            raise ValueError(
                f"labels = {','.join(labels)}: must be as many as answers = {','.join(answers)}, and each once"
            )
        texts = {answer.strip() for answer in answers}
        if answers and (len(answers) < 2 or len(texts) < len(answers) or "" in texts):
            raise ValueError(f"answers = {','.join(answers)}: must be two or more texts, each once")
