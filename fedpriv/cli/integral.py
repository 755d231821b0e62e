"""`fedpriv integral ...`: models that many disjoint data sets could have produced."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from fedpriv.errors import InputError

app = typer.Typer(
    no_args_is_help=True,
    help="Integrally private models, which many disjoint data sets could have produced. No differential privacy.",
)

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else.")]
DataFile = Annotated[Path, typer.Argument(help="CSV with a header, gzip allowed.")]
Target = Annotated[str, typer.Option(help="Column with the class.")]
Architecture = Annotated[str, typer.Option(help="dnn-1, dnn-2, dnn-3 or dnn-4.")]
Epochs = Annotated[int, typer.Option(help="Passes over a subsample.", min=1)]
BatchSize = Annotated[int, typer.Option(help="Records of a step.", min=1)]
LearningRate = Annotated[float, typer.Option(help="> 0.")]
Optimizer = Annotated[str, typer.Option(help="sgd or adam.")]
Measure = Annotated[str, typer.Option(help="largest difference of a weight, or norm of all differences.")]
Clustering = Annotated[str, typer.Option(help="first-member, as published, or complete: every pair within epsilon.")]
Scaling = Annotated[str, typer.Option(help="Of numeric columns: standard or min-max.")]
Drop = Annotated[list[str] | None, typer.Option(help="Column that is not to be a feature, such as an id.")]
TestFraction = Annotated[float, typer.Option(help="Of records that no model sees, in (0, 1).")]
Seed = Annotated[int, typer.Option(help="Of the split, the subsamples, the initial weights and the batches.", min=0)]


@app.command("select")
def select_models(
    data: DataFile,
    target: Target,
    subsample_size: Annotated[int, typer.Option(help="Records of each disjoint subsample.", min=1)],
    epsilon: Annotated[float, typer.Option(help="How far apart models of a cluster may be, units of weights.", min=0)],
    architecture: Architecture = "dnn-1",
    epochs: Epochs = 20,
    batch_size: BatchSize = 32,
    learning_rate: LearningRate = 0.1,
    optimizer: Optimizer = "sgd",
    measure: Measure = "largest",
    clustering: Clustering = "first-member",
    align: Annotated[bool, typer.Option("--align", help="Order neurons like the first model's beforehand.")] = False,
    top: Annotated[int, typer.Option(help="Clusters to recommend at most.", min=1)] = 5,
    compare_epsilon: Annotated[
        list[float] | None, typer.Option(help="More of them for the table; by default 2 and 4 times epsilon.", min=0)
    ] = None,
    scaling: Scaling = "standard",
    drop: Drop = None,
    test_fraction: TestFraction = 0.3,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for the means, mean-1.safetensors and so on.")] = None,
    as_json: AsJson = False,
) -> None:
    """Recommend the means of the models that recur, and show what recurrence costs in accuracy.

    Example: fedpriv integral select adult.csv --target income --subsample-size 1000 --epsilon 0.05 --epochs 10
    """
    from fedpriv.integral.networks import perceptron
    from fedpriv.integral.procedure import Settings, recommend

    _on_one_core()
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"out = {str(out)!r}: exists; name another folder")
    table = _table(data, target, test_fraction=test_fraction, seed=seed, drop=drop or [], scaling=scaling)
    network = perceptron(architecture, table.train_features.shape[1], len(table.classes), seed=seed)
    settings = Settings(
        subsample_size=subsample_size,
        epsilon=epsilon,
        measure=_one_of("measure", measure, ("largest", "norm")),
        clustering=_one_of("clustering", clustering, ("first-member", "complete")),
        top=top,
        align=align,
        schedule=_schedule(epochs, batch_size, learning_rate, optimizer),
        seed=seed,
        epsilons=tuple(compare_epsilon or (2 * epsilon, 4 * epsilon)),
    )
    found = recommend(network, _data(table), settings)
    values = _about(table) | _selection(found, settings)
    if out is not None:
        values["files"] = [str(path) for path in _write_means(out, network, table, found, settings)]
    _print(values, _selection_lines(values), as_json)


@app.command()
def attack(
    data: DataFile,
    target: Target,
    subsample_size: Annotated[int, typer.Option(help="Records of a training set.", min=2)] = 10,
    epsilon: Annotated[float, typer.Option(help="Of the integrally private mean, units of weights.", min=0)] = 0.05,
    dp_epsilon: Annotated[list[float] | None, typer.Option(help="Of DP-SGD models; by default 0.1, 0.5 and 1.")] = None,
    architecture: Architecture = "dnn-1",
    epochs: Annotated[int, typer.Option(help="Of the mean's models and of a plain one beside it.", min=1)] = 10,
    overfit_epochs: Annotated[int, typer.Option(help="Of an overfitted plain model.", min=1)] = 200,
    dp_steps: Annotated[int, typer.Option(help="Noisy steps on all records of a DP-SGD model.", min=1)] = 20,
    batch_size: BatchSize = 32,
    learning_rate: LearningRate = 0.1,
    clustering: Clustering = "first-member",
    owners: Annotated[int, typer.Option(help="Disjoint subsamples that a mean is selected from.", min=2)] = 20,
    background: Annotated[int, typer.Option(help="Used records that the intruder knows.", min=0)] = 0,
    subsamples: Annotated[int, typer.Option(help="That the intruder draws.", min=1)] = 500,
    best: Annotated[int, typer.Option(help="Generators whose intersection tells the members.", min=1)] = 10,
    trials: Annotated[int, typer.Option(help="Targets of each kind.", min=2)] = 20,
    comparison: Annotated[str, typer.Option(help="norm, largest or projection.")] = "norm",
    scaling: Scaling = "standard",
    drop: Drop = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Play the model comparison attack against plain, integrally private and differentially private models.

    Half of the candidates were used, so chance is 0.5. Noise is seeded: the table counts as public here. Example:

    fedpriv integral attack adult.csv --target income --trials 10
    """
    from fedpriv.integral.attack_game import Game
    from fedpriv.integral.attack_table import Plan, attack_table
    from fedpriv.integral.networks import perceptron

    _on_one_core()
    table = _table(data, target, test_fraction=0.3, seed=seed, drop=drop or [], scaling=scaling)
    network = perceptron(architecture, table.train_features.shape[1], len(table.classes), seed=seed)
    game = Game(
        size=subsample_size,
        num_owners=owners,
        num_background=background,
        num_subsamples=subsamples,
        num_best=best,
        num_trials=trials,
        comparison=_one_of("comparison", comparison, ("norm", "largest", "projection")),
    )
    plan = Plan(
        epsilon=epsilon,
        clustering=_one_of("clustering", clustering, ("first-member", "complete")),
        schedule=_schedule(epochs, batch_size, learning_rate, "sgd"),
        overfit_epochs=overfit_epochs,
        dp_epsilons=tuple(dp_epsilon or (0.1, 0.5, 1.0)),
        dp_steps=dp_steps,
    )
    rows = [asdict(row) for row in attack_table(network, _data(table), game, plan, seed=seed)]
    values = _about(table) | {"chance": 0.5, "confidence": 0.95, "targets": rows}
    lines = [f"{'target':<44} {'success':>7}  95 % interval   test accuracy"]
    for row in rows:
        if row["note"]:
            lines.append(f"{row['name']:<44} {row['note']}")
            continue
        interval = f"{row['low']:.3f} to {row['high']:.3f}"
        verdict = "  beats chance" if row["beats_chance"] else ""
        lines.append(f"{row['name']:<44} {row['success']:>7.3f}  {interval}  {row['test_accuracy']:>13.3f}{verdict}")
    _print(values, lines, as_json)


