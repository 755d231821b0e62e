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


def _claim(line: Line) -> str:
    return "infinite" if line["epsilon"] is None else f"{line['epsilon']:.2f}"


def _local(lines: Sequence[Line]) -> str:
    most = max(line["num_canaries"] for line in lines)
    by_claim: dict[str, dict[float, str]] = {}
    groups = _groups([line for line in lines if line["num_canaries"] == most], "schedule", "claim")
    for (schedule, claim), group in sorted(groups.items(), key=itemgetter(0)):
        names = ("one_run", "ideal_one_run", "f_dp", "ideal_f_dp")
        one, ideal, f_dp, ideal_f_dp = (f"{_median(group, name):.2f}" for name in names)
        by_claim.setdefault(schedule, {})[claim] = f"{one} ({ideal}), {f_dp} ({ideal_f_dp})"
    claims = sorted({claim for _, claim in groups})
    rows = [(schedule, *(found.get(claim, "") for claim in claims)) for schedule, found in by_claim.items()]
    largest = [max(line["one_run"], line["searched"], line["f_dp"]) / line["claim"] for line in lines]
    above = sum(share > 1 for share in largest)
    told = (
        f"{most} canaries. With any number of canaries, the largest bound of a run is at most {max(largest):.2f} of "
        f"its claim, and above it in {above} of {len(lines)} runs."
    )
    return f"{table(('schedule', *(f'claim {claim:g}' for claim in claims)), rows)}\n\n{told}"


def _views(lines: Sequence[Line]) -> str:
    rows = []
    for (schedule,), group in _groups(lines, "schedule").items():
        claims = [f"{group[0][f'claim_{view}']:.2f}" for view in ("local", "rho", "aggregate")]
        local, total = f"{_median(group, 'local'):.2f}", f"{_median(group, 'aggregate'):.2f}"
        rows.append((schedule, claims[0], claims[1], local, claims[2], total))
    return table(("schedule", "claim local", "claim rho", "found", "claim aggregate", "found"), rows)


def _clients(lines: Sequence[Line]) -> str:
    groups = sorted(_groups(lines, "claim").items(), key=itemgetter(0))
    cells = (
        f"{_median(group, 'one_run'):.2f} ({_median(group, 'ideal_one_run'):.2f}), largest "
        f"{max(line['one_run'] for line in group):.2f}"
        for _, group in groups
    )
    above = sum(line["one_run"] > line["claim"] for line in lines)
    headers = tuple(f"claim {claim:g}" for (claim,), _ in groups)
    return f"{table(headers, [tuple(cells)])}\n\nAbove the claim: {above} of {len(lines)} runs."


def _broken(lines: Sequence[Line]) -> str:
    rows = (
        (
            *(line["name"], line["detector"], f"{line['median']:.3g} ({line['limit']:.4g})"),
            f"{line['median_correct']:.3g} ({line['limit_correct']:.4g})",
        )
        for line in lines
    )
    least = min(lines, key=lambda line: line["num_flagged"] / line["num_seeds"])
    false, seeds = (sum(line[name] for line in lines) for name in ("num_flagged_correct", "num_seeds"))
    told = (
        f"Each broken mechanism is flagged with at least {least['num_flagged']} of {least['num_seeds']} seeds, correct "
        f"ones with {false} of {seeds}."
    )
    return f"{table(('broken', 'detector', 'median (limit)', 'the correct one'), rows)}\n\n{told}"


def _share(line: Line, how: str = "") -> str:
    return f"{100 * line[f'num_exceeding{how}'] / line['trials']:.2f} %"


def _coverage(lines: Sequence[Line]) -> str:
    rows = []
    for (mechanism,), group in _groups(lines, "mechanism").items():
        epsilons, counts = (sorted({line[name] for line in group}) for name in ("epsilon", "num_canaries"))
        worst = max(group, key=lambda line: line["num_exceeding"] / line["trials"])
        listed = (", ".join(f"{value:.3g}" for value in epsilons), ", ".join(map(str, counts)))
        rows.append((mechanism, *listed, _share(worst)))
    return table(("mechanism", "epsilons", "canaries", "above, at most"), rows)


def _graded(lines: Sequence[Line]) -> str:
    hows = ("_fixed", "_unpaid", "_paid")
    rows = ((f"{each['epsilon']:g}", each["num_canaries"], *(_share(each, how) for how in hows)) for each in lines)
    return table(("epsilon", "canaries", "fixed", "best, unpaid", "best, paid"), rows)


