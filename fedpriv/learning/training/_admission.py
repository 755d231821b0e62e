"""Whether and how a model trains here: a pass must leave it as it was, and its base computes in a format.

Where each record has a pass of its own, nothing couples records but what a pass leaves behind. So a model that changes
itself or draws random numbers is refused. In a simulation records share passes; a model that mixes them there, by more
than rounding, runs them alone.

Once records are touched, one that fails counts as zero. So a model that fails on all of them would train to the end on
noise alone, which has its price all the same. It is tried on a public text in the words of its own tokenizer, as long
as any record: what it fails on, every record would.
"""

import bisect
import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from fedpriv.config import RunConfig
from fedpriv.errors import InputError, first_line
from fedpriv.learning.adapters import BaseModel, lora, restore_float32, to_bfloat16
from fedpriv.learning.data import TextData
from fedpriv.learning.data.records import Item, Records, encode, encoder_of, tokenize
from fedpriv.learning.training.independence import dependence, raising_failures, refusing
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.per_sample import Stack, per_sample_gradients
from fedpriv.learning.training.rehearsal import left_as_it_is, random_records

log = logging.getLogger(__name__)

# A trial on a few records can miss what depends on the data, so these are refused by name.
REFUSED = {
    "big_bird": "a short record switches its attention for all later ones",
    "bigbird_pegasus": "a short record switches its attention for all later ones",
    "longformer": "its passes fail depending on where records have global attention",
    "reformer": "it hashes with random numbers drawn in each pass",
    "xlnet": "its passes fail depending on the data",
}

# Tokens of the records with which a model is tried: two to watch, and between them the longest, which pads them.
_TRIED = (5, 8, 7, 3)

# The share of a gradient's norm that may be rounding, by the bytes of a value of the base.
_TOLERANCES = {4: 1e-3, 2: 0.05}

# Of the vocabulary, from its beginning to its end.
_NUM_WORDS = 64

# A length that no word reaches.
_UNCUT = 2**20

# bfloat16 costs precision, so it must save at least this share of the time.
_LEAST_SAVING = 0.2

# In narrower models a pass is mostly overhead, and which format is faster is chance.
_LEAST_WIDTH = 128

# Tokens of the synthetic records, the most that share a pass, and the seconds for which each format is timed.
_TOKENS = 32
_RECORDS = 32
_SECONDS = 0.15


def admit(model: TrainingModel) -> None:
    """Let a model train if passes leave it as it was, else an InputError; one that mixes records runs them alone."""
    kind = model.peft_model.config.model_type
    with refusing(kind):
        reason = REFUSED.get(kind) or _reason_to_refuse(model)
    if reason:
        raise InputError(f"model: a {kind} model cannot train here ({reason}); bert, roberta, gpt2 or llama can")
    if not model.alone and not _records_are_independent(model, cached=False):
        log.warning("%s models mix the records of a pass, so each record has a pass of its own: training is slow", kind)
        model.alone = True
    if model.cache is not None and not _can_cache(model):
        log.warning("%s models do not run from their middle, so there is no prefix cache: training is slower", kind)
        model.cache = None


def check_weights(base: BaseModel) -> None:
    """Refuse, by its tensor, a base with a weight that is no number, to which every loss may lead."""
    for name, weight in base.model.named_parameters():
        if weight.is_floating_point() and not bool(weight.isfinite().all()):
            raise InputError(
                f"model = {base.name!r}: {name} holds a value that is NaN or infinite; use an undamaged checkpoint"
            )


def check_learns(model: TrainingModel, record: Records) -> None:
    """Refuse, with an InputError, a model that learns nothing of a public record as long as any may be."""
    kind, tokens = model.peft_model.config.model_type, len(record.features["input_ids"][0])
    try:
        gradient = _gradients(model, record.items(), cached=False)
    except Exception as error:  # of any type, as an embedding of positions or a mask is too short
        most = bisect.bisect_left(range(1, tokens), True, key=lambda length: not _reads(model, record, length))
        if not most:
            raise
        raise InputError(
            f"max_length = {tokens}: a {kind} model fails on texts of so many tokens ({first_line(error)}); "
            f"use at most {most}"
        ) from error
    if not gradient.isfinite().all():
        raise InputError(
            f"model: gradients of a {kind} model are NaN or infinite on a text of {tokens} tokens; use another "
            "checkpoint, or base_dtype = float32"
        )
    if not gradient.any():
        raise InputError(f"max_length = {tokens}: a {kind} model learns nothing of texts of so many tokens; use more")


