"""LoRA adapters on frozen base models.

A random BERT of two layers stands in for the base model; `load_base` takes a folder or a name on the Hugging Face Hub.

>>> from transformers import BertConfig, BertForSequenceClassification
>>> from fedpriv.adapters import LoraSettings, attach, freeze, read
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
    from fedpriv.adapters.arithmetic import Adapter as Adapter
    from fedpriv.adapters.base_models import BaseModel as BaseModel
    from fedpriv.adapters.base_models import freeze as freeze
    from fedpriv.adapters.base_models import load_base as load_base
    from fedpriv.adapters.codecs import decode as decode
    from fedpriv.adapters.codecs import encode as encode
    from fedpriv.adapters.lora import LoraSettings as LoraSettings
    from fedpriv.adapters.lora import attach as attach
    from fedpriv.adapters.lora import load as load
    from fedpriv.adapters.lora import read as read
    from fedpriv.adapters.lora import save as save
    from fedpriv.adapters.lora import trainable as trainable
    from fedpriv.adapters.lora import write as write
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
