"""The arm of pfl-research."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
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

from simulations.benchmarks._peer_task import Classifier, read_task, tell


class PflClassifier(Classifier):
    """The model with the two methods that pfl asks for."""

    def loss(self, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy of a batch."""
        return torch.nn.functional.cross_entropy(self(rows), labels)

    def metrics(self, rows: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        """The accuracy of a batch."""
        return {"accuracy": Weighted(self.num_right(rows, labels), len(labels))}


def main(folder: Path, rounds: int, private: bool) -> None:
    """Print accuracy and peak memory."""
    task = read_task(folder)
    num_clients = len(task["clients"])
    module = PflClassifier(folder)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(trained, lr=1.0))
    sampler = get_user_sampler("minimize_reuse", list(range(num_clients)))
    mechanism = GaussianMechanism(clipping_bound=task["clip_norm"], relative_noise_stddev=1.0)
    postprocessors = [CentrallyAppliedPrivacyMechanism(mechanism)] if private else []
    users = FederatedDataset(lambda user: Dataset(task["clients"][user], user_id=str(user)), sampler)
    model = FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds + 1,
            train_cohort_size=num_clients,
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
    ((_, accuracy),) = model.evaluate(Dataset(task["test"]), eval_params=NNEvalHyperParams(local_batch_size=100))
    tell(accuracy.overall_value)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "private")
