"""Tiny instruction data: records of prompts with responses, and a tokenizer whose words are numbers."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fedpriv.learning.data.chat import RESPONSE_MASK
from fedpriv.learning.data.records import Records
from tests.tiny import VOCABULARY

PAD, END = 0, 3


def number_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of `w4`, `w5` and so on, each the token of its number; 0 pads and 3 ends a turn."""
    words = {f"w{token}": token for token in range(VOCABULARY)} | {"<pad>": PAD, "<end>": END}
    del words["w0"], words["w3"]
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


def records_of(pairs: list[tuple[list[int], list[int]]]) -> Records:
    """Records of (prompt, response), by their tokens."""
    return Records(
        {
            "input_ids": tuple(torch.tensor([*prompt, *response]) for prompt, response in pairs),
            RESPONSE_MASK: tuple(torch.tensor([0] * len(p) + [1] * len(r)) for p, r in pairs),
        },
        torch.tensor([], dtype=torch.int64),
        pad_token_id=PAD,
    )


def random_prompts(num: int, *, seed: int = 0, shortest: int = 1, longest: int = 14) -> list[list[int]]:
    """Prompts of random tokens, none of which is special."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (num,), generator=generator).tolist()
    return [torch.randint(4, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