def _membership(lines: Sequence[Line]) -> str:
    rows = []
    for line in lines:
        attacks = line["attacks"]
        highest = max(attacks, key=lambda name, attacks=attacks: attacks[name]["auc"][0])  # type: ignore[misc]
        most = max(attacks, key=lambda name, attacks=attacks: attacks[name]["rates"][-1][1])  # type: ignore[misc]
        losses = f"{line['loss_members']:.2f}, {line['loss_others']:.2f}"
        found = (f"{_auc(attacks[highest])}, {highest}", f"{_at_one_percent(attacks[most])}, {most}")
        rows.append((_run(line), losses, f"{line['accuracy']:.3f}", *found))
    counts = (f"{e['corpus']} {e['num_members']} and {e['num_others']}" for e in lines if e["epsilon"] is None)
    curves = (f"[{_run(line)}](audit-roc-{_run(line).replace(' ', '-')}.png)" for line in lines)
    headers = ("corpus and run", "losses", "accuracy", "highest AUC", f"most {_AT_ONE_PERCENT}")
    told = f"Members and non-members: {'; '.join(counts)}. ROC curves of all attacks: {', '.join(curves)}."
    return f"{table(headers, rows)}\n\n{told}"


def _run(line: Line) -> str:
    return f"{line['corpus']} {line['condition']}"


_AT_ONE_PERCENT = "true positives at 1 % false positives"


def _auc(attack: Mapping[str, Any]) -> str:
    return "{:.3f} [{:.3f}, {:.3f}]".format(*attack["auc"])


def _at_one_percent(attack: Mapping[str, Any]) -> str:
    _, found, low, high = attack["rates"][-1]
    return f"{100 * found:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


# Forms that hardly differ from the model as trained, and so have no column.
_SAME = ("shared basis", "float16")


def _forms(lines: Sequence[Line]) -> str:
    rows = []
    for line in lines:
        other, uploads = line["forms"]["deduplicated"], line["uploads"]
        forms = (_auc(line["attacks"]["LiRA"]), _auc(other), f"{other['distance']:.2g}")
        rows.append((_run(line), *forms, _auc(uploads), _at_one_percent(uploads)))
    apart = max(abs(e["forms"][form]["auc"][0] - e["attacks"]["LiRA"]["auc"][0]) for e in lines for form in _SAME)
    farthest = ", ".join(f"{form} {max(line['forms'][form]['distance'] for line in lines):.2g}" for form in _SAME)
    headers = ("corpus and run", "as trained", "deduplicated", "distance", "uploads", f"uploads, {_AT_ONE_PERCENT}")
    told = f"{' and '.join(_SAME)} change the AUC by at most {apart:.3f}; their largest distances are {farthest}."
    return f"{table(headers, rows)}\n\n{told[0].upper()}{told[1:]}"


def _extraction(lines: Sequence[Line]) -> str:
    rows = (
        (
            *(line["condition"], f"{line['num_completed']} of {line['num_included']}"),
            f"{line['num_completed_left_out']} of {line['num_left_out']}",
        )
        for line in lines
    )
    return table(("run", "completed of those included", "completed of those left out"), rows)


def _full_model(lines: Sequence[Line]) -> str:
    rows = (
        (
            line["condition"], _claim(line), f"{line['num_correct']} of {line['num_guesses']}",
            f"{line['epsilon_lower']:.2f}", f"{line['epsilon_lower_f_dp']:.2f}", f"{line['test_accuracy']:.3f}",
        )
        for line in lines
    )  # fmt: skip
    headers = ("run", "largest epsilon", "right guesses", "lower bound", "by f-DP", "test accuracy")
    return table(headers, rows)


def _language_models(lines: Sequence[Line]) -> str:
    rows = []
    for (condition,), group in _groups(lines, "condition").items():
        group = sorted(group, key=itemgetter("seed"))
        each = [", ".join(f"{line[name]:.2f}" for line in group) for name in ("epsilon_lower", "epsilon_lower_f_dp")]
        ideal = f"{_median(group, 'ideal'):.2f}, {_median(group, 'ideal_f_dp'):.2f}" if "ideal" in group[0] else ""
        right = ", ".join(str(line["num_correct"]) for line in group)
        rows.append((condition, f"{right} of {group[0]['num_guesses']}", *each, ideal))
    headers = ("epsilon", "right guesses", "lower bounds", "by f-DP", "ideal attacker")
    dropped = max(line["drop_epsilon_lower"] for line in lines)
    return f"{table(headers, rows)}\n\nScored by how far their loss fell, the same canaries give at most {dropped:.2f}."


def _vault(lines: Sequence[Line]) -> str:
    rows = ((line["observer"], f"{line['charged']:.2f}", f"{line['found']:.2f}") for line in lines)
    return table(("reads", "charged", "lower bound"), rows)


def _repeated(lines: Sequence[Line]) -> str:
    told = (
        f"{how} of {line['num_runs']} runs, claim {line['epsilon']:g}: mean {line[f'{name}_mean']:.2f}, largest "
        f"{line[f'{name}_largest']:.2f}, above the claim {line[f'{name}_above']} times."
        for line in lines
        for how, name in (("One-run bounds", "epsilon_lower"), ("f-DP bounds", "epsilon_lower_f_dp"))
    )
    return "\n".join(told)


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
