"""LMO-DP noise next to Gaussian noise, on numbers and in training: results/lmo.md.

    python -m simulations.studies.lmo run|tables --data FOLDER

`run` keeps a line of what `fedpriv lmo compare --ablations` computes, and one of each run of the sweep `lmo.toml` of
simulations/configs/sweeps; `tables` makes the page's tables. Comparisons cost one release at delta 1e-10 without
sampling, by Renyi divergence at dp-accounting's orders. The sweep trains MiniLM's last layer by the recipe
`per-sample` on the embedded corpus at five hospitals, at delta 1e-5. Each noise is scaled until the run costs epsilon
by the tightest accounting that holds for it: pld for Gaussian noise, `sound` for the others. `lmo-published.toml` is
the paper's Table 2 on SST-2, where LMO noise costs what its published curve says, which is no guarantee.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import sqrt
from pathlib import Path

from fedpriv.methods.lmo import Budget
from fedpriv.methods.lmo.comparison import compare, reductions, sizes
from fedpriv.privacy.accounting.lmo_parameters import LmoParameters
from fedpriv.runs import environment
from simulations.studies.corpora import keys, missing_file
from simulations.studies.federations import run_sweep
from simulations.studies.harness import Line, append, fill, is_asked, lines, parser, software, table

SWEEP, PUBLISHED, COMPARED = "lmo", "lmo-published", "compare"
CORPUS = "SST-2 5,000"
DIMENSION = 76_808
EPSILONS = (0.3, 1.0, 3.0)
NOISES = ("Gaussian", "Laplace, u = 1", "LMO, u uniform on [0.1, 0.5]")
"""In the order of the sweep's runs."""
PAPER = {
    **{0.16: (50.92, 49.08, 90.83), 0.3: (50.92, 49.43, 92.20), 0.9: (89.33, 50.92, 92.55)},
    **{1.4: (90.48, 50.92, 93.00), 3: (91.06, 54.58, 93.92)},
}
"""{epsilon: per cent right by Gaussian noise, by BiTFiT and by LMO noise, RoBERTa-large}: Yang et al., Table 2."""


def run(runs: Path, out: Path, data: Path, only: Sequence[str] = ()) -> None:
    """Compare the noises, and run the sweeps, where there are no lines yet."""
    if is_asked(COMPARED, only) and COMPARED not in {line["key"] for line in lines(runs)}:
        records = compare(Budget(epsilon=1.0, delta=1e-10), dimensions=(1, DIMENSION), ablations=True)
        told = {"records": records, "reductions": reductions(records)}
        append(runs, {"key": COMPARED, **told, "software": software(environment())})
    run_sweep(SWEEP, runs, out, only=only)
    if absent := missing_file(CORPUS, data):
        print(f"{PUBLISHED}: skipped: data = {data}: holds no {absent}", flush=True)
    else:
        found = keys(CORPUS, 0, data=data, folder=out, validation=False, pooled=True)
        run_sweep(PUBLISHED, runs, out, found, only=only)


def write(page: Path, runs: Path) -> None:
    """Write the page's tables from the lines in the study's file of runs."""
    found = lines(runs)
    (compared,) = (line for line in found if line["key"] == COMPARED)
    noises = ("reduction, paper", "LMO", "any epsilon-DP noise", "cost on a gradient", "variance, Gaussian", "LMO")
    kinds = (f"{kind}{of}" for kind in ("Gaussian", "biases", "LMO") for of in (", paper", ""))
    blocks = {
        "compared": table(("epsilon", *noises), _compared(compared)),
        "parts": table(("parts", "median absolute value"), _parts(compared)),
        "trained": table(("noise", *(f"epsilon {each:g}" for each in EPSILONS)), _trained(found)),
        "published": table(("epsilon", *kinds, "proven of LMO"), _published(found)),
    }
    fill(page, blocks)


