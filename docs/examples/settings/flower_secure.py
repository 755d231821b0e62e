"""The strategy of Flower's example of central differential privacy with secure aggregation."""

from flwr.app import Context
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg


def main(context: Context) -> LegacyContext:
    """A run of three rounds."""
    strategy = DifferentialPrivacyClientSideFixedClipping(
        FedAvg(fraction_fit=0.2),
        noise_multiplier=context.run_config["noise-multiplier"],
        clipping_norm=context.run_config["clipping-norm"],
        num_sampled_clients=context.run_config["num-sampled-clients"],
    )
    return LegacyContext(context=context, config=ServerConfig(num_rounds=3), strategy=strategy)
