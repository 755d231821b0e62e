"""The strategy of lesson 4 of the course Intro to Federated Learning."""

from flwr.server import ServerAppComponents, ServerConfig
from flwr.server.strategy import DifferentialPrivacyClientSideAdaptiveClipping, FedAvg

fedavg_with_dp = DifferentialPrivacyClientSideAdaptiveClipping(
    FedAvg(fraction_fit=0.6), noise_multiplier=0.3, num_sampled_clients=6
)
components = ServerAppComponents(strategy=fedavg_with_dp, config=ServerConfig(num_rounds=5))
