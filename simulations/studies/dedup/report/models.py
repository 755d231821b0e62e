"""The study in general, its scenarios (Table 1), and whether its models learned anything."""

from __future__ import annotations

from collections.abc import Sequence

from simulations.studies.dedup.report import paper
from simulations.studies.dedup.report.markdown import count, section, span, table, yes
from simulations.studies.dedup.report.results import NAMES, DedupResults, Line, members
from simulations.studies.dedup.scenarios import Scenario


def introduction(results: DedupResults) -> str:
    """The method, its records, and the meaning of its words."""
    models = results.models.values()
    deltas = ", ".join(f"{delta:g}" for delta in sorted({model["delta"] for model in models}))
    return f"""## Fully trained models under DP-SGD, beside the paper

```
python -m simulations.studies.dedup --data FOLDER   # everything, or what is left of it; FOLDER holds the texts
python -m simulations.studies.dedup --help          # the steps one by one
```

The scenarios of Guan et al. 2025, Table 1, its seven heterogeneous models and its fifty, at a size for two cores:
{count(len(results.models), "model")}, each trained by DP-SGD at delta {deltas} from a start that saw public records
only. A perceptron reads texts as MiniLM encodes them; a vision transformer and a ResNet with group norm read MNIST's
digits, with the UCI's digits as public records; of MiniLM itself the last two layers and the head are trained and
deduplicated. Sampling and noise are **seeded**, so that the study can be repeated; the records are public, so nobody
needs protection. No record is in two splits: *tuning* records chose settings, *validation* records are what the
searches validate on, *test* records decide nothing. Cut to 32 tokens, some texts are equal to one that a model was
trained on: 42, 27 and 34 of the 1,500 validation, test and tuning records of MedQuAD, 11, 15 and 19 of SST-2's 2,000.

**In brackets: the paper's figure for the same scenario, from other models and other data.** They show whether the
order of the searches is the same, not who is better. C.R. is the paper's compression ratio: distinct blocks of all
models after deduplication over those before, base included (section 5.1.3); of one model, the share of its blocks that
are none of its base. C.R. in bytes is the size of the store's files, manifests and hashes included, over that of the
models' tensors. Smaller is better. There is one training seed, so differences of a few points between neighbouring
rows mean little."""


def scenarios(results: DedupResults) -> str:
    """The scenarios beside Table 1."""
    here = [name for name in NAMES if any(run["cell"]["scenario"] == name for run in results.runs)]
    rows = [_scenario_row(results, name, members(name)[0]) for name in here if name != "fifty" and members(name)]
    headers = (
        "", "the paper's models", "here", "epsilons", "as in the paper", "epsilon bound", "utility bound",
        "test accuracy of the start", "of the models", "better than their start",
    )  # fmt: skip
    return section("Scenarios (Table 1)", table(headers, rows) if rows else "")


def _scenario_row(results: DedupResults, name: str, scenario: Scenario) -> Sequence[object]:
    known = [results.models[model.name] for model in scenario.models if model.name in results.models]
    papers = paper.SCENARIOS.get(name)
    stated = [model.epsilon for model in scenario.models]
    limits = (scenario.epsilon_bound, scenario.utility_bound)
    equal = papers is not None and sorted(stated) == sorted(papers.epsilons)
    if papers and papers.epsilon_bound is not None:
        equal = equal and limits == (papers.epsilon_bound, papers.utility_bound)
    return (
        name,
        papers.models if papers else "",
        ", ".join(dict.fromkeys(f"{each['architecture']} on {each['task']}" for each in known)),
        ", ".join(f"{epsilon:g}" for epsilon in stated),
        yes(equal) if papers else "",
        f"{limits[0]:g}",
        f"{limits[1]:g}",
        span((each["accuracy_start"]["test"] for each in known), 3),
        span((each["accuracy"]["test"] for each in known), 3),
        f"{sum(each['beats_start'] for each in known)} of {len(known)}",
    )


def learned(results: DedupResults) -> str:
    """For every model whether it is better than its public start by two standard errors."""
    order = sorted(results.models.values(), key=lambda model: (model["architecture"], model["task"], model["epsilon"]))
    rows = [_model_row(model) for model in order]
    num = sum(bool(model["beats_start"]) for model in results.models.values())
    headers = (
        "", "records", "epsilon", "noise multiplier", "start, test", "model, test", "gain", "two standard errors",
        "better", "without noise, test",
    )  # fmt: skip
    return section(
        "Did the models learn anything?",
        f"{num} of {count(len(rows), 'model')} beat their public start on the test records by more than two standard "
        "errors of the paired difference. `without noise` is the same training without any, for reference.",
        table(headers, rows),
    )


def _model_row(model: Line) -> Sequence[object]:
    return (
        f"`{model['name']}`",
        model["num_records"],
        f"{model['epsilon']:.4g}",
        f"{model['noise_multiplier']:.2f}",
        f"{model['accuracy_start']['test']:.3f}",
        f"{model['accuracy']['test']:.3f}",
        f"{model['gain']:+.3f}",
        f"{2 * model['gain_standard_error']:.3f}",
        yes(model["beats_start"]),
        f"{model['accuracy_without_noise']['test']:.3f}",
    )