def public_record(base: BaseModel, config: RunConfig, *, num_labels: int) -> Records:
    """One record of `max_length` tokens, as the run reads texts; `num_labels` is 0 for causal models.

    Raises:
        InputError: the tokenizer cannot pad, knows no word, or makes tokens for which there is no embedding.
    """
    tokenizer, num_embeddings = base.tokenizer, base.model.get_input_embeddings().num_embeddings
    model = f"model = {base.name!r}"
    if tokenizer.pad_token_id is None:
        raise InputError(
            f"{model}: its tokenizer has neither a padding token nor one that ends a text; name a pad_token in "
            "tokenizer_config.json"
        )
    words = _words(tokenizer, num_embeddings)
    if not words:
        raise InputError(
            f"{model}: its tokenizer knows no word, so all texts would read the same; put the files of the one that it "
            "was trained with, such as tokenizer.json, into its folder"
        )
    text = " ".join(islice(cycle(words), config.max_length))
    has_pair = bool(config.text_pair_column) or config.instructs
    data = TextData(
        texts=(json.dumps([("user", text)]) if config.messages_column else text,),
        labels=("0",) if num_labels else (),
        pairs=((*config.answers, text)[0],) if has_pair else None,
    )
    (row,) = rows = encoder_of(config).encode(tokenizer, data.texts, data.pairs, config.max_length)
    if row is None:
        raise InputError(f"{model}: its tokenizer cannot put a text of its own words in the form of the run's records")
    added = [id_ for id_, token in tokenizer.added_tokens_decoder.items() if not token.special]
    missing = [id_ for id_ in (*row["input_ids"], tokenizer.pad_token_id, *added) if id_ >= num_embeddings]
    if missing:
        raise InputError(
            f"{model}: token {missing[0]} ({tokenizer.convert_ids_to_tokens(missing[0])!r}) of its tokenizer has no "
            f"embedding, of which there are {num_embeddings}; resize them to {len(tokenizer)}, as "
            "resize_token_embeddings does, and save the model again"
        )
    label_names = tuple(map(str, range(num_labels)))
    return tokenize(
        data, tokenizer, label_names=label_names, max_length=config.max_length, encode=lambda *_: rows, names=tuple(row)
    )