@app.command("advice")
def sample_size_advice(
    data: Annotated[Path | None, typer.Argument(help="CSV with a header; or give --features and --records.")] = None,
    target: Annotated[str, typer.Option(help="Column with the class, of a CSV.")] = "",
    features: Annotated[int | None, typer.Option(help="Inputs of the network.", min=1)] = None,
    classes: Annotated[int, typer.Option(help="Outputs of the network.", min=2)] = 2,
    records: Annotated[
        int | None, typer.Option(help="|D|, of which subsamples are made; a CSV's training part.", min=1)
    ] = None,
    architecture: Architecture = "dnn-1",
    subsample_size: Annotated[int | None, typer.Option(help="A size to be judged.", min=1)] = None,
    excess_loss: Annotated[float, typer.Option(help="Epsilon of the PAC form, in (0, 1).")] = 0.1,
    failure_probability: Annotated[float, typer.Option(help="Delta of the PAC form, in (0, 1).")] = 0.05,
    drop: Drop = None,
    as_json: AsJson = False,
) -> None:
    """How many records a network needs by two rules, and how many disjoint subsamples that leaves.

    Example: fedpriv integral advice --features 8 --records 10000 --subsample-size 500
    """
    from fedpriv.integral.networks import num_parameters, perceptron
    from fedpriv.integral.sample_size import advice

    if data is not None:
        table = _table(data, target, test_fraction=0.3, seed=0, drop=drop or [], scaling="standard")
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
    lines = [f"{architecture}: {found.num_parameters} weights with {features} features and {classes} classes"]
    sizes = {"ten records a weight": found.rule_of_thumb, "PAC form, constant 1": found.pac, "asked": found.chosen}
    for name, size in sizes.items():
        if size is not None:
            few = "" if size.num_subsamples >= 2 else "; too few to select from"
            lines.append(f"{name}: {size.records} records, {size.num_subsamples} disjoint subsamples of {records}{few}")
    _print(values, lines, as_json)


def _on_one_core() -> None:
    """Steps of networks this small cost less than handing them to other cores."""
    import torch

    torch.set_num_threads(1)


def _table(path: Path, target: str, **options: Any) -> Any:
    """The CSV as features, fitted on its training part."""
    from fedpriv.data.tables import load_table
    from fedpriv.integral.tabular import prepare

    frame = load_table(str(path)).to_pandas()
    return prepare(frame, target, **options)


