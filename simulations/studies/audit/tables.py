"""results/audit.md from the lines of the study."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from simulations.studies.audit.schedules import FAMILY

Line = dict[str, Any]
COMMAND = "python -m simulations.studies.audit run --only"


def write(page: Path, lines: Sequence[Line]) -> None:
    """Write the page, without the parts whose lines are missing."""
    parts = [_local(lines), _views(lines), _clients(lines), _broken(lines), _coverage(lines), _membership(lines)]
    body = "\n\n".join(part for part in [HEAD, *parts, _full_model(lines)] if part)
    page.write_text(body + "\n")


HEAD = """# Audits of this project's guarantees, measured

What an audit is and how to run one: [docs/audit.md](../docs/audit.md). Each table has the command that makes its lines;
`python -m simulations.studies.audit tables` writes this page from them. delta = 1e-5, confidence 95 %, 2 virtual CPU
cores, OMP_NUM_THREADS=1."""


def _of(lines: Sequence[Line], kind: str) -> list[Line]:
    return [line for line in lines if line["kind"] == kind]


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    cells = [list(map(str, header)), ["---"] * len(header), *(list(map(str, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _median(lines: Sequence[Line], name: str) -> float:
    return float(np.median([line[name] for line in lines]))


def _local(lines: Sequence[Line]) -> str:
    found = _of(lines, "local")
    if not found:
        return ""
    rows = []
    groups = sorted({(line["schedule"], line["claim"], line["num_canaries"]) for line in found}, reverse=False)
    for schedule, claim, num in groups:
        group = [e for e in found if (e["schedule"], e["claim"], e["num_canaries"]) == (schedule, claim, num)]
        ideal = _median(group, "ideal_one_run")
        rows.append(
            [
                schedule,
                f"{claim:g}",
                num,
                group[0]["num_guesses"],
                f"{_median(group, 'one_run'):.2f}",
                f"{ideal:.2f}",
                f"{100 * _median(group, 'one_run') / ideal:.0f} %" if ideal > 0 else "",
                f"{_median(group, 'searched'):.2f}",
                f"{_median(group, 'f_dp'):.2f}",
                f"{_median(group, 'ideal_f_dp'):.2f}",
                f"{max(max(e['one_run'], e['searched'], e['f_dp']) for e in group):.2f}",
                f"{sum(max(e['one_run'], e['searched'], e['f_dp']) > e['claim'] for e in group)} of {len(group)}",
            ]
        )
    header = ["schedule", "claim", "canaries", "guesses", "one run", "ideal", "share", "searched", "f-DP", "ideal f-DP"]
    header += ["largest of all", "above the claim"]
    seconds = sum(line["seconds"] for line in found)
    return f"""## The correct engine, seen by the server (local view)

`{COMMAND} local` ({len(found)} runs, {seconds:.0f} s). Gradient canaries along orthogonal coordinates, scaled to the
clip norm, in the data of five clients with N_k = 1000, through the unchanged `training.stacked` (Poisson sample,
per-sample gradients, clipping, noise, step, upload); matched scores. Medians over seeds of the lower bounds: *one run*
(Steinke et al. 2023) with the number of guesses fixed on pilot runs of the ideal attacker; *ideal*, an attacker who
sees each canary separately under exactly the claimed noise, with other coins and the same number of guesses;
*searched*, the best number of guesses on the ladder, each paid for; *f-DP* (Mahloujifar et al. 2024) against the
schedule's whole privacy profile, with its own number of guesses, as the epsilon of the last noise level rejected (a
grid of {FAMILY}).

{_table(header, rows)}"""


def _views(lines: Sequence[Line]) -> str:
    found = _of(lines, "views")
    if not found:
        return ""
    rows = []
    for schedule in dict.fromkeys(line["schedule"] for line in found):
        group = [line for line in found if line["schedule"] == schedule]
        claims = [f"{group[0][f'claim_{view}']:.2f}" for view in ("local", "rho", "aggregate")]
        local, total = f"{_median(group, 'local'):.2f}", f"{_median(group, 'aggregate'):.2f}"
        rows.append([schedule, claims[0], local, claims[1], local, claims[2], total, len(group)])
    header = ["schedule", "claim local", "found", "claim rho", "found", "claim aggregate", "found", "seeds"]
    return f"""## The three views on one schedule

`{COMMAND} views`. 4000 canaries of five clients, each along its own coordinate of 4096, at a local claim of 4.
`rho` is another claim about the observer of `local`; the observer of `aggregate` sees only the sum of the five uploads.
Medians of the one-run bound, with numbers of guesses fixed on pilot runs.

{_table(header, rows)}"""


def _clients(lines: Sequence[Line]) -> str:
    found = _of(lines, "clients")
    if not found:
        return ""
    rows = []
    for claim in sorted({line["claim"] for line in found}):
        group = [line for line in found if line["claim"] == claim]
        above = sum(line["one_run"] > line["claim"] for line in group)
        largest = max(line["one_run"] for line in group)
        rows.append(
            [
                f"{claim:g}",
                group[0]["num_canaries"],
                group[0]["num_guesses"],
                f"{_median(group, 'one_run'):.2f}",
                f"{_median(group, 'ideal_one_run'):.2f}",
                f"{largest:.2f}",
                f"{above} of {len(group)}",
            ]
        )
    header = ["claim", "clients", "guesses", "one run", "ideal", "largest", "above the claim"]
    return f"""## Client-level: noise on the upload

