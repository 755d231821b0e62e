"""LoRA adapters on frozen base models."""

from fedpriv.adapters.arithmetic import Adapter
from fedpriv.adapters.base_models import BaseModel, load_base
from fedpriv.adapters.lora import LoraSettings, attach, load, read, save, trainable, write

__all__ = [
    "Adapter",
    "BaseModel",
    "LoraSettings",
    "attach",
    "load",
    "load_base",
    "read",
    "save",
    "trainable",
    "write",
]
