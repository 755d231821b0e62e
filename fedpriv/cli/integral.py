"""`fedpriv integral ...`: models that many disjoint data sets could have produced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedpriv.cli.integral_output import (
    about_table,
    advice_lines,
    attack_lines,
    selection_lines,
    selection_values,
    write_means,
)
from fedpriv.cli.options import OneOf
from fedpriv.cli.output import AsJson, show
from fedpriv.errors import InputError

if TYPE_CHECKING:
    from fedpriv.integral.procedure import Data
    from fedpriv.integral.tabular import PreparedTable
    from fedpriv.integral.training import TrainingSchedule

app = typer.Typer(
    no_args_is_help=True,
    help="Integrally private models, which many disjoint data sets could have produced. No differential privacy.",
)

DataFile = Annotated[Path, typer.Argument(help="CSV with a header, gzip allowed.")]
Target = Annotated[str, typer.Option(help="Column with the class.")]
Architecture = Annotated[
    str,
    typer.Option(click_type=OneOf("fedpriv.integral.networks:HIDDEN"), help="A perceptron of the paper."),
]
Epochs = Annotated[int, typer.Option(help="Passes over a subsample.", min=1)]
BatchSize = Annotated[int, typer.Option(help="Records in a step.", min=1)]
LearningRate = Annotated[float, typer.Option(help="> 0.")]
Optimizer = Annotated[
    str,
    typer.Option(click_type=OneOf("fedpriv.integral.training:OPTIMIZERS"), help="At PyTorch's defaults."),
]
Measure = Annotated[
    str,
    typer.Option(
        click_type=OneOf("fedpriv.integral.selection:Measure"),
        help="Distance of two models: the largest difference of a weight, or the norm of all differences.",
    ),
]
Clustering = Annotated[
    str,
    typer.Option(
        click_type=OneOf("fedpriv.integral.selection:Linkage"),
        help="What epsilon bounds: distances to a cluster's first member, as published, or of every pair.",
    ),
]
Comparison = Annotated[
    str,
    typer.Option(
        click_type=OneOf("fedpriv.integral.attack:Comparison"), help="How the intruder compares models with the target."
    ),
]
Scaling = Annotated[
    str,
    typer.Option(click_type=OneOf("fedpriv.integral.tabular:Scaling"), help="Of numeric columns."),
]
Drop = Annotated[
    list[str] | None, typer.Option(help="Column that must not be a feature, such as an id; may be repeated.")
]
Keep = Annotated[
    list[str] | None, typer.Option(help="Column that is a feature although it looks like an id; may be repeated.")
]
TestFraction = Annotated[float, typer.Option(help="Share of the records that no model is trained on, in (0, 1).")]
Seed = Annotated[int, typer.Option(help="Of the split, the subsamples, the initial weights and the batches.", min=0)]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Train in one thread: a step of so small a network takes less time than sharing it with other cores."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@app.command("select")
@_one_thread()
def select_models(
    data: DataFile,
    target: Target,
    subsample_size: Annotated[int, typer.Option(help="Records of each disjoint subsample.", min=1)],
    epsilon: Annotated[float, typer.Option(help="Largest distance within a cluster, in units of weights.", min=0)],
    architecture: Architecture = "dnn-1",
    epochs: Epochs = 20,
    batch_size: BatchSize = 32,
    learning_rate: LearningRate = 0.1,
    optimizer: Optimizer = "sgd",
    measure: Measure = "largest",
    clustering: Clustering = "first-member",
    align: Annotated[
        bool, typer.Option("--align", help="First put every model's neurons in the order of the first model's.")
    ] = False,
    top: Annotated[int, typer.Option(help="Largest number of clusters to recommend.", min=1)] = 5,
    compare_epsilon: Annotated[
        list[float] | None,
        typer.Option(help="Further ones for the table; by default 2 and 4 times epsilon.", min=0),
    ] = None,
    scaling: Scaling = "standard",
    drop: Drop = None,
    keep: Keep = None,
    test_fraction: TestFraction = 0.3,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="New folder for the means: mean-1.safetensors and so on.")] = None,
    as_json: AsJson = False,
) -> None:
    """Recommend the means of models that recur, and show what recurrence costs in accuracy.

    Example: fedpriv integral select adult.csv --target income --subsample-size 1000 --epsilon 0.05 --epochs 10
    """
    from fedpriv.integral.networks import perceptron
    from fedpriv.integral.procedure import SelectionSettings, recommend

    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"out = {str(out)!r}: exists; name another folder")
    table = _table(
        data, target, test_fraction=test_fraction, seed=seed, drop=drop or [], keep=keep or [], scaling=scaling
    )
    network = perceptron(architecture, table.train_features.shape[1], len(table.classes), seed=seed)
    settings = SelectionSettings(
        subsample_size=subsample_size,
        epsilon=epsilon,
        measure=measure,  # type: ignore[arg-type]  # checked by the option
        clustering=clustering,  # type: ignore[arg-type]  # checked by the option
        top=top,
        align=align,
        schedule=_schedule(epochs, batch_size, learning_rate, optimizer),
        seed=seed,
        epsilons=tuple(compare_epsilon or (2 * epsilon, 4 * epsilon)),
    )
    found = recommend(network, _data(table), settings)
    values = about_table(table) | selection_values(found, settings)
    if out is not None:
        values["files"] = [str(path) for path in write_means(out, network, table, found, settings)]
    show(values, selection_lines(values), as_json)


@app.command()
@_one_thread()
def attack(
    data: DataFile,
    target: Target,
    subsample_size: Annotated[int, typer.Option(help="Records of a training set.", min=2)] = 10,
    epsilon: Annotated[float, typer.Option(help="Of the integrally private mean, in units of weights.", min=0)] = 0.05,
    dp_epsilon: Annotated[
        list[float] | None, typer.Option(help="Of a DP-SGD model; may be repeated. By default 0.1, 0.5 and 1.")
    ] = None,
    architecture: Architecture = "dnn-1",
    epochs: Annotated[int, typer.Option(help="Of the mean's models, and of a plain model beside it.", min=1)] = 10,
    overfit_epochs: Annotated[int, typer.Option(help="Of an overfitted plain model.", min=1)] = 200,
    dp_steps: Annotated[int, typer.Option(help="Noisy steps of a DP-SGD model, each on all records.", min=1)] = 20,
    batch_size: BatchSize = 32,
    learning_rate: LearningRate = 0.1,
    clustering: Clustering = "first-member",
    owners: Annotated[int, typer.Option(help="Disjoint subsamples that a mean is selected from.", min=2)] = 20,
    background: Annotated[int, typer.Option(help="Used records that the intruder knows.", min=0)] = 0,
    subsamples: Annotated[int, typer.Option(help="Subsamples that the intruder draws.", min=1)] = 500,
    best: Annotated[
        int, typer.Option(help="Subsamples of the closest models; what they share gives the members away.", min=1)
    ] = 10,
    trials: Annotated[int, typer.Option(help="Games for each kind of model.", min=2)] = 20,
    comparison: Comparison = "norm",
    scaling: Scaling = "standard",
    drop: Drop = None,
    keep: Keep = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Play the model comparison attack against plain, integrally private and differentially private models.

    Half of the candidates were used for training, so guessing succeeds with probability 0.5. Noise is seeded: the
    table counts as public here. Example:

    fedpriv integral attack adult.csv --target income --trials 10
    """
    from fedpriv.integral.attack import Game
    from fedpriv.integral.attack_table import AttackPlan, attack_table
    from fedpriv.integral.networks import perceptron

    table = _table(data, target, test_fraction=0.3, seed=seed, drop=drop or [], keep=keep or [], scaling=scaling)
    network = perceptron(architecture, table.train_features.shape[1], len(table.classes), seed=seed)
    game = Game(
        size=subsample_size,
        num_owners=owners,
        num_background=background,
        num_subsamples=subsamples,
        num_best=best,
        num_trials=trials,
        comparison=comparison,  # type: ignore[arg-type]  # checked by the option
    )
    plan = AttackPlan(
        epsilon=epsilon,
        clustering=clustering,  # type: ignore[arg-type]  # checked by the option
        schedule=_schedule(epochs, batch_size, learning_rate, "sgd"),
        overfit_epochs=overfit_epochs,
        dp_epsilons=tuple(dp_epsilon or (0.1, 0.5, 1.0)),
        dp_steps=dp_steps,
    )
    rows = [asdict(row) for row in attack_table(network, _data(table), game, plan, seed=seed)]
    values = about_table(table) | {"chance": 0.5, "confidence": 0.95, "targets": rows}
    show(values, attack_lines(rows), as_json)


