"""The tables of results/audit.md from the lines of the study.

The audits of its first table: *language model* trains B of rank 4 in the last two layers of SmolLM2-135M, in float32
and six full batches, with three seeds. *vault* is a tiny BERT with three holders of 16 records, and one release a
round; the coordinator keeps the model still. *own audit* has one holder of 60 random texts, 60 canaries and four full
batches a run, and a seed for each. *default run* has the embedded corpus, and canaries of random texts and labels.
*engine* and *clients* have 20 seeds, and numbers of guesses fixed on their pilot runs. In *engine* five clients with
N_k = 1000 hold the canaries, each along a coordinate of its own within its client, and scores are the log likelihood
ratio of the gradients' inner products. *view* has 4,000 canaries, each along its own of 4,096 coordinates.

Membership is of MiniLM with LoRA in its last layer and a head, after 60 steps on texts of at most 16 tokens (embedded)
or 32 (SST-2); attacked by loss threshold, calibrated loss, LiRA and RMIA, and deduplicated in blocks of 256 values.
Canaries are completed by SmolLM2 with LoRA of rank 8 in all layers, after 80 steps of AdamW at rate 1e-3, with 20
records each. A detector of broken mechanisms flags a lower bound above the claim, an influence above its limit in units
of the claimed sensitivity, or a p-value below its limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from simulations.studies.harness import Line, fill, table


def write(page: Path, lines: Sequence[Line]) -> None:
    """Write the page's tables; those whose lines are missing stay as they are."""
    kinds = {kind: [line for line in lines if line["kind"] == kind] for kind in (*BOUNDS, *TABLES)}
    kinds["coverage"] += [line for line in lines if line["kind"] == "graded"]
    found = {name: TABLES[name](kinds[name]) for name in TABLES if kinds[name]}
    bounds = [row for kind, rows in BOUNDS.items() if kinds[kind] for row in rows(kinds[kind])]
    if bounds:
        found["bounds"] = _bounds(bounds, kinds["language models"])
    fill(page, found)


def _median(lines: Sequence[Line], name: str) -> float:
    return float(np.median([line[name] for line in lines]))


def _groups(lines: Sequence[Line], *names: str) -> dict[tuple[Any, ...], list[Line]]:
    """The lines by their values of these keys, in the order of the first."""
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        groups.setdefault(tuple(line[name] for name in names), []).append(line)
    return groups


@dataclass(frozen=True, kw_only=True)
class _Bounds:
    """The lower bounds of the runs of one audit.

    Attributes:
        audit: its name on the page, with its setting.
        claim: the epsilon that is audited; None where there is no noise.
        one_run: the median, or the mean, and the largest of several runs; empty if there are none of this kind.
        f_dp: the same of the other kind.
        ideal: the median bounds of an ideal attacker, of both kinds.
        above: how many runs have a bound above the claim; None if they may.
        num_runs: how many there are.
        is_shown: whether it is a row; all count.
    """

    audit: str
    claim: float | None
    one_run: Sequence[float] = ()
    f_dp: Sequence[float] = ()
    ideal: Sequence[float] = ()
    above: int | None = None
    num_runs: int = 0
    is_shown: bool = True

    @property
    def row(self) -> Sequence[str]:
        """Its cells, with the largest bound in brackets."""
        claim = "infinite" if self.claim is None else f"{self.claim:.2f}"
        return self.audit, claim, _largest(self.one_run), _largest(self.f_dp), ", ".join(f"{e:.2f}" for e in self.ideal)


def _largest(bounds: Sequence[float]) -> str:
    return " ".join(f"({bound:.2f})" if place else f"{bound:.2f}" for place, bound in enumerate(bounds))


def _bounds(found: Sequence[_Bounds], language_models: Sequence[Line]) -> str:
    counted = [each for each in found if each.above is not None]
    above, num = sum(each.above or 0 for each in counted), sum(each.num_runs for each in counted)
    told = [f"A run's bound is above the claim in {above} of {num} comparisons, the vault aside."]
    if language_models:
        dropped = max(line["drop_epsilon_lower"] for line in language_models)
        told.append(f"Scored by how far their loss fell, the language model's canaries give at most {dropped:.2f}.")
    headers = ("audit", "claim", "one-run bound", "f-DP bound", "ideal attacker")
    return f"{table(headers, [each.row for each in found if each.is_shown])}\n\n{' '.join(told)}"


