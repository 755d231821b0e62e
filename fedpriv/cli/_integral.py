"""`fedpriv integral ...`: models that many disjoint data sets could have produced."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedpriv.cli._command import EncodingOption, Result, SeparatorOption, command, one_of
from fedpriv.cli._command import table as rows_of
from fedpriv.errors import InputError
from fedpriv.files import is_free

if TYPE_CHECKING:
    from torch import nn

    from fedpriv.methods.integral import Advice, TrainingSchedule
    from fedpriv.methods.integral.procedure import Recommendation, SelectionSettings, TrainAndTest
    from fedpriv.methods.integral.tabular import PreparedTable


app = typer.Typer(
    no_args_is_help=True,
    help="Integrally private models, which many disjoint data sets could have produced. No differential privacy.",
)

DataFile = Annotated[Path, typer.Argument(help="CSV with a header, gzip allowed.")]
Target = Annotated[str, typer.Option(help="Column with the class.")]
_ROOM = "fedpriv.methods.integral"
Architecture = Annotated[str, one_of(f"{_ROOM}:HIDDEN", "A perceptron of the paper.")]
Epochs = Annotated[int, typer.Option(help="Passes over a subsample.", min=1)]
BatchSize = Annotated[int, typer.Option(help="Records in a step.", min=1)]
LearningRate = Annotated[float, typer.Option(help="> 0.")]
Optimizer = Annotated[Any, one_of(f"{_ROOM}:OPTIMIZERS", "At PyTorch's defaults.")]
Measure = Annotated[
    Any,
    one_of(f"{_ROOM}:Measure", "Of models: the largest difference of a weight, the norm of all, or their mean."),
]
Clustering = Annotated[
    Any, one_of(f"{_ROOM}:Linkage", "Epsilon bounds distances to a cluster's first member, as published, or every one.")
]
Comparison = Annotated[Any, one_of(f"{_ROOM}.attack:Comparison", "How the intruder compares models with the target.")]
Scaling = Annotated[str, one_of(f"{_ROOM}.tabular:Scaling", "Of numeric columns.")]
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


@command(app, "select")
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
    separator: SeparatorOption = "auto",
    encoding: EncodingOption = "utf-8",
    drop: Drop = None,
    keep: Keep = None,
    test_fraction: TestFraction = 0.3,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="New folder for the means: mean-1.safetensors and so on.")] = None,
) -> Result:
    """Recommend the means of models that recur, and show what recurrence costs in accuracy.

    Example: fedpriv integral select adult.csv --target income --subsample-size 1000 --epsilon 0.05 --epochs 10
    """
    from fedpriv.methods.integral.procedure import SelectionSettings, recommend

    if out is not None and not is_free(out):
        raise InputError(f"out = {str(out)!r}: exists; name another folder")
    how: dict[str, Any] = {"test_fraction": test_fraction, "drop": drop, "keep": keep, "scaling": scaling}
    table, network = _table_and_network(data, target, architecture, separator, encoding, seed=seed, **how)
    settings = SelectionSettings(
        subsample_size=subsample_size,
        epsilon=epsilon,
        measure=measure,
        clustering=clustering,
        top=top,
        align=align,
        schedule=_schedule(epochs, batch_size, learning_rate, optimizer),
        seed=seed,
        epsilons=tuple(compare_epsilon or (2 * epsilon, 4 * epsilon)),
    )
    found = recommend(network, table, settings)
    values = about_table(table) | selection_values(found, settings)
    if out is not None:
        values["files"] = [str(path) for path in write_means(out, network, table, found, settings)]
    return Result(values, selection_lines(values))


@command(app)
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
    epochs: Annotated[int, typer.Option(help="Of the mean's models, and of one plain model.", min=1)] = 10,
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
    separator: SeparatorOption = "auto",
    encoding: EncodingOption = "utf-8",
    drop: Drop = None,
    keep: Keep = None,
    seed: Seed = 0,
) -> Result:
    """Play the model comparison attack against plain, integrally private and differentially private models.

    Half of the candidates were used for training, so guessing succeeds with probability 0.5. Noise is seeded: the
    table counts as public here. Example:

    fedpriv integral attack adult.csv --target income --trials 10
    """
    from fedpriv.methods.integral.attack import AttackPlan, Game, attack_table

    how: dict[str, Any] = {"drop": drop, "keep": keep, "scaling": scaling}
    table, network = _table_and_network(data, target, architecture, separator, encoding, seed=seed, **how)
    game = Game(
        size=subsample_size,
        num_owners=owners,
        num_background=background,
        num_subsamples=subsamples,
        num_best=best,
        num_trials=trials,
        comparison=comparison,
    )
    plan = AttackPlan(
        epsilon=epsilon,
        clustering=clustering,
        schedule=_schedule(epochs, batch_size, learning_rate, "sgd"),
        overfit_epochs=overfit_epochs,
        dp_epsilons=tuple(dp_epsilon or (0.1, 0.5, 1.0)),
        dp_steps=dp_steps,
    )
    rows = [asdict(row) for row in attack_table(network, table, game, plan, seed=seed)]
    values = about_table(table) | {"chance": 0.5, "confidence": 0.95, "targets": rows}
    return Result(values, attack_lines(rows))


@command(app, "advice")
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
    separator: SeparatorOption = "auto",
    encoding: EncodingOption = "utf-8",
    drop: Drop = None,
    keep: Keep = None,
) -> Result:
    """How many records a network needs by two rules, and how many disjoint subsamples the data then give.

    Example: fedpriv integral advice --features 8 --records 10000 --subsample-size 500
    """
    from fedpriv.methods.integral import advice, num_parameters, perceptron

    if data is not None:
        table, _ = _table_and_network(data, target, architecture, separator, encoding, drop=drop or [], keep=keep or [])
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
    return Result(values, advice_lines(architecture, features, classes, records, found))


def _table_and_network(
    path: Path, target: str, architecture: str, separator: Any, encoding: Any, *, seed: int = 0, **options: Any
) -> tuple[PreparedTable, nn.Sequential]:
    """The CSV as features, fitted on its training part, and a network for them with its initial weights."""
    import pandas as pd

    from fedpriv.learning.data import read_table
    from fedpriv.methods.integral import perceptron, prepare

    table = read_table(str(path), separator=separator, encoding=encoding)
    frame = pd.DataFrame(table.columns)
    for name in table.decimal_commas:
        frame[name] = frame[name].str.replace(",", ".")
    found = prepare(frame, target, seed=seed, **{name: value for name, value in options.items() if value is not None})
    return found, perceptron(architecture, found.train_features.shape[1], len(found.classes), seed=seed)


def _schedule(epochs: int, batch_size: int, learning_rate: float, optimizer: Any) -> TrainingSchedule:
    """The training schedule that the options describe."""
    from fedpriv.methods.integral import TrainingSchedule

    return TrainingSchedule(epochs=epochs, batch_size=batch_size, learning_rate=learning_rate, optimizer=optimizer)


def about_table(table: PreparedTable) -> dict[str, Any]:
    """The sizes of the prepared CSV, and the columns and records that were left out."""
    return {
        "num_train_records": len(table.train_labels),
        "num_test_records": len(table.test_labels),
        "num_features": len(table.feature_names),
        "classes": list(table.classes),
        "left_out_columns": dict(table.left_out),
        "giveaways": dict(table.giveaways),
        "num_unlabelled": table.num_unlabelled,
    }


def selection_values(found: Recommendation, settings: SelectionSettings) -> dict[str, Any]:
    """The recommended clusters, means and their figures, as `integral select --json` prints it."""
    from fedpriv.methods.integral import statement

    clusters = [
        {
            "recurrence": cluster.recurrence,
            "k": cluster.anonymity.k,
            "holds": cluster.anonymity.holds,
            "intersection_is_empty": cluster.anonymity.intersection_is_empty,
            "largest_difference": cluster.largest_difference,
            "members": list(cluster.members),
            **_metrics(mean),
            "member_test_accuracy": [found.members[row].test.accuracy for row in cluster.members],
            "statement": statement(cluster, settings.epsilon, settings.measure),
        }
        for cluster, mean in zip(found.clusters, found.means, strict=True)
    ]
    looks = [
        {name: getattr(look, name) for name in ("epochs", "epsilon", "recurrence", "k")}
        | {"test_accuracy": look.mean and look.mean.test.accuracy, "plain_test_accuracy": look.plain.test.accuracy}
        | {"majority_test_accuracy": found.majority.test.accuracy}
        for look in found.snapshots
    ]
    return {
        **{name: getattr(settings, name) for name in ("epsilon", "measure", "clustering", "subsample_size")},
        "num_subsamples": len(found.subsamples.records),
        "share_left_over": found.subsamples.share_left_over,
        "recurrence": found.cluster_sizes[0],
        "cluster_sizes": list(found.cluster_sizes),
        "clusters": clusters,
        "plain": _metrics(found.plain),
        "majority": _metrics(found.majority),
        "looks": looks,
        "is_differentially_private": False,
    }


def _metrics(both: TrainAndTest) -> dict[str, float]:
    """{"train_accuracy": ..., "test_accuracy": ..., ...} of one model."""
    return {
        f"{part}_{name}": value for part in ("train", "test") for name, value in asdict(getattr(both, part)).items()
    }


def selection_lines(values: Mapping[str, Any]) -> list[str]:
    """The same as text: the data, a table over epochs and epsilon, a paragraph for each cluster."""
    share = f"{100 * values['share_left_over']:.1f} % left over"
    lines = [
        f"{values['num_train_records']} training and {values['num_test_records']} test records, "
        f"{values['num_features']} features, {len(values['classes'])} classes",
        f"{values['num_subsamples']} disjoint subsamples of {values['subsample_size']} training records, {share}",
    ]
    lines += [f"column {name} left out: {reason}" for name, reason in values["left_out_columns"].items()]
    if alone := values["giveaways"]:
        told = ", ".join(f"{name} {accuracy:.4f}" for name, accuracy in alone.items())
        lines.append(
            f"warning: single columns give classes away almost without error; accuracy of each alone: {told}; the "
            f"majority class has {values['majority']['train_accuracy']:.4f}. --drop what is known only with the class"
        )
    if values["num_unlabelled"]:
        lines.append(f"{values['num_unlabelled']} records without a class left out")
    of_models = {"of its mean": "test_accuracy", "plain": "plain_test_accuracy"}
    looks = (dict(look) | {name: look[key] for name, key in of_models.items()} for look in values["looks"])
    majority = f"the majority class has {values['majority']['test_accuracy']:.4f} on test records"
    lines += ["", f"Recurrence of the largest cluster, its k, and test accuracy; {majority}:"]
    lines += [*rows_of(looks, ("epochs", "epsilon", "recurrence", "k", "of its mean", "plain")), ""]
    if not values["clusters"]:
        lines.append(
            f"No two of {values['num_subsamples']} models are within {values['epsilon']:g} of each other: there is no "
            "cluster, and nothing is recommended. Train less, raise epsilon or take larger subsamples."
        )
    for number, cluster in enumerate(values["clusters"], start=1):
        lines += [
            f"cluster {number}: {cluster['recurrence']} models, at most {cluster['largest_difference']:.4f} apart; its "
            f"mean has accuracy {cluster['test_accuracy']:.4f}, F1 {cluster['test_f1']:.4f}, loss "
            f"{cluster['test_loss']:.4f} on test records (on training records {cluster['train_accuracy']:.4f}, "
            f"{cluster['train_f1']:.4f}, {cluster['train_loss']:.4f})",
            f"  {cluster['statement']}",
        ]
    if values["clusters"] and values["clusters"][0]["test_accuracy"] <= values["majority"]["test_accuracy"]:
        lines.append("The first mean is no better than guessing the majority class.")
    return lines + [f"written: {path}" for path in values.get("files", [])]


def write_means(
    out: Path, network: nn.Module, table: PreparedTable, found: Recommendation, settings: SelectionSettings
) -> list[Path]:
    """Write the means as safetensors files, whose metadata names their inputs and outputs."""
    import torch
    from safetensors.torch import save_file

    from fedpriv.files import replaced_file
    from fedpriv.methods.integral import from_vectors

    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, cluster in enumerate(found.clusters, start=1):
        named = from_vectors(network, torch.from_numpy(cluster.mean).float())
        about = {"features": json.dumps(table.feature_names), "classes": json.dumps(table.classes)}
        about |= {"epsilon": str(settings.epsilon), "k": str(cluster.anonymity.k)}
        path = out / f"mean-{number}.safetensors"
        with replaced_file(path) as file:
            save_file({name: value.contiguous() for name, value in named.items()}, file.name, metadata=about)
        paths.append(path)
    return paths


def attack_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table with a line for each target of the attack."""
    told = (dict(row) | {"verdict": "beats chance" if row["beats_chance"] else row["note"]} for row in rows)
    return rows_of(told, ("name", "success", "low", "high", "test_accuracy", "verdict"))


def advice_lines(architecture: str, features: int, classes: int, records: int, found: Advice) -> list[str]:
    """The sizes that the rules ask for, and how many disjoint subsamples of each size the records give."""
    lines = [f"{architecture}: {found.num_parameters} weights with {features} features and {classes} classes"]
    sizes = {"ten records per weight": found.rule_of_thumb, "PAC form, constant 1": found.pac, "given": found.chosen}
    for name, size in sizes.items():
        if size is not None:
            few = "" if size.num_subsamples >= 2 else "; too few to select from"
            lines.append(f"{name}: {size.records} records, {size.num_subsamples} disjoint subsamples of {records}{few}")
    return lines
