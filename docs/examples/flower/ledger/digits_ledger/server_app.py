"""Plain FedAvg."""

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from safetensors.torch import save_file

from digits_ledger import task

app = ServerApp()


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Accuracy on the server's own test images."""
    model = task.make_model()
    model.load_state_dict(arrays.to_torch_state_dict())
    return MetricRecord({"accuracy": task.accuracy(model)})


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and write the model where the run's configuration says."""
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=4, min_available_nodes=4)
    result = strategy.start(
        grid,
        ArrayRecord(task.make_model().state_dict()),
        num_rounds=int(context.run_config["num-server-rounds"]),
        evaluate_fn=evaluate,
    )
    if context.run_config["out"]:
        save_file(result.arrays.to_torch_state_dict(), str(context.run_config["out"]))
