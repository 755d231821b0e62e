"""A public text in the words of a model's own tokenizer, as long as any record: what it fails on, every record would.

Once records are touched, one that fails counts as zero. So a model that fails on all of them would train to the end on
noise alone, which has its price all the same.
"""

from __future__ import annotations

import json
from itertools import cycle, islice
from typing import Any

from fedpriv.adapters import BaseModel
from fedpriv.config import RunConfig
from fedpriv.data import TextData
from fedpriv.data.records import Records, encode, encoder_of, tokenize
from fedpriv.errors import InputError

# Of the vocabulary, from its beginning to its end.
_NUM_WORDS = 64

# A length that no word reaches.
_UNCUT = 2**20


def public_record(base: BaseModel, config: RunConfig, *, num_labels: int) -> Records:
    """One record of `max_length` tokens, as the run reads texts.

    Args:
        base: with its tokenizer.
        config: of the run.
        num_labels: number of classes; 0 for causal models.

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
