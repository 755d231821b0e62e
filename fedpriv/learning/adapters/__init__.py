"""LoRA adapters on frozen base models.

A random BERT of two layers stands in for the base model; `load_base` takes a folder or a name on the Hugging Face Hub.

>>> from transformers import BertConfig, BertForSequenceClassification
>>> from fedpriv.learning.adapters import LoraSettings, attach, freeze, read
>>> config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
>>> base = freeze("tiny", BertForSequenceClassification(config), tokenizer=None, task="SEQ_CLS")
>>> model = attach(base, LoraSettings(rank=2, alpha=4.0))
>>> adapter = read(model)
>>> len(adapter), sum(tensor.numel() for tensor in adapter.values())
(10, 290)
"""

from typing import TYPE_CHECKING

from fedpriv.exports import lazy_exports

if TYPE_CHECKING:
    from fedpriv.learning.adapters._arithmetic import A_SUFFIX as A_SUFFIX
    from fedpriv.learning.adapters._arithmetic import B_SUFFIX as B_SUFFIX
    from fedpriv.learning.adapters._arithmetic import INNER_SUFFIX as INNER_SUFFIX
    from fedpriv.learning.adapters._arithmetic import Adapter as Adapter
    from fedpriv.learning.adapters._arithmetic import Factors as Factors
    from fedpriv.learning.adapters._arithmetic import Merged as Merged
    from fedpriv.learning.adapters._arithmetic import add_products as add_products
    from fedpriv.learning.adapters._arithmetic import as_tensor as as_tensor
    from fedpriv.learning.adapters._arithmetic import difference as difference
    from fedpriv.learning.adapters._arithmetic import factors_of as factors_of
    from fedpriv.learning.adapters._arithmetic import leading_block as leading_block
    from fedpriv.learning.adapters._arithmetic import merged_from_tensors as merged_from_tensors
    from fedpriv.learning.adapters._arithmetic import merged_to_tensors as merged_to_tensors
    from fedpriv.learning.adapters._arithmetic import non_lora_tensors as non_lora_tensors
    from fedpriv.learning.adapters._arithmetic import norm as norm
    from fedpriv.learning.adapters._arithmetic import of_one_rank as of_one_rank
    from fedpriv.learning.adapters._arithmetic import same_merged as same_merged
    from fedpriv.learning.adapters._base_formats import base_dtype as base_dtype
    from fedpriv.learning.adapters._base_formats import frozen_base as frozen_base
    from fedpriv.learning.adapters._base_formats import is_quantised as is_quantised
    from fedpriv.learning.adapters._base_formats import quantise as quantise
    from fedpriv.learning.adapters._base_formats import restore_float32 as restore_float32
    from fedpriv.learning.adapters._base_formats import to_bfloat16 as to_bfloat16
    from fedpriv.learning.adapters._base_models import BaseModel as BaseModel
    from fedpriv.learning.adapters._base_models import freeze as freeze
    from fedpriv.learning.adapters._base_models import gguf_file as gguf_file
    from fedpriv.learning.adapters._base_models import load_base as load_base
    from fedpriv.learning.adapters._base_models import load_tokenizer as load_tokenizer
    from fedpriv.learning.adapters._base_models import model_folder as model_folder
    from fedpriv.learning.adapters._base_models import quiet_transformers as quiet_transformers
    from fedpriv.learning.adapters._base_models import resolve as resolve
    from fedpriv.learning.adapters._locations import BUNDLED_ENCODER as BUNDLED_ENCODER
    from fedpriv.learning.adapters._locations import BUNDLED_LANGUAGE_MODEL as BUNDLED_LANGUAGE_MODEL
    from fedpriv.learning.adapters._locations import GIT_LFS as GIT_LFS
    from fedpriv.learning.adapters._locations import MPNET as MPNET
    from fedpriv.learning.adapters._locations import check_model as check_model
    from fedpriv.learning.adapters._locations import check_weights as check_weights
    from fedpriv.learning.adapters._locations import hub_problem as hub_problem
    from fedpriv.learning.adapters._locations import locate as locate
    from fedpriv.learning.adapters._locations import model_digest as model_digest
    from fedpriv.learning.adapters._locations import model_state as model_state
    from fedpriv.learning.adapters._locations import public_name as public_name
    from fedpriv.learning.adapters._locations import quiet_hub as quiet_hub
    from fedpriv.learning.adapters._locations import weights_digests as weights_digests
    from fedpriv.learning.adapters._products import use_the_faster as use_the_faster
    from fedpriv.learning.adapters.lora import LoraSettings as LoraSettings
    from fedpriv.learning.adapters.lora import attach as attach
    from fedpriv.learning.adapters.lora import last_targets as last_targets
    from fedpriv.learning.adapters.lora import load as load
    from fedpriv.learning.adapters.lora import read as read
    from fedpriv.learning.adapters.lora import save as save
    from fedpriv.learning.adapters.lora import trainable as trainable
    from fedpriv.learning.adapters.lora import write as write
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
