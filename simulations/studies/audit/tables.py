"""The tables of results/audit.md from the lines of the study."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from simulations.studies.harness import Line, fill, table


def write(page: Path, lines: Sequence[Line]) -> None:
    """Write the page's tables; those whose lines are missing stay as they are."""
    kinds = {name: "membership" if name == "forms" else name.replace("-", " ") for name in TABLES}
    found = {name: [line for line in lines if line["kind"] == kind] for name, kind in kinds.items()}
    fill(page, {name: TABLES[name](own) for name, own in found.items() if own})


def _median(lines: Sequence[Line], name: str) -> float:
    return float(np.median([line[name] for line in lines]))


def _groups(lines: Sequence[Line], *names: str) -> dict[tuple[Any, ...], list[Line]]:
    """The lines by their values of these keys, in the order of the first."""
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        groups.setdefault(tuple(line[name] for name in names), []).append(line)
    return groups


def _seconds(lines: Sequence[Line]) -> str:
    return f"{len(lines)} runs, {sum(line['seconds'] for line in lines):.0f} s."


def _claim(line: Line) -> str:
    return "infinite" if line["epsilon"] is None else f"{line['epsilon']:.2f}"


def _local(lines: Sequence[Line]) -> str:
    rows = []
    groups = _groups(lines, "schedule", "claim", "num_canaries")
    most = max(num for _, _, num in groups)
    for (schedule, claim, num), group in sorted(groups.items(), key=itemgetter(0)):
        if num < most:
            continue
        names = ("one_run", "ideal_one_run", "searched", "f_dp", "ideal_f_dp")
        rows.append((schedule, f"{claim:g}", *(f"{_median(group, name):.2f}" for name in names)))
    largest = [max(line["one_run"], line["searched"], line["f_dp"]) / line["claim"] for line in lines]
    above = sum(share > 1 for share in largest)
    headers = ("schedule", "claim", "one run", "ideal", "searched", "f-DP", "ideal f-DP")
    told = (
        f"{most} canaries. With any number of canaries, the largest bound of a run is at most {max(largest):.2f} of "
        f"its claim, and above it in {above} of {len(lines)} runs. {_seconds(lines)}"
    )
    return f"{table(headers, rows)}\n\n{told}"


def _views(lines: Sequence[Line]) -> str:
    rows = []
    for (schedule,), group in _groups(lines, "schedule").items():
        claims = [f"{group[0][f'claim_{view}']:.2f}" for view in ("local", "rho", "aggregate")]
        local, total = f"{_median(group, 'local'):.2f}", f"{_median(group, 'aggregate'):.2f}"
        rows.append((schedule, claims[0], local, claims[1], local, claims[2], total, len(group)))
    headers = ("schedule", "claim local", "found", "claim rho", "found", "claim aggregate", "found", "seeds")
    return table(headers, rows)


def _clients(lines: Sequence[Line]) -> str:
    rows = []
    for (claim,), group in sorted(_groups(lines, "claim").items(), key=itemgetter(0)):
        above = f"{sum(line['one_run'] > line['claim'] for line in group)} of {len(group)}"
        medians = [f"{_median(group, name):.2f}" for name in ("one_run", "ideal_one_run")]
        largest = f"{max(line['one_run'] for line in group):.2f}"
        rows.append((f"{claim:g}", group[0]["num_canaries"], group[0]["num_guesses"], *medians, largest, above))
    return table(("claim", "clients", "guesses", "one run", "ideal", "largest", "above the claim"), rows)


def _broken(lines: Sequence[Line]) -> str:
    rows = (
        (
            line["name"], line["detector"], line["configuration"], f"{line['num_flagged']} of {line['num_seeds']}",
            f"{line['median']:.3g} ({line['limit']:.4g})", f"{line['num_flagged_correct']} of {line['num_seeds']}",
            f"{line['median_correct']:.3g} ({line['limit_correct']:.4g})",
        )
        for line in lines
    )  # fmt: skip
    headers = ("broken", "detector", "configuration", "flagged", "median (limit)", "correct one flagged")
    return table((*headers, "median (limit)"), rows)


def _share(line: Line, how: str = "") -> str:
    return f"{100 * line[f'num_exceeding{how}'] / line['trials']:.2f} %"


def _coverage(lines: Sequence[Line]) -> str:
    rows = ((line["mechanism"], f"{line['epsilon']:.3g}", line["num_canaries"], _share(line)) for line in lines)
    return table(("mechanism", "epsilon", "canaries", "above"), rows)


def _graded(lines: Sequence[Line]) -> str:
    hows = ("_fixed", "_unpaid", "_paid")
    rows = ((f"{each['epsilon']:g}", each["num_canaries"], *(_share(each, how) for how in hows)) for each in lines)
    return table(("epsilon", "canaries", "fixed", "best, unpaid", "best, paid"), rows)


