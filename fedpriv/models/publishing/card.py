"""The model card of a variant, in the Hub's format: what it is, what it cost the data holders, what it is for.

Whatever it says is known from the run's configuration, its summary and the variant's own files: public settings and
releases that were paid for. It names no data holder, path or size of anybody's data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from huggingface_hub import EvalResult, ModelCardData

from fedpriv.config import ON_NODES
from fedpriv.errors import InputError
from fedpriv.files import replace_file
from fedpriv.models.publishing import _card_texts
from fedpriv.models.publishing._card_texts import Form, GgufForm, markdown
from fedpriv.models.publishing.saved import GLOBAL, SavedVariant, all_in
from fedpriv.privacy.accounting.views import readers_label
from fedpriv.privacy.ledger.statement import adjacency_of, not_covered
from fedpriv.runs import RunFolder
from fedpriv.runs.figures import figures, format_delta, risk_figures, risk_sentences

FILE = "README.md"

_AGAINST = {
    "local": "the coordinator, which saw every upload",
    "rho": "as by DP-LoRA's Theorem 1",
}
_PIPELINES = {"SEQ_CLS": "text-classification", "CAUSAL_LM": "text-generation"}
_ADAPTERS = ("adapter", "gguf-adapter")
_CLIENT = "client-"
_FLOAT32 = "The base of this export is in float32"
_DEDUPLICATED = (
    "It was deduplicated: some of its values may be those of other variants of the run, which stand in for its own."
)


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


def _shows_uploads(saved: SavedVariant) -> bool:
    """Whether some of the variant's values may be those of one data holder's upload."""
    return any(name.startswith(_CLIENT) for name in saved.sources)


def _is_as_measured(saved: SavedVariant) -> bool:
    """Whether the variant is the model that the run measured, and no value of it was replaced since."""
    return saved.sources == [GLOBAL]


def _metadata(saved: SavedVariant, summary: Mapping[str, Any], form: Form, license: str) -> list[str]:
    base = saved.base
    private = not why_not_private(saved, summary)
    accuracy = summary.get("accuracy") if _is_as_measured(saved) and saved.task == "SEQ_CLS" else None
    measured = []
    if accuracy is not None:
        kind = _PIPELINES[saved.task]
        measured = [
            EvalResult(
                task_type=kind,
                dataset_type="coordinator",
                dataset_name="test records of the coordinator",
                metric_type="accuracy",
                metric_value=accuracy,
            )
        ]
    tags = ["fedpriv", "federated-learning", "lora", *(["differential-privacy"] if private else ["not-private"])]
    data = ModelCardData(
        # A name without an owner is that of a folder, not of a model on the Hub.
        base_model=base if base.count("/") == 1 else None,
        library_name="peft" if form == "adapter" else "gguf" if form in get_args(GgufForm) else form,
        pipeline_tag=_PIPELINES[saved.task],
        license=license or None,
        tags=tags,
        model_name=saved.name,
        eval_results=measured or None,
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
        *([_DEDUPLICATED, ""] if len(saved.sources) > 1 else []),
        *_section("Use", _card_texts.lines(saved, form)),
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
    head = (
        "What was accounted for, which guarantees nothing here:"
        if reason
        else (
            "At most this holds for every data holder. It counts all that the run released, and what earlier runs "
            "released on the same data, so it covers this variant and every other of the run, however many are read:"
        )
    )
    views = ["local"] if _shows_uploads(saved) else ["local", "rho", "aggregate"]
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
        head,
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
    where = (
        "Synthetic records that come with fedpriv"
        if config.data_are_public and not config.public_data
        else ("Records that the operator calls public" if config.public_data else "Records of one table")
    )
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
    task = (
        "texts of the kind that its data holders have, in the labels above"
        if saved.labels
        else "prompts of the kind that its data holders have"
    )
    return [
        f"For {task}, where a person looks at what it says. It is not a device for decisions about persons, and "
        "nothing is known of groups that its data holders have few records of. Noise costs accuracy, most for rare "
        "labels.",
        "",
        "Differential privacy bounds what the weights tell of any one record. It does not make answers true, and it "
        "does not hide what is common to many records.",
    ]


def _epsilon(value: Any) -> str:
    """To three decimals, rounded up: a card must not understate."""
    if value is None:
        return "does not hold"
    number = float(value)
    return f"{math.ceil(number * 1000) / 1000:.12g}" if math.isfinite(number) else "infinite"
