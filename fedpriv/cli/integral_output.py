"""What `fedpriv integral` prints and writes: values for JSON, lines for a reader, files of the means."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from fedpriv.integral.procedure import Recommendation, SelectionSettings, TrainAndTest
    from fedpriv.integral.subsamples import Advice
    from fedpriv.integral.tabular import PreparedTable


def about_table(table: PreparedTable) -> dict[str, Any]:
    """What became of the CSV."""
    return {
        "num_train_records": len(table.train_labels),
        "num_test_records": len(table.test_labels),
        "num_features": len(table.feature_names),
        "classes": list(table.classes),
        "left_out_columns": dict(table.left_out),
        "num_unlabelled": table.num_unlabelled,
    }


def selection_values(found: Recommendation, settings: SelectionSettings) -> dict[str, Any]:
    """What the procedure found, as `integral select --json` prints it."""
    from fedpriv.integral.selection import statement

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
        {
            "epochs": look.epochs,
            "epsilon": look.epsilon,
            "recurrence": look.recurrence,
            "k": look.k,
            "test_accuracy": None if look.mean is None else look.mean.test.accuracy,
            "plain_test_accuracy": look.plain.test.accuracy,
            "majority_test_accuracy": found.majority.test.accuracy,
        }
        for look in found.snapshots
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
        lines.append("The first mean is no better than guessing the majority class.")
    return lines + [f"written: {path}" for path in values.get("files", [])]


def write_means(
    out: Path, network: nn.Module, table: PreparedTable, found: Recommendation, settings: SelectionSettings
) -> list[Path]:
    """Write the means as safetensors files, whose metadata names their inputs and outputs."""
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


def attack_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table with a line for each target of the attack."""
    lines = [f"{'target':<44} {'success':>7}  95 % interval   test accuracy"]
    for row in rows:
        if row["note"]:
            lines.append(f"{row['name']:<44} {row['note']}")
            continue
        interval = f"{row['low']:.3f} to {row['high']:.3f}"
        verdict = "  beats chance" if row["beats_chance"] else ""
        lines.append(f"{row['name']:<44} {row['success']:>7.3f}  {interval}  {row['test_accuracy']:>13.3f}{verdict}")
    return lines


def advice_lines(architecture: str, features: int, classes: int, records: int, found: Advice) -> list[str]:
    """The sizes that the rules ask for, and how many disjoint subsamples of each size the records give."""
    lines = [f"{architecture}: {found.num_parameters} weights with {features} features and {classes} classes"]
    sizes = {"ten records per weight": found.rule_of_thumb, "PAC form, constant 1": found.pac, "given": found.chosen}
    for name, size in sizes.items():
        if size is not None:
            few = "" if size.num_subsamples >= 2 else "; too few to select from"
            lines.append(f"{name}: {size.records} records, {size.num_subsamples} disjoint subsamples of {records}{few}")
    return lines
