"""The model card of a variant, in the Hub's format: what it is, what it cost the data holders, what it is for.

Whatever it says is known from the run's configuration, its summary and the variant's own files: public settings and
releases that were paid for. It names no data holder, path or size of anybody's data. A name that others wrote, such as
a label, becomes Markdown that says it and does nothing else.
"""

import math
import re
import shlex
import string
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from huggingface_hub import EvalResult, ModelCardData

from fedpriv.config import ON_NODES
from fedpriv.errors import InputError
from fedpriv.files import replace_file
from fedpriv.learning.data.records import TextReading
from fedpriv.models.publishing.saved import GLOBAL, SavedVariant, all_in
from fedpriv.privacy.accounting.views import readers_label
from fedpriv.privacy.ledger.statement import adjacency_of, not_covered
from fedpriv.runs import RunFolder
from fedpriv.runs.figures import figures, format_delta, risk_figures, risk_sentences
from fedpriv.texts import printable

FILE = "README.md"

_AGAINST = {"local": "the coordinator, which saw every upload", "rho": "at the noise of DP-LoRA's Theorem 1"}

_PIPELINES = {"SEQ_CLS": "text-classification", "CAUSAL_LM": "text-generation"}
_ADAPTERS = ("adapter", "gguf-adapter")
_CLIENT = "client-"
_FLOAT32 = "The base of this export is in float32"


GgufForm = Literal["gguf", "gguf-adapter", "gguf-model"]
"""The content of a folder for llama.cpp and Ollama: a LoRA and a whole model, or one of them."""

Form = Literal["adapter", "sentence-transformers", "transformers", GgufForm]
"""The content of a folder: a peft adapter, or a whole model for one of two libraries, or files for llama.cpp."""

_TEXTS: Mapping[str, str] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

Precision = Literal["float16", "bfloat16", "float32"]
"""The format of a GGUF file's matrices."""

# The ranks that vLLM takes.
_RANKS_OF_VLLM = (8, 16, 32, 64, 128, 256, 320, 512)

_MOST = 200

# Letters, digits and what joins them in names: means nothing in Markdown where it begins with a letter.
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9 ,/.-]*")


def write(run: Path) -> list[Path]:
    """Write the card of every variant of a finished run beside it; returns the files."""
    return [write_one(saved) for saved in all_in(run)]


def write_one(saved: SavedVariant, *, license: str = "") -> Path:
    """Write a variant's card, in place of an older one; returns the file."""
    if saved.folder is None:
        raise InputError(f"variant = {saved.name!r}: only a store has it, so there is no folder for its card; print it")
    path = saved.folder / FILE
    replace_file(path, text(saved, license=license).encode())
    return path


def text(saved: SavedVariant, *, form: Form = "adapter", license: str = "") -> str:
    """The card of a variant.

    Args:
        form: what the card's folder holds: the adapter, or a whole model that was made of it.
        license: of the Hub's identifiers; empty states none.

    Raises:
        InputError: the variant's run is not here, or is not finished.
    """
    if saved.run is None or not saved.run.is_finished:
        raise InputError(
            f"variant = {saved.name!r}: a card says what the run cost, so it needs the folder of a finished run"
        )
    return "\n".join([*_metadata(saved, saved.run.summary, form, license), *_body(saved, saved.run, form), ""])


def why_not_private(saved: SavedVariant, summary: Mapping[str, Any]) -> str:
    """Why a run protects nobody; empty if it protects its data holders."""
    epsilon = summary.get("epsilon_local_max")
    if saved.config is None or saved.config.simulate or summary.get("noise_source") != "secure":
        return "its noise came from a seeded generator, so anyone who knows the seed can remove it"
    if caveat := summary.get("caveat"):
        return str(caveat)
    if not isinstance(epsilon, (int, float)) or not math.isfinite(epsilon) or summary.get("private") is not True:
        return "it had no noise, or too little"
    return ""


def _is_as_measured(saved: SavedVariant) -> bool:
    """Whether the variant is the model that the run measured, and no value of it was replaced since."""
    return saved.sources == [GLOBAL]


