"""The section of a configuration on the model and its adapter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from fedpriv.config._section import Count, Fact, Layers, Names, Positive, Section

Train = Literal["all", "head", "auto"]
"""Which of the adapter and the head a run trains."""


@dataclass(frozen=True, kw_only=True)
class ModelSection(Section, title="Model and adapter", facts=Fact.RELEASE | Fact.RELOADS):
    """The model that is fine-tuned, and its adapter."""

    model: Annotated[str, Fact.PATH] = "all-MiniLM-L6-v2"
    """a local folder; the path of a `.gguf` file with a tokenizer; the bundled encoder; `SmolLM2-135M-Instruct`, which
    `make llm` installs; or a name on the Hugging Face Hub, tried in this order; weights in a folder must be
    safetensors. A GGUF file is [converted once](architecture.md#models-in-gguf-files)"""
    task: Annotated[Literal["SEQ_CLS", "CAUSAL_LM"], Fact.RECORDS] = "SEQ_CLS"
    """what the model does: `SEQ_CLS` (also trains a classification head) or `CAUSAL_LM`"""
    rank: Count = 4
    """LoRA's r"""
    alpha: Positive = 8.0
    """the product B A is scaled by `alpha` / `rank`"""
    target_modules: Names = ()
    """names of linear layers; by default those that peft chooses for the model type; query and value for CamemBERT and
    DistilBERT, for which it has no choice"""
    layers: Layers = "last-1"
    """`all`, `last-N`, or indices such as `4,5`"""
    max_length: Count = 64
    """maximum number of tokens; longer records are truncated, prompts [before their
    responses](language_models.md#what-the-model-sees-and-what-of-it-is-learned)"""
    normalize_features: bool = True
    """scales what the head reads to unit length, so that no record counts for more than another; stored with the
    adapter, and restored by `fedpriv.adapters.load`; RoBERTa, XLM-R, CamemBERT, ELECTRA and DistilBERT get a [linear
    head](architecture.md#encoders-are-mean-pooled)"""
    train: Train = "all"
    """what is trained: `all`: A, B and head; `head`: the head alone, A and B stay as they are; `auto`: decides from N,
    K, epsilon and q which of the two, and says why"""
