"""Integrally private model selection on the public tables at hand, as in Varshney and Torra 2023, sections 2 and 4.

    python -m simulations.studies.integral run|tables [--data FOLDER] [--runs results/integral.jsonl]

FOLDER holds what `fedpriv reproduce data` makes; a table that is missing is skipped. `run` trains the models of all
subsamples, measures recurrence and accuracy after every epoch, and runs the model comparison attack, on small training
sets and on sets of the paper's size; each selection and attack is a line. `tables` makes those of results/integral.md,
and its plots. Lines that are there are not computed again.

Adult has 32,561 records, and whole 48,842; AI4I has the paper's 8 features. 70 % of the records are for training. All
networks see their batches of 32 in one order. DP-SGD trains DNN-1 by 300 steps of 512 expected records, at rate 0.5 and
clip norm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from simulations.studies._integral_runs import FIRST, SOURCES, SelectionCell, cells, run
from simulations.studies.harness import Line, fill, lines, parser, run_missing, table

KINDS = ("select", "attack", "attack-useful")


def write(page: Path, runs: Path) -> None:
    """Write the page's tables from the lines in the study's file of runs, and its plots next to it."""
    found = lines(runs)
    selections, attacks, useful = ([line for line in found if line["kind"] == kind] for kind in KINDS)
    usual = [line for line in selections if "whole_table" in line]
    tried = [line for line in selections if not line["size"] and _named(line) == ("Adult", "DNN-1")]
    first = [line for line in usual if line["way"] == FIRST]
    blocks = {
        "selection": _selection_table(usual),
        "tried": _tried_table(tried),
        "plots": _plots(page.parent, first),
        "dp-sgd": _private_table(first),
        "attacks": "\n\n".join([_attack_tables(attacks), *map(_useful, useful)]),
    }
    fill(page, blocks)


def _selection_table(usual: Sequence[Line]) -> str:
    headers = ("training", "models", *("epoch", "recurrence (k)", "accuracy", "F1") * 2, "plain model")
    rows = [
        (line["way"], " ".join(_named(line)), *_best(line, "chosen"), *_best(line, "by_mean"), _accuracy(line["plain"]))
        for line in usual
    ]
    majority = {line["data"]: line["majority"]["test"]["accuracy"] for line in usual}
    told = ", ".join(f"{accuracy:.4f} on {name}" for name, accuracy in majority.items())
    whole = [
        f"{' '.join(_named(line))} {own['recurrence']} of {own['num_subsamples']}, {own['accuracy']:.4f}"
        for line in usual
        if line["way"] == FIRST and (own := line["whole_table"])
    ]
    return (
        f"The first four figures are by the largest difference of a weight, the next four by the mean difference. The "
        f"majority class has {told}.\n\n{table(headers, rows)}\n\nBy the largest difference, on subsamples of all "
        f"records, test records among them, with {FIRST}: {'; '.join(whole)}."
    )


def _best(line: Line, measure: str) -> Sequence[str]:
    """Epoch, recurrence with k, test accuracy and F1 of the best mean."""
    found = line[measure]
    if not found:
        return "", "no cluster", "", ""
    recurrence = f"{found['recurrence']} of {line['num_subsamples']} ({found['k']})"
    return str(found["epochs"]), recurrence, _accuracy(found["mean"]), f"{found['mean']['test']['f1']:.3f}"


def _accuracy(model: Line) -> str:
    return f"{model['test']['accuracy']:.4f}"


def _tried_table(tried: Sequence[Line]) -> str:
    headers = ("training", "initial weights", "seed", *("recurrence (k)", "accuracy") * 2, "plain model")
    rows = []
    for line in sorted(tried, key=lambda line: (line["way"], line["start"], line["seed"]), reverse=True):
        figures = (each for measure in ("chosen", "by_mean") for each in _best(line, measure)[1:3])
        rows.append((line["way"], line["start"], line["seed"], *figures, _accuracy(line["plain"])))
    return table(headers, rows)


def _named(line: Line) -> tuple[str, str]:
    return line["data"], line["architecture"].upper()


def _private_table(first: Sequence[Line]) -> str:
    rows = []
    for line in (line for line in first if line["private"]):
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


def _plots(folder: Path, first: Sequence[Line]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    figures = {
        "integral-training.png": (
            _curves(first),
            "on training records by epoch: top five clusters' models and means, the plain model, DP-SGD",
        ),
        "integral-test-f1.png": (
            _members(first),
            "F1: members on test records, their mean on training (filled) and test records, the plain model",
        ),
    }
    for name, (figure, _) in figures.items():
        figure.savefig(folder / name, dpi=110, metadata={"Software": None})
    return "\n\n".join(f"![{shows}]({name})" for name, (_, shows) in figures.items())


def _curves(first: Sequence[Line]) -> Figure:
    """F1 and loss of DNN-1 on training records, by the mean difference; a row for each table."""
    drawn = [line for line in first if line["curves"]]
    figure = Figure(figsize=(9, 3.2 * len(drawn)), layout="constrained")
    for row, line in enumerate(drawn):
        for column, name in enumerate(("f1", "loss")):
            axes = figure.add_subplot(len(drawn), 2, 2 * row + column + 1)
            for epoch, look in enumerate(line["curves"], start=1):
                members, means = ([each[column] for each in look[kind]] for kind in ("members", "means"))
                axes.scatter([epoch] * len(members), members, color="tab:blue", alpha=0.15, s=10, label="member")
                axes.scatter([epoch] * len(means), means, color="tab:blue", s=18, label="mean")
            epochs = range(1, len(line["curves"]) + 1)
            axes.plot(epochs, [look["plain"][column] for look in line["curves"]], color="black", label="plain model")
            for private, style in zip(line["private"], ("--", "-.", ":"), strict=True):
                label = f"DP-SGD, epsilon {private['asked']:g}"
                axes.axhline(private["train"][name], color="tab:red", linestyle=style, label=label)
            axes.set(title=f"{line['data']}: {'F1 (macro)' if name == 'f1' else name}", xlabel="epochs")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return _explained(figure)


def _members(first: Sequence[Line]) -> Figure:
    """F1 of each member (light), of the mean (filled on training, hollow on test records) and of the plain model."""
    names = list(dict.fromkeys(line["data"] for line in first))
    figure = Figure(figsize=(4.5 * len(names), 3.4), layout="constrained")
    for column, name in enumerate(names, start=1):
        axes = figure.add_subplot(1, len(names), column)
        lines = [line for line in first if line["data"] == name]
        for x, line in enumerate(lines):
            chosen = line["by_mean"]
            values = [member["f1"] for member in chosen["members"]]
            axes.scatter([x] * len(values), values, color="tab:blue", alpha=0.25, s=18, label="member, test")
            axes.scatter([x], [chosen["mean"]["train"]["f1"]], color="tab:blue", s=45, label="mean, training")
            of_mean, plain, ends = chosen["mean"]["test"]["f1"], line["plain"], (x - 0.3, x + 0.3)
            axes.scatter([x], [of_mean], facecolors="none", edgecolors="tab:blue", s=90, label="mean, test")
            axes.hlines(plain["train"]["f1"], *ends, color="black", label="plain model, training")
            axes.hlines(plain["test"]["f1"], *ends, color="black", linestyle="--", label="plain model, test")
        axes.set_xticks(range(len(lines)), [line["architecture"].upper() for line in lines])
        axes.set(title=f"{name}: F1 (macro)", ylim=(0.3, 1))
    return _explained(figure)


def _explained(figure: Figure) -> Figure:
    """The figure with one legend above all axes."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    by_label = dict(zip(labels, handles, strict=True))
    lines, texts = list(by_label.values()), list(by_label)
    figure.legend(lines, texts, loc="outside upper center", ncols=6, fontsize=8, frameon=False)
    return figure


def main() -> None:
    """Do one step of the study."""
    arguments = parser(__doc__, "integral").parse_args()
    if arguments.step == "tables":
        write(arguments.page, arguments.runs)
        return
    torch.set_num_threads(1)
    measure = partial(run, arguments.data)
    missing = {name: each.file for name, each in SOURCES.items() if not (arguments.data / each.file).is_file()}
    for name, file in missing.items():
        print(f"{name}: skipped: data = {arguments.data}: holds no {file}; `fedpriv reproduce data` tells its address")
    here = [cell for cell in cells() if (cell.data if isinstance(cell, SelectionCell) else "Adult") not in missing]
    run_missing(arguments.runs, here, measure, _told, until=arguments.until, only=arguments.only)


def _told(line: Line) -> str:
    """The best mean by each measure of a selection's line; the targets of an attack's."""
    if line["kind"] != "select":
        return f"{len(line['rows'])} targets"
    largest, mean = (", ".join(_best(line, measure)[1:3]) for measure in ("chosen", "by_mean"))
    return f"{largest}; by the mean difference {mean}"


if __name__ == "__main__":
    main()