def _measured(audit: str, lines: Sequence[Line], claim: float | None, names: Sequence[str], **values: Any) -> _Bounds:
    """The bounds of some runs; `names` are the keys of those by one run, by f-DP and of any that are only counted."""
    bounds = [[_median(lines, name), max(line[name] for line in lines)][: len(lines)] for name in names]
    values |= {"one_run": bounds[0], "f_dp": bounds[1] if len(bounds) > 1 else ()}
    if claim is not None:
        values["above"] = sum(any(line[name] > claim for name in names) for line in lines)
    return _Bounds(audit=audit, claim=claim, num_runs=len(lines), **values)


_OWN = ("epsilon_lower", "epsilon_lower_f_dp")


def _language_models(lines: Sequence[Line]) -> Iterator[_Bounds]:
    for group in _groups(lines, "condition").values():
        ideal = [_median(group, name) for name in ("ideal", "ideal_f_dp")] if "ideal" in group[0] else ()
        name = "language model" + (", no noise" if group[0]["epsilon"] is None else "")
        yield _measured(name, group, group[0]["epsilon"], _OWN, ideal=ideal)


def _vault(lines: Sequence[Line]) -> Iterator[_Bounds]:
    for line in lines:
        yield _Bounds(audit=f"vault, {line['observer']}", claim=line["charged"], f_dp=[line["found"]])


def _repeated(lines: Sequence[Line]) -> Iterator[_Bounds]:
    for line in lines:
        one_run, f_dp = ([line[f"{name}_mean"], line[f"{name}_largest"]] for name in _OWN)
        values = {"above": max(line[f"{name}_above"] for name in _OWN), "num_runs": line["num_runs"]}
        yield _Bounds(audit="own audit", claim=line["epsilon"], one_run=one_run, f_dp=f_dp, **values)


def _full_model(lines: Sequence[Line]) -> Iterator[_Bounds]:
    for line in lines:
        yield _measured(f"default run, {line['condition']}", [line], line["epsilon"], _OWN)


def _local(lines: Sequence[Line]) -> Iterator[_Bounds]:
    most, claims = max(line["num_canaries"] for line in lines), sorted({line["claim"] for line in lines})
    for (schedule, claim, num), group in sorted(_groups(lines, "schedule", "claim", "num_canaries").items()):
        ideal = [_median(group, name) for name in ("ideal_one_run", "ideal_f_dp")]
        is_shown = num == most and claim == claims[-1]
        yield _measured(
            f"engine, {schedule}", group, claim, ("one_run", "f_dp", "searched"), ideal=ideal, is_shown=is_shown
        )


def _views(lines: Sequence[Line]) -> Iterator[_Bounds]:
    for (schedule,), group in _groups(lines, "schedule").items():
        for view, seen in (("local", "local"), ("rho", "local"), ("aggregate", "aggregate")):
            is_shown = schedule == lines[0]["schedule"]
            yield _measured(f"view {view}, {schedule}", group, group[0][f"claim_{view}"], (seen,), is_shown=is_shown)


def _clients(lines: Sequence[Line]) -> Iterator[_Bounds]:
    claims = sorted({line["claim"] for line in lines})
    for (claim,), group in sorted(_groups(lines, "claim").items()):
        ideal, is_shown = [_median(group, "ideal_one_run")], claim == claims[-1]
        yield _measured("clients", group, claim, ("one_run",), ideal=ideal, is_shown=is_shown)


BOUNDS: Mapping[str, Callable[[Sequence[Line]], Iterator[_Bounds]]] = {
    "language models": _language_models,
    "vault": _vault,
    "repeated": _repeated,
    "full model": _full_model,
    "local": _local,
    "views": _views,
    "clients": _clients,
}
"""{kind of the lines: their bounds}, in the order of the table."""


def _broken(lines: Sequence[Line]) -> str:
    rows = [
        (detector, "; ".join(line["name"] for line in group))
        for (detector,), group in _groups(lines, "detector").items()
    ]
    least = min(lines, key=lambda line: line["num_flagged"] / line["num_seeds"])
    false, seeds = (sum(line[name] for line in lines) for name in ("num_flagged_correct", "num_seeds"))
    told = (
        f"Each broken mechanism is flagged with at least {least['num_flagged']} of {least['num_seeds']} seeds, correct "
        f"ones with {false} of {seeds}."
    )
    return f"{table(('detector', 'broken mechanisms'), rows)}\n\n{told}"


