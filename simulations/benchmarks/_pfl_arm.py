"""The task of `pfl_research` by pfl-research, in a process whose Python has pfl, transformers and peft alone.

    PYTHON _pfl_arm.py FOLDER [--rounds 10] [--private]

FOLDER holds `tiny-bert`, `clients.npz` and `task.json`, which `pfl_research` writes. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism
from transformers import AutoModelForSequenceClassification


class Classifier(torch.nn.Module):
    """The model with the two methods that pfl asks for."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def loss(self, input_ids: Any, attention_mask: Any, labels: Any) -> Any:
        """The mean cross-entropy of a batch."""
        return self.model(input_ids=input_ids.long(), attention_mask=attention_mask.long(), labels=labels.long()).loss

    @torch.no_grad()
    def metrics(self, input_ids: Any, attention_mask: Any, labels: Any) -> dict[str, Any]:
        """The accuracy of a batch."""
        logits = self.model(input_ids=input_ids.long(), attention_mask=attention_mask.long()).logits
        return {"accuracy": Weighted(float((logits.argmax(dim=1) == labels).sum()), len(labels))}


def peak_memory() -> int:
    """Peak resident bytes so far."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def main() -> None:
    """Print accuracy and peak memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--private", action="store_true")
    arguments = parser.parse_args()
    task = json.loads((arguments.folder / "task.json").read_text())
    arrays = np.load(arguments.folder / "clients.npz")
    names = ("input_ids", "attention_mask", "labels")
    data = [tuple(torch.from_numpy(arrays[f"{name} {client}"]) for name in names) for client in range(task["clients"])]
    test = Dataset(tuple(torch.from_numpy(arrays[f"{name} test"]) for name in names))
    torch.manual_seed(0)
    base = AutoModelForSequenceClassification.from_pretrained(
        arguments.folder / "tiny-bert", num_labels=task["labels"]
    ).eval()
    settings = LoraConfig(
        task_type="SEQ_CLS", r=task["rank"], lora_alpha=task["alpha"], target_modules=["query", "value"]
    )
    module = Classifier(get_peft_model(base, settings))
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(trained, lr=1.0))
    sampler = get_user_sampler("minimize_reuse", list(range(task["clients"])))
    mechanism = GaussianMechanism(clipping_bound=task["clip_norm"], relative_noise_stddev=1.0)
    postprocessors = [CentrallyAppliedPrivacyMechanism(mechanism)] if arguments.private else []
    users = FederatedDataset(lambda user: Dataset(data[user], user_id=str(user)), sampler)
    model = FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=arguments.rounds,
            evaluation_frequency=arguments.rounds + 1,
            train_cohort_size=task["clients"],
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=users, val_data=users, postprocessors=postprocessors),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1,
            local_learning_rate=task["learning_rate"],
            local_batch_size=task["batch_size"],
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=100),
        callbacks=[],
    )
    ((_, accuracy),) = model.evaluate(test, eval_params=NNEvalHyperParams(local_batch_size=100))
    print(json.dumps({"accuracy": accuracy.overall_value, "peak": peak_memory()}))


if __name__ == "__main__":
    main()