def _of(compared: Line, epsilon: float, noise: str, *, scalar: bool) -> list[Line]:
    """The records of one noise at an epsilon, on a number or on a gradient; of LMO all choices of parts."""
    return [
        each
        for each in compared["records"]
        if (each["epsilon"], each["noise"], each["dimension"] == 1) == (epsilon, noise, scalar)
    ]


def _compared(compared: Line) -> Iterator[Sequence[str]]:
    for row in compared["reductions"]:
        epsilon = row["epsilon"]
        gaussian, lmo = (_of(compared, epsilon, noise, scalar=False)[-1] for noise in ("gaussian", "lmo"))
        cost = _of(compared, epsilon, "lmo", scalar=True)[-1]["epsilon_at_dimension"]
        shares = (f"{100 * row['paper']:.1f} %", f"{100 * row['lmo']:.1f} %", f"at most {100 * row['staircase']:.1f} %")
        yield f"{epsilon:g}", *shares, f"{cost:.3g}", f"{gaussian['variance']:.4g}", f"{lmo['variance']:.4g}"


def _parts(compared: Line) -> Iterator[Sequence[str]]:
    epsilon = compared["reductions"][-1]["epsilon"]
    yield "Gaussian noise", f"{_of(compared, epsilon, 'gaussian', scalar=True)[0]['median_absolute']:.3f}"
    for record in _of(compared, epsilon, "lmo", scalar=True):
        yield record["parts"].replace("+", ", "), f"{record['median_absolute']:.3f}"


def _trained(found: Sequence[Line]) -> Iterator[Sequence[str]]:
    """Accuracies, with the noise's standard deviation in units of the clip norm in brackets."""
    own = [line for line in found if line.get("sweep") == SWEEP]
    parameters = dict.fromkeys(line["cell"]["mechanism_parameters"] for line in own)
    for name, each in zip(NOISES, parameters, strict=True):
        of_noise = [line for line in own if line["cell"]["mechanism_parameters"] == each]
        shown = {line["cell"]["target_epsilon"]: f"{line['accuracy']:.3f} ({_stddev(line):.3g})" for line in of_noise}
        yield name, *(shown[epsilon] for epsilon in EPSILONS)
    yield "untrained", f"{own[0]['accuracy_initial']:.3f}", "", ""


def _published(found: Sequence[Line]) -> Iterator[Sequence[str]]:
    """Accuracies at each epsilon of the paper's Table 2, and the epsilon that is proven of the LMO noise."""
    own: dict[tuple[float, str], Line] = {}
    for line in (line for line in found if line.get("sweep") == PUBLISHED):
        cell = line["cell"]
        published = cell.get("target_epsilon_published")
        own[published or cell["target_epsilon"], "lmo" if published else cell["aggregation"]] = line
    for epsilon, theirs in PAPER.items():
        ours = [own.get((epsilon, kind)) for kind in ("dp-lora", "bitfit", "lmo")]
        pairs = zip(theirs, (f"{line['accuracy']:.3f}" if line else "not run" for line in ours), strict=True)
        shown = [text for accuracy, our in pairs for text in (f"{accuracy / 100:.3f}", our)]
        yield f"{epsilon:g}", *shown, f"{ours[-1]['epsilon_sound_max']:.3g}" if ours[-1] else ""


def _stddev(line: Line) -> float:
    """The standard deviation of a run's noise, in units of the clip norm."""
    parameters = line["cell"]["mechanism_parameters"]
    stddev = sqrt(sizes(LmoParameters.from_json(parameters))["variance"]) if parameters else 1.0
    return float(stddev * line["noise_multiplier"])


def main() -> None:
    """Do one step of the study."""
    arguments = parser(__doc__, "lmo").parse_args()
    if arguments.step == "tables":
        write(arguments.page, arguments.runs)
    else:
        run(arguments.runs, arguments.out, arguments.data, arguments.only)


if __name__ == "__main__":
    main()