def _words(tokenizer: Any, num_embeddings: int) -> list[str]:
    """Words of the vocabulary of which the tokenizer makes more than special tokens, all with an embedding."""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    known = sorted(id_ for id_ in tokenizer.get_vocab().values() if id_ < num_embeddings and id_ not in special)
    tried = [tokenizer.decode([id_]).strip() for id_ in known[:: max(1, len(known) // _NUM_WORDS)]]
    words = []
    for word, row in zip(tried, encode(tokenizer, tried, None, _UNCUT), strict=True):
        tokens = set(row["input_ids"]) - special if row else set()
        if word and tokens and max(tokens) < num_embeddings:
            words.append(word)
    return words


@torch.no_grad()
def _reads(model: TrainingModel, record: Records, tokens: int) -> bool:
    """Whether a pass of the record's first tokens succeeds."""
    features: dict[str, tuple[Tensor, ...]] = {n: (column[0][:tokens],) for n, column in record.features.items()}
    try:
        model.predictions(replace(record, features=features).items(), cached=False)
    except Exception:
        return False
    return True


def _reason_to_refuse(model: TrainingModel) -> str:
    """Empty if passes leave the model as it was: the same record then has the same gradient again, to the bit."""
    first, other, *_ = _tried(model, seed=0).items()
    with left_as_it_is(model.peft_model):
        before, _, after = (_gradients(model, [item], cached=False) for item in (first, other, first))
    if not before.isfinite().all():
        return "its gradients are NaN or infinite"
    return "" if torch.equal(before, after) else "a pass changes the next one's results"


def _can_cache(model: TrainingModel) -> bool:
    """Whether records have the gradients of the whole model with the prefix cache too, and none changes another's."""
    items = _tried(model, seed=0).items()
    try:
        with raising_failures():
            whole, cached = (_gradients(model, items, cached=flag) for flag in (False, True))
            return _close(model, cached, whole) and (model.alone or _records_are_independent(model, cached=True))
    except Exception as error:  # whatever it is, synthetic records alone have caused it
        log.warning("the prefix cache fails on synthetic records: %s", error)
        return False


def _records_are_independent(model: TrainingModel, *, cached: bool) -> bool:
    """Whether removing, replacing and permuting synthetic records changes the others' gradients by rounding alone."""
    records, others = (_tried(model, seed=seed).items() for seed in (0, 1))

    def gradients(items: Sequence[Item]) -> Tensor:
        return _gradients(model, items, cached=cached)

    return dependence(gradients, records, others, lambda one, other: _close(model, one, other)) is None


def _tried(model: TrainingModel, *, seed: int) -> Records:
    longest = model.longest or max(_TRIED)
    return random_records(
        model,
        [min(tokens, longest) for tokens in _TRIED],
        num_labels=0 if lora.is_causal(model.peft_model) else model.peft_model.config.num_labels,
        seed=seed,
    )


def _close(model: TrainingModel, one: Tensor, other: Tensor) -> bool:
    bound = _TOLERANCES[model.base_dtype.itemsize] * other.norm(dim=1)
    return bool(((one - other).norm(dim=1) <= bound).all())


def _gradients(model: TrainingModel, items: Sequence[Item], *, cached: bool) -> Tensor:
    """[records, values] The records' gradients in one pass, with parameters at which none of them vanishes."""
    generator = torch.Generator().manual_seed(0)
    parameters = {
        name: (p.detach().cpu() + 0.05 * torch.randn(p.shape, generator=generator)).unsqueeze(0).to(model.device)
        for name, p in model.peft_model.named_parameters()
        if p.requires_grad
    }
    gradients, _ = per_sample_gradients(
        model.layers,
        lambda: model.predictions(items, cached=cached).losses,
        Stack(parameters=parameters, owners=torch.zeros(len(items), dtype=torch.int64, device=model.device)),
        recomputed=model.recomputed,
    )
    return torch.cat([gradient.flatten(1) for gradient in gradients.values()], dim=1)


def in_format(peft_model: Any, wanted: str, build: Callable[..., TrainingModel]) -> TrainingModel:
    """The training model with its frozen base in a format.

    Args:
        peft_model: with a float32 base on the device that trains; converted in place.
        wanted: `float32`, `bfloat16` or `auto`: on a GPU bfloat16, and on a CPU whichever takes less time for a pass
            of synthetic records there and back; float32 if the model computes in neither, which is for others to say.
            With `nf4` the linear layers are quantised already, and the rest becomes bfloat16 on a GPU.
        build: makes the training model; takes `pretrained` and `prefix_cache`.

    Raises:
        InputError: bfloat16 is wanted, and the model does not compute in it.
    """
    if wanted == "nf4" and _on_gpu(peft_model):
        to_bfloat16(peft_model)
    is_small = not _on_gpu(peft_model) and peft_model.config.hidden_size < _LEAST_WIDTH
    if wanted in ("float32", "nf4") or (wanted == "auto" and is_small):
        return build()
    before = None
    try:
        is_choice = wanted == "auto" and not _on_gpu(peft_model)
        in_float32 = _seconds_of_a_pass(peft_model, build) if is_choice else math.inf
        before = to_bfloat16(peft_model)
        share = _seconds_of_a_pass(peft_model, build) / in_float32
    except Exception as error:  # whatever it is, synthetic records alone have caused it
        if before is not None:
            restore_float32(peft_model, before)
        if wanted == "bfloat16":
            kind = peft_model.config.model_type
            raise InputError(
                f"base_dtype = bfloat16: a {kind} model does not compute in it here ({first_line(error)}); use float32"
            ) from None
        log.info("base_dtype = auto: float32, since this model does not compute in bfloat16 (%s)", first_line(error))
        return build()
    is_taken = share <= 1 - _LEAST_SAVING
    if is_choice:
        chosen = "bfloat16" if is_taken else "float32"
        log.info("base_dtype = auto: %s; a pass in bfloat16 takes %.2f of the time in float32", chosen, share)
    if is_taken:
        return build(pretrained=before.weights)
    restore_float32(peft_model, before)
    return build()


def _on_gpu(peft_model: Any) -> bool:
    kind: str = next(peft_model.parameters()).device.type
    return kind != "cpu"


def _seconds_of_a_pass(peft_model: Any, build: Callable[..., TrainingModel]) -> float:
    """The least time of one pass for per-sample gradients; the first pass, which warms up, is not counted.

    On a CPU it is the processor's, whatever else keeps the machine busy.
    """
    model = build(prefix_cache=False)
    classes = 0 if lora.is_causal(peft_model) else peft_model.config.num_labels
    tokens = min(_TOKENS, model.longest or _TOKENS)
    items = random_records(model, [tokens] * _RECORDS, num_labels=classes).items()
    (together, *_) = model.passes(items)

    def one_pass() -> None:
        batch = [items[position] for position in together]
        per_sample_gradients(
            model.layers, lambda: model.predictions(batch, cached=False).losses, recomputed=model.recomputed
        )

    clock = time.perf_counter if _on_gpu(peft_model) else time.process_time
    one_pass()
    least, ends = float("inf"), clock() + _SECONDS
    while True:
        started = clock()
        one_pass()
        finished = clock()
        least = min(least, finished - started)
        if finished >= ends:
            return least