def _metadata(saved: SavedVariant, summary: Mapping[str, Any], form: Form, license: str) -> list[str]:
    base = saved.base
    private = not why_not_private(saved, summary)
    accuracy = summary.get("accuracy") if _is_as_measured(saved) and saved.task == "SEQ_CLS" else None
    measured = EvalResult(
        task_type=_PIPELINES[saved.task],
        dataset_type="coordinator",
        dataset_name="test records of the coordinator",
        metric_type="accuracy",
        metric_value=accuracy,
    )
    tags = ["fedpriv", "federated-learning", "lora", *(["differential-privacy"] if private else ["not-private"])]
    data = ModelCardData(
        # A name without an owner is that of a folder, not of a model on the Hub.
        base_model=base if base.count("/") == 1 else None,
        library_name="peft" if form == "adapter" else "gguf" if form in get_args(GgufForm) else form,
        # Other forms and poolings are none that a pipeline knows: it would put a random or another head in their place.
        pipeline_tag=_PIPELINES[saved.task] if form == "transformers" or saved.pooling == "model" else None,
        license=license or None,
        tags=tags,
        model_name=saved.name,
        eval_results=None if accuracy is None else [measured],
    )
    return ["---", data.to_yaml().strip(), "---", ""]


def _body(saved: SavedVariant, run: RunFolder, form: Form) -> list[str]:
    summary = run.summary
    reason = why_not_private(saved, summary)
    warning = [f"> **NOT PRIVATE**: {markdown(reason)}.", "> Treat it as you treat the records.", ""] if reason else []
    kind = "A LoRA adapter of" if form in _ADAPTERS else "A whole model, made of a LoRA adapter and"
    base = markdown(saved.base)
    whose = (
        "What one data holder uploaded" if saved.name.startswith(_CLIENT) else "Trained by a federation of data holders"
    )
    return [
        *warning,
        f"# {markdown(saved.name)}",
        "",
        f"{kind} {base}. {whose}, with fedpriv.",
        "",
        *([_TEXTS["deduplicated"], ""] if len(saved.sources) > 1 else []),
        *([_TEXTS["unproven"].replace("MARKED", marked), ""] if (marked := saved.kept.unproven(saved.name)) else []),
        *_section("Use", lines_of_use(saved, form)),
        *_section("Privacy", _privacy(saved, summary, reason)),
        *_section("Data", [_data(saved, summary)]),
        *_section("Model", _model(saved, form)),
        *_section("Measured", _measured(saved, run)),
        *_section("Intended use and limits", _limits(saved)),
    ]


def _section(title: str, lines: Iterable[str]) -> list[str]:
    found = list(lines)
    return [f"## {title}", "", *found, *([""] if found[-1:] != [""] else [])]


def _privacy(saved: SavedVariant, summary: Mapping[str, Any], reason: str) -> list[str]:
    unit = str(summary.get("unit") or "record")
    uploads = any(name.startswith(_CLIENT) for name in saved.sources)  # values of one data holder's upload may be in it
    views = ["local"] if uploads else ["local", "rho", "aggregate"]
    epsilons = {view: _epsilon(summary.get(f"epsilon_{view}_max")) for view in views}
    against = _AGAINST | {"aggregate": f"{readers_label(summary.get('num_readers', 0))}, who saw sums of uploads alone"}
    rows = [
        f"| {view} | {epsilon} | {format_delta(summary.get('delta_max'))} | {against[view]} |"
        for view, epsilon in epsilons.items()
    ]
    ledger = markdown(str(summary.get("ledger_head") or "none"))
    facts = {
        "protected unit": unit,
        "adjacency": adjacency_of(unit, int(summary.get("holders_per_person") or 1)),
        "accountant": str(summary.get("accountant")),
        "mechanism": str(summary.get("mechanism") or "gaussian"),
        "noise source": str(summary.get("noise_source")),
        "budget counts": f"the {summary.get('privacy_view')} view",
    }
    return [
        _TEXTS["accounted"] if reason else _TEXTS["holds"],
        "",
        "| view | epsilon | delta | against |",
        "| --- | --- | --- | --- |",
        *rows,
        "",
        *(_risk(summary, reason) if summary.get("privacy_view") in views else []),
        *(f"- {name}: {markdown(value)}" for name, value in facts.items()),
        f"- ledger head: {ledger}. Anyone with the ledger can check it: `fedpriv ledger verify PATH --head HEAD`.",
        "",
        "Not covered:",
        "",
        *(f"- {line}" for line in not_covered(unit, int(summary.get("holders_per_person") or 1))),
    ]