@app.command("advice")
def sample_size_advice(
    data: Annotated[Path | None, typer.Argument(help="CSV with a header; or give --features and --records.")] = None,
    target: Annotated[str, typer.Option(help="Column of the CSV with the class.")] = "",
    features: Annotated[int | None, typer.Option(help="Inputs of the network.", min=1)] = None,
    classes: Annotated[int, typer.Option(help="Outputs of the network.", min=2)] = 2,
    records: Annotated[
        int | None,
        typer.Option(help="|D|, which is split into subsamples; by default the CSV's training part.", min=1),
    ] = None,
    architecture: Architecture = "dnn-1",
    subsample_size: Annotated[int | None, typer.Option(help="A size to judge too.", min=1)] = None,
    excess_loss: Annotated[float, typer.Option(help="Epsilon of the PAC form, in (0, 1).")] = 0.1,
    failure_probability: Annotated[float, typer.Option(help="Delta of the PAC form, in (0, 1).")] = 0.05,
    drop: Drop = None,
    keep: Keep = None,
    as_json: AsJson = False,
) -> None:
    """How many records a network needs by two rules, and how many disjoint subsamples the data then give.

    Example: fedpriv integral advice --features 8 --records 10000 --subsample-size 500
    """
    from fedpriv.integral.networks import num_parameters, perceptron
    from fedpriv.integral.subsamples import advice

    if data is not None:
        table = _table(data, target, test_fraction=0.3, seed=0, drop=drop or [], keep=keep or [], scaling="standard")
        features, classes, records = table.train_features.shape[1], len(table.classes), len(table.train_labels)
    if features is None or records is None:
        raise InputError("data: give a CSV with its --target, or --features and --records")
    found = advice(
        num_parameters(perceptron(architecture, features, classes, seed=0)),
        records,
        excess_loss=excess_loss,
        failure_probability=failure_probability,
        subsample_size=subsample_size,
    )
    values = {"architecture": architecture, "num_features": features, "num_records": records, **asdict(found)}
    show(values, advice_lines(architecture, features, classes, records, found), as_json)


def _table(path: Path, target: str, **options: Any) -> PreparedTable:
    """The CSV as features, fitted on its training part."""
    from fedpriv.data.tables import load_table
    from fedpriv.integral.tabular import prepare

    frame = load_table(str(path)).to_pandas()
    return prepare(frame, target, **options)


def _data(table: PreparedTable) -> Data:
    """The table's features and labels."""
    from fedpriv.integral.procedure import Data

    return Data(
        train_features=table.train_features,
        train_labels=table.train_labels,
        test_features=table.test_features,
        test_labels=table.test_labels,
        classes=table.classes,
    )


def _schedule(epochs: int, batch_size: int, learning_rate: float, optimizer: str) -> TrainingSchedule:
    """How each network is trained."""
    from fedpriv.integral.training import TrainingSchedule

    return TrainingSchedule(
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        optimizer=optimizer,  # type: ignore[arg-type]  # checked by the option
    )
