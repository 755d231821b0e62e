"""The task of `pfl_research` for peers, whose Pythons have torch, transformers and peft, but not what fedpriv needs.

    PYTHON -m simulations.benchmarks._pfl_arm FOLDER ROUNDS ARM
    PYTHON -m simulations.benchmarks._blazefl_arm FOLDER ROUNDS ARM MODE

FOLDER holds `tiny-bert` and `task.pt`, which `pfl_research` writes; ARM is "private" or "not private". Each prints one
JSON line.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification

from simulations.benchmarks._measuring import resident

torch.set_num_threads(1)  # for so small a model faster than threads that wait for each other


@functools.cache
def read_task(folder: Path) -> dict[str, Any]:
    """`clients` and `test`, each (ids and attention mask [records, 2, tokens], labels [records]), and the settings."""
    task: dict[str, Any] = torch.load(folder / "task.pt")
    return task


class Classifier(torch.nn.Module):
    """Tiny BERT with LoRA and a head, all of which start equal; dropout is off, as it is with fedpriv."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        task = read_task(folder)
        torch.manual_seed(0)
        base = AutoModelForSequenceClassification.from_pretrained(folder / "tiny-bert", num_labels=task["labels"])
        lora = LoraConfig(
            task_type="SEQ_CLS", r=task["rank"], lora_alpha=task["alpha"], target_modules=["query", "value"]
        )
        self.model = get_peft_model(base, lora).eval()

    def forward(self, rows: torch.Tensor) -> Any:
        """Logits [records, labels]."""
        return self.model(input_ids=rows[:, 0], attention_mask=rows[:, 1]).logits

    @torch.no_grad()
    def num_right(self, rows: torch.Tensor, labels: torch.Tensor) -> float:
        """How many records it classifies as labelled."""
        return float((self(rows).argmax(dim=1) == labels).sum())


def tell(accuracy: float) -> None:
    """Print the figures of an arm."""
    print(json.dumps({"accuracy": accuracy, "peak": resident("VmHWM")}))