def _coverage(lines: Sequence[Line]) -> str:
    known = [line for line in lines if line["kind"] == "coverage"]
    rows = [_worst(mechanism, group, "") for (mechanism,), group in _groups(known, "mechanism").items()]
    if graded := [line for line in lines if line["kind"] == "graded"]:
        for how, name in (("_fixed", "fixed"), ("_unpaid", "best of 15, unpaid"), ("_paid", "best of 15, paid")):
            rows.append(_worst(f"graded, {name}", graded, how))
    return table(("mechanism", "epsilons", "canaries", "above, at most"), rows)


def _worst(mechanism: str, lines: Sequence[Line], how: str) -> Sequence[str]:
    """The row of the share that is largest."""
    epsilons, counts = (sorted({line[name] for line in lines}) for name in ("epsilon", "num_canaries"))
    worst = max(lines, key=lambda line: line[f"num_exceeding{how}"] / line["trials"])
    listed = (", ".join(f"{value:.3g}" for value in epsilons), ", ".join(map(str, counts)))
    return mechanism, *listed, f"{100 * worst[f'num_exceeding{how}'] / worst['trials']:.2f} %"


def _membership(lines: Sequence[Line]) -> str:
    rows = []
    for line in lines:
        attacks = line["attacks"]
        highest = max(attacks, key=lambda name, attacks=attacks: attacks[name]["auc"][0])  # type: ignore[misc]
        most = max(attacks, key=lambda name, attacks=attacks: attacks[name]["rates"][-1][1])  # type: ignore[misc]
        losses = f"{line['loss_members']:.2f}, {line['loss_others']:.2f}"
        found = (f"{_auc(attacks[highest])}, {highest}", f"{_at_one_percent(attacks[most])}, {most}")
        name = f"[{_run(line)}](audit-roc-{_run(line).replace(' ', '-')}.png)"
        rows.append((name, losses, f"{line['accuracy']:.3f}", *found, _auc(line["uploads"])))
    counts = sorted({f"{line['num_members']} and {line['num_others']}" for line in lines})
    headers = ("run", "losses", "accuracy", "highest AUC", f"most {_AT_ONE_PERCENT}", "AUC of uploads")
    told = f"Members and others: {'; '.join(counts)}. AUC of LiRA less that of the model as trained: {_forms(lines)}."
    return f"{table(headers, rows)}\n\n{told}"


def _run(line: Line) -> str:
    return f"{line['corpus']} {line['condition']}"


_AT_ONE_PERCENT = "true positives at 1 % false positives"


def _auc(attack: Mapping[str, Any]) -> str:
    return "{:.3f} [{:.3f}, {:.3f}]".format(*attack["auc"])


def _at_one_percent(attack: Mapping[str, Any]) -> str:
    _, found, low, high = attack["rates"][-1]
    return f"{100 * found:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def _forms(lines: Sequence[Line]) -> str:
    """How far each form of a model changes its AUC, and its largest distance."""
    told = []
    for form in ("deduplicated", "float16"):
        gains = [line["forms"][form]["auc"][0] - line["attacks"]["LiRA"]["auc"][0] for line in lines]
        farthest = max(line["forms"][form]["distance"] for line in lines)
        told.append(f"{form} {min(gains):+.3f} to {max(gains):+.3f}, at distances of at most {farthest:.2g}")
    return "; ".join(told)


def _extraction(lines: Sequence[Line]) -> str:
    rows = (
        (
            *(line["condition"], f"{line['num_completed']} of {line['num_included']}"),
            f"{line['num_completed_left_out']} of {line['num_left_out']}",
        )
        for line in lines
    )
    return table(("run", "completed of those included", "completed of those left out"), rows)


TABLES: Mapping[str, Callable[[Sequence[Line]], str]] = {
    "broken": _broken,
    "coverage": _coverage,
    "membership": _membership,
    "extraction": _extraction,
}
"""{block of the page: from the lines of that kind}."""