def _risk(summary: Mapping[str, Any], reason: str) -> list[str]:
    """The risk on the view that the budget counts, in words and figures; nothing where the run does not say."""
    if reason or not (figures_told := risk_figures(summary)):
        return []
    view = summary.get("privacy_view")
    return [" ".join(risk_sentences(summary)), "", f"Found at most, on the {view} view: {figures_told}.", ""]


def _data(saved: SavedVariant, summary: Mapping[str, Any]) -> str:
    holders, config = summary.get("num_clients"), saved.config
    if config is None or config.data == ON_NODES:
        return f"Records of {holders} data holders, which never left them. This card names neither holders nor records."
    where = "Records that the operator calls public" if config.public_data else "Records of one table"
    if config.data_are_public and not config.public_data:
        where = "Synthetic records that come with fedpriv"
    return f"{where}, divided among {holders} simulated data holders on the operator's machine."


def _model(saved: SavedVariant, form: Form) -> list[str]:
    weights = saved.convention["base_weights"]
    config = saved.config
    numbers = "model.gguf says in what format its numbers are" if form in get_args(GgufForm) else _FLOAT32
    if config is not None and config.base_dtype in ("bfloat16", "nf4"):
        numbers += (
            f"; it was trained with the base in {config.base_dtype}, so answers differ a little from the run's own"
        )
    found = [
        f"- base: {markdown(saved.base)}",
        *(f"- SHA-256 of its {markdown(name)}: {markdown(digest)}" for name, digest in sorted(weights.items())),
        f"- reads {saved.reading.max_length} tokens at most",
    ]
    if saved.labels:
        found += [
            f"- pooling: {saved.pooling}",
            "- labels, in order:",
            *(f"  - {markdown(name)}" for name in saved.labels),
        ]
    return [*found, *([f"- {numbers}."] if form not in _ADAPTERS else [])]


def _measured(saved: SavedVariant, run: RunFolder) -> list[str]:
    if not _is_as_measured(saved):
        return ["The run measured its final model, not this variant."]
    rows = [f"- {figure.label}: {figure.text}" for figure in figures(run, "card")]
    return (
        [*rows, "", "On the coordinator's test records."] if rows else ["Nothing: the coordinator has no test records."]
    )


def _limits(saved: SavedVariant) -> list[str]:
    kind = "texts of the kind that its data holders have, in the labels above"
    kind = kind if saved.labels else "prompts of the kind that its data holders have"
    return [_TEXTS["limits"].replace("TASK", kind), "", _TEXTS["guarantee"]]


def _epsilon(value: Any) -> str:
    """To three decimals, rounded up: a card must not understate."""
    if value is None:
        return "does not hold"
    number = float(value)
    return f"{math.ceil(number * 1000) / 1000:.12g}" if math.isfinite(number) else "infinite"


def lines_of_use(saved: SavedVariant, form: Form) -> list[str]:
    """The section on use of a card, in Markdown."""
    if form == "adapter":
        return _of_adapter(saved)
    if form in get_args(GgufForm):
        return _of_gguf(saved, form)
    if form == "sentence-transformers":
        return [
            *_code(_TEXTS["sentences"]),
            "Scores are probabilities, in the order of labels.",
            "",
            _TEXTS["no_pipeline"],
        ]
    if saved.task == "SEQ_CLS":
        arguments = '"first text", "second text"' if saved.reading.pairs else '"your text"'
        code = _code(_TEXTS["classes"].replace("ARGUMENTS", arguments).replace("LENGTH", str(saved.reading.max_length)))
        return [*code, *([] if saved.reading.pairs else [_TEXTS["pipeline"]])]
    return _code(_TEXTS["answers"].replace("INPUTS", _inputs(saved.reading)))


def _of_adapter(saved: SavedVariant) -> list[str]:
    found = [
        "Where fedpriv is installed, in this folder:",
        "",
        *_code(_TEXTS["fedpriv"], "sh"),
        "`fedpriv export . OUT` writes a model that loads without fedpriv and answers alike.",
        "",
    ]
    if saved.task != "SEQ_CLS":
        return [
            *found,
            "With peft alone, which has neither the prompts' form nor the end of an answer:",
            "",
            *_code(_TEXTS["peft_answers"]),
            *_for_vllm(saved),
        ]
    if saved.pooling == "model":
        return [*found, "With peft alone:", "", *_code(_TEXTS["peft_classes"])]
    unit, _, kind = f"-{saved.pooling}".rpartition("-")
    kind += " pooling" + " and vectors of a fixed length" * bool(unit)
    return [
        *found,
        _TEXTS["plain_peft"].replace("KIND", kind),
        "",
        *_code(_TEXTS["peft_classes"]),
        _TEXTS["other_head"],
    ]