def _data(table: Any) -> Any:
    from fedpriv.integral.procedure import Data

    return Data(
        train_features=table.train_features,
        train_labels=table.train_labels,
        test_features=table.test_features,
        test_labels=table.test_labels,
        classes=table.classes,
    )


def _schedule(epochs: int, batch_size: int, learning_rate: float, optimizer: str) -> Any:
    from fedpriv.integral.stacked_training import Schedule

    kind: Any = optimizer
    return Schedule(epochs=epochs, batch_size=batch_size, learning_rate=learning_rate, optimizer=kind)


def _one_of(key: str, value: str, known: Sequence[str]) -> Any:
    if value not in known:
        raise InputError(f"{key} = {value!r}: must be one of {', '.join(known)}")
    return value


def _about(table: Any) -> dict[str, Any]:
    return {
        "num_train_records": len(table.train_labels),
        "num_test_records": len(table.test_labels),
        "num_features": len(table.feature_names),
        "classes": list(table.classes),
        "left_out_columns": dict(table.left_out),
        "num_unlabelled": table.num_unlabelled,
    }


def _selection(found: Any, settings: Any) -> dict[str, Any]:
    from fedpriv.integral.selection import statement

    clusters = [
        {
            "recurrence": cluster.recurrence,
            "k": cluster.anonymity.k,
            "holds": cluster.anonymity.holds,
            "intersection_is_empty": cluster.anonymity.intersection_is_empty,
            "largest_difference": cluster.largest_difference,
            "members": list(cluster.members),
            **_flat(mean),
            "member_test_accuracy": [found.members[row].test.accuracy for row in cluster.members],
            "statement": statement(cluster, settings.epsilon, settings.measure),
        }
        for cluster, mean in zip(found.clusters, found.means, strict=True)
    ]
    looks = [
        {
            "epochs": look.epochs,
            "epsilon": look.epsilon,
            "recurrence": look.recurrence,
            "k": look.k,
            "test_accuracy": None if look.mean is None else look.mean.test.accuracy,
            "plain_test_accuracy": look.plain.test.accuracy,
            "majority_test_accuracy": found.majority.test.accuracy,
        }
        for look in found.looks
    ]
    return {
        "epsilon": settings.epsilon,
        "measure": settings.measure,
        "clustering": settings.clustering,
        "num_subsamples": len(found.subsamples.records),
        "subsample_size": settings.subsample_size,
        "share_left_over": found.subsamples.share_left_over,
        "recurrence": found.cluster_sizes[0],
        "cluster_sizes": list(found.cluster_sizes),
        "clusters": clusters,
        "plain": _flat(found.plain),
        "majority": _flat(found.majority),
        "looks": looks,
        "is_differentially_private": False,
    }


def _flat(both: Any) -> dict[str, float]:
    return {
        f"{part}_{name}": value for part in ("train", "test") for name, value in asdict(getattr(both, part)).items()
    }


def _selection_lines(values: dict[str, Any]) -> list[str]:
    share = f"{100 * values['share_left_over']:.1f} % left over"
    lines = [
        f"{values['num_train_records']} training and {values['num_test_records']} test records, "
        f"{values['num_features']} features, {len(values['classes'])} classes",
        f"{values['num_subsamples']} disjoint subsamples of {values['subsample_size']} training records, {share}",
    ]
    lines += [f"column {name} left out: {reason}" for name, reason in values["left_out_columns"].items()]
    if values["num_unlabelled"]:
        lines.append(f"{values['num_unlabelled']} records without a class left out")
    lines += ["", "epochs  epsilon  largest cluster    k  accuracy of its mean  plain model  majority class"]
    for look in values["looks"]:
        mean = "none" if look["test_accuracy"] is None else f"{look['test_accuracy']:.4f}"
        lines.append(
            f"{look['epochs']:>6}  {look['epsilon']:>7g}  {look['recurrence']:>15}  {look['k']:>3}  {mean:>20}  "
            f"{look['plain_test_accuracy']:>11.4f}  {look['majority_test_accuracy']:>14.4f}"
        )
    lines.append("")
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
        lines.append("The first mean is no better than the guess at the majority class.")
    return lines + [f"written: {path}" for path in values.get("files", [])]


def _write_means(out: Path, network: Any, table: Any, found: Any, settings: Any) -> list[Path]:
    """The means as safetensors files, with what their inputs and outputs mean as metadata."""
    import torch
    from safetensors.torch import save_file

    from fedpriv.integral.networks import from_vectors

    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, cluster in enumerate(found.clusters, start=1):
        named = from_vectors(network, torch.from_numpy(cluster.mean).float())
        about = {
            "features": json.dumps(table.feature_names),
            "classes": json.dumps(table.classes),
            "epsilon": str(settings.epsilon),
            "k": str(cluster.anonymity.k),
        }
        path = out / f"mean-{number}.safetensors"
        save_file({name: value.contiguous() for name, value in named.items()}, path, metadata=about)
        paths.append(path)
    return paths


def _print(values: dict[str, Any], lines: Sequence[str], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(_finite(values)))
    else:
        typer.echo("\n".join(lines))


def _finite(value: Any) -> Any:
    """The value with null for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
