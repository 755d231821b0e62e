"""The client of Flower's example with Opacus: every round makes an engine of its own."""

from flwr.client import NumPyClient
from opacus import PrivacyEngine


class FlowerClient(NumPyClient):
    """Clients with an even number have noise 1.0, the others 1.5."""

    def __init__(self, noise_multiplier: float, max_grad_norm: float) -> None:
        self.noise_multiplier, self.max_grad_norm = noise_multiplier, max_grad_norm

    def fit(self, parameters: list, config: dict) -> object:
        """One round."""
        engine = PrivacyEngine(secure_mode=False)
        return engine.make_private(noise_multiplier=self.noise_multiplier, max_grad_norm=self.max_grad_norm)