def _membership(lines: Sequence[Line]) -> str:
    rows = (
        (
            line["corpus"], line["condition"], name, _auc(attack), _at_one_percent(attack),
            f"{line['loss_members']:.2f}, {line['loss_others']:.2f}", f"{line['accuracy']:.3f}",
        )
        for line in lines
        for name, attack in line["attacks"].items()
    )  # fmt: skip
    counts = (f"{e['corpus']} {e['num_members']} and {e['num_others']}" for e in lines if e["epsilon"] is None)
    stems = (f"{line['corpus']} {line['condition']}" for line in lines)
    plots = (f"![ROC, {stem}](audit-roc-{stem.replace(' ', '-')}.png)" for stem in stems)
    told = (
        f"Members and non-members: {'; '.join(counts)}; the mean losses are of these. Accuracy is on test records. "
        f"{_seconds(lines)}"
    )
    headers = ("corpus", "run", "attack", "AUC", "true positives at 1 % false positives", "mean losses", "accuracy")
    return "\n\n".join((table(headers, rows), told, *plots))


def _auc(attack: Mapping[str, Any]) -> str:
    return "{:.3f} [{:.3f}, {:.3f}]".format(*attack["auc"])


def _at_one_percent(attack: Mapping[str, Any]) -> str:
    _, found, low, high = attack["rates"][-1]
    return f"{100 * found:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def _forms(lines: Sequence[Line]) -> str:
    rows: list[tuple[str, ...]] = []
    for line in lines:
        forms = {"as trained": line["attacks"]["LiRA"], **line["forms"], "uploads": line["uploads"]}
        rows.extend(
            (
                line["corpus"], line["condition"], form,
                f"{found['distance']:.2g}" if "distance" in found else "", _auc(found), _at_one_percent(found),
            )
            for form, found in forms.items()
        )  # fmt: skip
    headers = ("corpus", "run", "attacked", "distance", "AUC of LiRA", "true positives at 1 % false positives")
    return table(headers, rows)


def _extraction(lines: Sequence[Line]) -> str:
    rows = (
        (
            line["condition"], _claim(line), f"{line['num_completed']} of {line['num_included']}",
            f"{line['num_completed_left_out']} of {line['num_left_out']}",
        )
        for line in lines
    )  # fmt: skip
    headers = ("run", "epsilon", "completed of those included", "completed of those left out")
    return f"{table(headers, rows)}\n\n{_seconds(lines)}"


def _full_model(lines: Sequence[Line]) -> str:
    rows = (
        (
            line["condition"], _claim(line), f"{line['num_correct']} of {line['num_guesses']}", f"{line['auc']:.2f}",
            f"{line['epsilon_lower']:.2f}", f"{line['epsilon_lower_f_dp']:.2f}", f"{line['test_accuracy']:.3f}",
        )
        for line in lines
    )  # fmt: skip
    headers = ("run", "largest epsilon", "right guesses", "AUC", "lower bound", "by f-DP", "test accuracy")
    return f"{table(headers, rows)}\n\n{_seconds(lines)}"


def _language_models(lines: Sequence[Line]) -> str:
    rows = []
    for (condition,), group in _groups(lines, "condition").items():
        group = sorted(group, key=itemgetter("seed"))
        each = [", ".join(f"{line[name]:.2f}" for line in group) for name in ("epsilon_lower", "epsilon_lower_f_dp")]
        ideal = f"{_median(group, 'ideal'):.2f}, {_median(group, 'ideal_f_dp'):.2f}" if "ideal" in group[0] else ""
        right = ", ".join(str(line["num_correct"]) for line in group)
        drop = ", ".join(f"{line['drop_epsilon_lower']:.2f}" for line in group)
        rows.append((condition, f"{right} of {group[0]['num_guesses']}", *each, ideal, drop))
    headers = ("epsilon", "right guesses", "lower bounds", "by f-DP", "ideal attacker", "by the drop in loss")
    return f"{table(headers, rows)}\n\n{_seconds(lines)}"


def _vault(lines: Sequence[Line]) -> str:
    rows = (
        (
            line["observer"], f"{line['charged']:.2f}", f"{line['found']:.2f}",
            f"{100 * line['found'] / line['charged']:.0f} %",
            f"{line['num_false_positives']} of {line['num_without']}",
            f"{line['num_false_negatives']} of {line['num_with']}",
        )
        for line in lines
    )  # fmt: skip
    headers = ("reads", "charged", "lower bound", "share", "accused without the record", "missed with it")
    return f"{table(headers, rows)}\n\n{_seconds(lines)}"


def _repeated(lines: Sequence[Line]) -> str:
    rows = (
        (
            how, line["num_runs"], f"{line['epsilon']:g}", f"{line[f'{name}_mean']:.2f}",
            f"{line[f'{name}_largest']:.2f}", line[f"{name}_above"],
        )
        for line in lines
        for how, name in (("one run", "epsilon_lower"), ("f-DP", "epsilon_lower_f_dp"))
    )  # fmt: skip
    return table(("bound", "runs", "claim", "mean", "largest", "above the claim"), rows)


TABLES: Mapping[str, Callable[[Sequence[Line]], str]] = {
    "local": _local,
    "views": _views,
    "clients": _clients,
    "broken": _broken,
    "coverage": _coverage,
    "graded": _graded,
    "membership": _membership,
    "forms": _forms,
    "extraction": _extraction,
    "full-model": _full_model,
    "language-models": _language_models,
    "vault": _vault,
    "repeated": _repeated,
}
"""{block of the page: from the lines of that kind}."""
