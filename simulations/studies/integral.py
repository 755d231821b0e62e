"""Integrally private model selection on Adult and AI4I 2020, as in Varshney and Torra 2023, sections 2 and 4.

    python -m simulations.studies.integral run|tables [--data FOLDER] [--runs results/integral.jsonl]

FOLDER holds the UCI tables adult.csv.gz and ai4i2020.csv.gz with header lines. `run` trains the models of all
subsamples, measures recurrence and accuracy after every epoch, and runs the model comparison attack, on small training
sets and on sets of the paper's size; each selection and attack is a line. `tables` makes those of results/integral.md,
and its plots. Lines that are there are not computed again.

Adult has 32,561 records, and AI4I 10,000 with the paper's 8 features; 70 % of them are for training. All networks see
their batches of 32 in one order. DP-SGD trains DNN-1 by 300 steps of 512 expected records, at rate 0.5 and clip norm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure

from simulations.studies._integral_runs import cells, run
from simulations.studies.harness import Line, fill, lines, parser, run_missing, table

# Table 2 of the paper: recurrence and test accuracy; section 4: how many models there were in all.
PUBLISHED = {
    "Adult": {"dnn-1": (10, 0.8387), "dnn-2": (89, 0.7797), "dnn-3": (16, 0.8286), "dnn-4": (36, 0.8284)},
    "AI4I": {"dnn-1": (17, 0.9647), "dnn-2": (19, 0.9723), "dnn-3": (12, 0.9683), "dnn-4": (10, 0.9747)},
}
PUBLISHED_MODELS = {"Adult": 47, "AI4I": 19}

KINDS = ("select", "attack", "attack-useful")


def write(page: Path, runs: Path) -> None:
    """Write the page's tables from the lines in the study's file of runs, and its plots next to it."""
    found = lines(runs)
    selections, attacks, useful = ([line for line in found if line["kind"] == kind] for kind in KINDS)
    blocks = {
        "selection": _selection_table(selections),
        "plots": _plots(page.parent, selections),
        "dp-sgd": _private_table(selections),
        "attacks": "\n\n".join([_attack_tables(attacks), *map(_useful, useful)]),
    }
    fill(page, blocks)


def _selection_table(selections: Sequence[Line]) -> str:
    first = _first_way(selections, None)
    headers = (
        *("models", "epoch", "recurrence (k)", "accuracy of the mean", "F1", "plain model, same epoch"),
        "paper: recurrence, accuracy",
    )
    majorities = {line["data"]: _majority(line) for line in first}
    told = " and ".join(f"{accuracy:.4f} on {name}" for name, accuracy in majorities.items())
    ahead = [line for line in first if _is_ahead(line)]
    behind = ", ".join(f"{' '.join(_named(line))} ({_recurrence_of(line)})" for line in first if line not in ahead)
    return (
        f"With {first[0]['way']}:\n\n{table(headers, map(_selection_row, ahead))}\n\n"
        f"The majority class has {told}. The mean is not above it with {behind or 'none'}. By other trainings it is "
        f"above it only here:\n\n{_other_ways(selections)}"
    )


def _is_ahead(line: Line) -> bool:
    """Whether the chosen mean beats the majority class."""
    return bool(line["chosen"]) and line["chosen"]["mean"]["test"]["accuracy"] > _majority(line)


def _recurrence_of(line: Line) -> str:
    return f"{line['chosen']['recurrence']} of {line['num_subsamples']}" if line["chosen"] else "no cluster"


def _other_ways(selections: Sequence[Line]) -> str:
    """For each other way of training the selections whose mean beats the majority class."""
    ahead: dict[str, list[str]] = {line["way"]: [] for line in selections if line["way"] != selections[0]["way"]}
    for line in selections:
        if line["way"] != selections[0]["way"] and _is_ahead(line):
            accuracy = line["chosen"]["mean"]["test"]["accuracy"]
            ahead[line["way"]].append(f"{' '.join(_named(line))} ({_recurrence_of(line)}, {accuracy:.4f})")
    whole = [
        f"{' '.join(_named(line))} ({own['recurrence']} of {own['num_subsamples']}, {own['accuracy']:.4f})"
        for line in _first_way(selections, None)
        if (own := line["whole_table"])["accuracy"] > _majority(line)
    ]
    ahead["As the table, on subsamples of all records, test records among them"] = whole
    return "\n".join(f"- {way}: {', '.join(found) or 'nowhere'}." for way, found in ahead.items())


def _named(line: Line) -> tuple[str, str]:
    return line["data"], line["architecture"].upper()


def _majority(line: Line) -> float:
    return float(line["majority"]["test"]["accuracy"])


def _selection_row(line: Line) -> Sequence[str]:
    chosen, test = line["chosen"], line["chosen"]["mean"]["test"]
    count, accuracy = PUBLISHED[line["data"]][line["architecture"]]
    return (
        " ".join(_named(line)),
        str(chosen["epochs"]),
        f"{_recurrence_of(line)} ({chosen['k']})",
        f"{test['accuracy']:.4f}",
        f"{test['f1']:.3f}",
        f"{chosen['plain']['test']['accuracy']:.4f}",
        f"{count} of {PUBLISHED_MODELS[line['data']]}, {accuracy:.4f}",
    )


def _private_table(selections: Sequence[Line]) -> str:
    first = [line for line in _first_way(selections, None) if line["private"]]
    rows = []
    for line in first:
        tests = (private["test"] for private in line["private"])
        found = (f"{test['accuracy']:.3f} ({test['f1']:.3f})" for test in tests)
        rows.append([line["data"], f"{line['private'][0]['delta']:.1e}", *found])
    return table(("", "delta", *(f"epsilon {private['asked']:g}" for private in first[0]["private"])), rows)


def _attack_tables(attacks: Sequence[Line]) -> str:
    attack, game = attacks[0], attacks[0]["game"]
    text = (
        f"Adult, DNN-1: {game['num_trials']} targets, each with {2 * game['size']} candidates, half of which were "
        f"used. The intruder trains on {game['num_subsamples']} guesses and takes the records that the best "
        f"{game['num_best']} share for members. In bold: it beats chance."
    )
    rows = [(row["name"], _success(row), f"{row['test_accuracy']:.3f}") for row in attack["rows"] if not row["note"]]
    headers = ("target", f"success by `{attack['comparison']}`", "test accuracy")
    without = [row["name"] for row in attack["rows"] if row["note"]]
    told = f"Without a model to attack: {'; '.join(without)}." if without else ""
    return f"{text}\n\n{table(headers, rows)}\n\n{told}".rstrip()


def _success(row: Line) -> str:
    mark = "**" if row["beats_chance"] else ""
    return f"{mark}{row['success']:.3f}{mark} ({row['low']:.3f} to {row['high']:.3f})"


def _useful(line: Line) -> str:
    game = line["game"]
    found = (f"{row['name']}, {_success(row)} at accuracy {row['test_accuracy']:.3f}" for row in line["rows"])
    return (
        f"Training sets of the paper's {game['size']} records, {line['architecture'].upper()} after {line['epochs']} "
        f"epochs, where the mean has learnt something, {game['num_trials']} targets, {game['num_subsamples']} guesses, "
        f"the best {game['num_best']}: {'; '.join(found)}."
    )


def _plots(folder: Path, selections: Sequence[Line]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    figures = {
        "integral-recurrence.png": (_recurrence(selections), "models in the largest cluster by epoch"),
        "integral-test-f1.png": (
            _members(selections),
            "F1: members on test records, their mean on training (filled) and test records, the plain model",
        ),
    }
    for name, (figure, _) in figures.items():
        figure.savefig(folder / name, dpi=110, metadata={"Software": None})
    return "\n\n".join(f"![{shows}]({name})" for name, (_, shows) in figures.items())


def _recurrence(selections: Sequence[Line]) -> Figure:
    """The share of models in the largest cluster and the accuracy of its mean; a row for each table."""
    names = list(dict.fromkeys(line["data"] for line in selections))
    figure = Figure(figsize=(9, 3.2 * len(names)), layout="constrained")
    for row, name in enumerate(names):
        share, accuracy = (figure.add_subplot(len(names), 2, 2 * row + column) for column in (1, 2))
        for line in _first_way(selections, name):
            looks = line["looks"]
            with_mean = [look for look in looks if look["mean"]]
            shares = [look["recurrence"] / line["num_subsamples"] for look in looks]
            share.plot([look["epochs"] for look in looks], shares, marker=".", label=line["architecture"].upper())
            values = [look["mean"]["accuracy"] for look in with_mean]
            accuracy.plot([look["epochs"] for look in with_mean], values, marker=".")
            accuracy.axhline(line["majority"]["test"]["accuracy"], color="grey", linestyle=":")
        share.set(title=f"{name}: models in the largest cluster", xlabel="epochs", ylim=(0, 1.05))
        accuracy.set(title=f"{name}: test accuracy of its mean (dotted: majority)", xlabel="epochs")
        share.legend(frameon=False, fontsize=8)
    return figure


def _members(selections: Sequence[Line]) -> Figure:
    """F1 of each member (light), of the mean (filled on training, hollow on test records) and of the plain model."""
    names = list(dict.fromkeys(line["data"] for line in selections))
    figure = Figure(figsize=(4.5 * len(names), 3.4), layout="constrained")
    for column, name in enumerate(names, start=1):
        axes = figure.add_subplot(1, len(names), column)
        lines = [line for line in _first_way(selections, name) if line["chosen"]]
        for x, line in enumerate(lines):
            chosen = line["chosen"]
            values = [member["f1"] for member in chosen["members"]]
            axes.scatter([x] * len(values), values, color="tab:blue", alpha=0.25, s=18)
            axes.scatter([x], [chosen["mean"]["train"]["f1"]], color="tab:blue", s=45)
            axes.scatter([x], [chosen["mean"]["test"]["f1"]], facecolors="none", edgecolors="tab:blue", s=90)
            axes.hlines(line["plain"]["train"]["f1"], x - 0.3, x + 0.3, color="black")
            axes.hlines(line["plain"]["test"]["f1"], x - 0.3, x + 0.3, color="black", linestyle="--")
        axes.set_xticks(range(len(lines)), [line["architecture"].upper() for line in lines])
        axes.set(title=f"{name}: F1 (macro)", ylim=(0.3, 1))
    return figure


def _first_way(selections: Sequence[Line], name: str | None) -> list[Line]:
    way = selections[0]["way"]
    return [line for line in selections if line["way"] == way and name in (None, line["data"])]


def main() -> None:
    """Do one step of the study."""
    arguments = parser(__doc__, "integral").parse_args()
    if arguments.step == "tables":
        write(arguments.page, arguments.runs)
        return
    torch.set_num_threads(1)
    measure = partial(run, arguments.data)
    run_missing(arguments.runs, cells(), measure, lambda line: str(line["kind"]), until=arguments.until)


if __name__ == "__main__":
    main()