def _for_vllm(saved: SavedVariant) -> list[str]:
    ranks = [rank for rank in _RANKS_OF_VLLM if rank >= int(saved.settings.get("r") or _RANKS_OF_VLLM[-1] + 1)]
    if not ranks:
        return ["vLLM takes no adapter of this kind or rank; serve what `fedpriv export . OUT` writes."]
    code = _TEXTS["vllm"].replace("BASE", shlex.quote(_one_line(saved.base))).replace("RANK", str(ranks[0]))
    code = code.replace("NAME", shlex.quote(saved.name))
    return ["With vLLM, as one of the adapters of its base:", "", *_code(code, "sh")]


def _of_gguf(saved: SavedVariant, form: str) -> list[str]:
    reading = saved.reading
    code = _TEXTS["llama_chat"].replace("MESSAGES", _messages(reading)) if reading.instructs else _TEXTS["llama_text"]
    code = code.replace("LENGTH", str(reading.max_new_tokens))
    found = []
    if form != "gguf-adapter":
        found += ["`model.gguf` is the whole model. With llama-cpp-python:", ""]
        found += [*_code(code.replace("FILES", '"model.gguf"')), "With llama.cpp:", ""]
        found += _code(_asked(reading, "-m model.gguf"), "sh")
    if form != "gguf-model":
        base = f"{markdown(saved.base)} as a GGUF file, here `base.gguf`"
        found += [f"`adapter.gguf` is the LoRA for {base}. With llama-cpp-python:", ""]
        found += _code(code.replace("FILES", '"base.gguf", lora_path="adapter.gguf"'))
        found += ["With llama.cpp:", "", *_code(_asked(reading, "-m base.gguf --lora adapter.gguf"), "sh")]
    return [*found, "With Ollama:", "", *_code(_TEXTS["ollama"], "sh")]


def _asked(reading: TextReading, files: str) -> str:
    """The command of llama.cpp that asks a question as in training."""
    options = f"{files} --temp 0 -n {reading.max_new_tokens}"
    if not reading.instructs:
        return f"llama-completion {options} -no-cnv -p 'your question'"
    before, after = reading.chat.around
    system = f" -sys {shlex.quote(reading.system_prompt.strip())}" if reading.system_prompt else ""
    return f"llama-cli {options} -st{system} -p {shlex.quote(before + 'your question' + after)}"


def _inputs(reading: TextReading) -> str:
    """Lines that make tokens of `prompt` as in training."""
    if not reading.instructs:
        return 'inputs = tokenizer(prompt, return_tensors="pt")'
    return (
        f"messages = {_messages(reading)}\n"
        "inputs = tokenizer.apply_chat_template(\n"
        '    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"\n'
        ")"
    )


def _messages(reading: TextReading) -> str:
    """The turns that put `prompt` as in training, in Python."""
    before, after = reading.chat.around
    content = f"{before!r} + prompt.strip() + {after!r}" if reading.prompt_template else "prompt.strip()"
    system = f'{{"role": "system", "content": {reading.system_prompt.strip()!r}}}, ' if reading.system_prompt else ""
    return f'[{system}{{"role": "user", "content": {content}}}]'


def _code(text: str, language: str = "python") -> list[str]:
    """A block of code; a text of the operator's in it stays within its quotes and the block."""
    fence = "`" * (1 + max(2, *map(len, re.findall("`+", text)), 0))
    return [f"{fence}{language}", *text.strip().splitlines(), fence, ""]


def _one_line(text: str) -> str:
    """The text on one line, without characters that steer a reader's screen, cut to 200 characters."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= _MOST else line[: _MOST - 1] + "…"


def markdown(text: str) -> str:
    """The text on one line, as no markup, link, HTML, table cell or heading: unless it is plain, all is escaped."""
    line = _one_line(text)
    if _PLAIN.fullmatch(line) and "www." not in line.lower():
        return line
    return "".join(f"\\{char}" if char in string.punctuation else char for char in line)