`{COMMAND} clients`. One round; every client is a canary, whose data set is a single record or the opposite one.

{_table(header, rows)}"""


def _broken(lines: Sequence[Line]) -> str:
    found = _of(lines, "broken")
    if not found:
        return ""
    rows = [
        [
            line["name"],
            line["detector"],
            line["configuration"],
            f"{line['num_flagged']} of {line['num_seeds']}",
            f"{line['median']:.3g} ({line['limit']:.4g})",
            f"{line['num_flagged_correct']} of {line['num_seeds']}",
            f"{line['median_correct']:.3g} ({line['limit_correct']:.4g})",
        ]
        for line in found
    ]
    header = ["broken", "detector", "configuration", "flagged", "median (limit)", "correct one flagged"]
    header += ["median (limit)"]
    return f"""## Deliberately broken mechanisms

`{COMMAND} broken` (the tests require 19 of 20 for each). The audit flags a
lower bound above the claim; noise scale, repeated noise and batch sizes flag a p-value below the limit; influence is
flagged above the limit, in units of the claimed sensitivity. Under LMO only the accounting is broken, not the
mechanism: the correct one is the same noise under `sound`.

{_table(header, rows)}"""


def _coverage(lines: Sequence[Line]) -> str:
    single, graded = _of(lines, "coverage"), _of(lines, "graded")
    if not (single or graded):
        return ""
    rows = [
        [
            line["mechanism"],
            f"{line['epsilon']:.3g}",
            line["num_canaries"],
            f"{100 * line['num_exceeding'] / line['trials']:.2f} %",
        ]
        for line in single
    ]
    others = [
        [
            f"{line['epsilon']:g}",
            line["num_canaries"],
            *(f"{100 * line[f'num_exceeding_{how}'] / line['trials']:.2f} %" for how in ("fixed", "unpaid", "paid")),
        ]
        for line in graded
    ]
    sizes = graded[0]["num_sizes"] if graded else 0
    return f"""## How often the bounds are wrong

`{COMMAND} coverage`: the share of 2,000 trials in which the 95 % bound exceeds the true value; 5 % are allowed, with a
binomial standard error of 0.5 points. Under an exactly epsilon-DP mechanism, and under exactly Gaussian noise for the
f-DP bound:

{_table(["mechanism", "epsilon", "canaries", "above"], rows)}

Graded scores (randomised response, where each answer has a magnitude without information), with the number of guesses
fixed, the best of {sizes} treated as if it had been fixed, or the best of {sizes} with each paid for:

{_table(["epsilon", "canaries", "fixed", "best, unpaid", "best, paid"], others)}"""


def _membership(lines: Sequence[Line]) -> str:
    found = _of(lines, "membership")
    if not found:
        return ""
    rows = []
    for line in found:
        for name, attack in line["attacks"].items():
            rates = [f"{100 * r[1]:.2f} % [{100 * r[2]:.2f}, {100 * r[3]:.2f}]" for r in attack["rates"]]
            auc = "{:.3f} [{:.3f}, {:.3f}]".format(*attack["auc"])
            claim = "infinite" if line["epsilon"] is None else f"{line['epsilon']:.2f}"
            rows.append([line["condition"], claim, name, auc, *rates])
    header = ["run", "epsilon", "attack", "AUC", "true positives at 0.1 % false positives", "at 1 %"]
    losses = "; ".join(
        f"{line['condition']}: {line['loss_members']:.3f} and {line['loss_others']:.3f}" for line in found
    )
    plots = "\n\n".join(f"![ROC, {e['condition']}](audit-roc-{e['condition'].replace(' ', '-')}.png)" for e in found)
    return f"""## Membership inference on records of the embedded corpus

`{COMMAND} membership` ({sum(line["seconds"] for line in found):.0f} s). MiniLM with LoRA in its last layer and a
head, 3 clients with a pool of 150 records each, every record included with probability 1/2
({found[0]["num_members"]} members and {found[0]["num_others"]} non-members, which are too few for a false positive
rate of 0.1 %, so none may pass there), trained for 60 steps; 8 shadow runs of the stacked engine on the same pool, in
parallel. Mean loss of members and of non-members, {losses}.

{_table(header, rows)}

{plots}"""


def _full_model(lines: Sequence[Line]) -> str:
    found = _of(lines, "full model")
    if not found:
        return ""
    rows = [
        [
            line["condition"],
            "infinite" if line["epsilon"] is None else f"{line['epsilon']:.2f}",
            f"{line['num_correct']} of {line['num_guesses']}",
            f"{line['epsilon_lower']:.2f}",
            f"{line['test_accuracy']:.3f}",
        ]
        for line in found
    ]
    header = ["run", "largest epsilon", "correct guesses", "lower bound", "test accuracy"]
    return f"""## One run of the real model, black-box

`{COMMAND} full-model` ({sum(line["seconds"] for line in found):.0f} s). The default model (MiniLM, LoRA in its last
layer) on the embedded corpus, {found[0]["num_canaries"]} canaries of random tokens with random labels among the five
hospitals' records; the score is a canary's drop in loss from the initial to the final model.

{_table(header, rows)}"""
