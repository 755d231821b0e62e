"""`fedpriv lmo ...`: what LMO-DP noise costs, the search for it, and how it compares."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fedpriv.cli._command import Result, check_new_file, command, entries, one_of, table
from fedpriv.errors import InputError
from fedpriv.files import read_text, write_new

app = typer.Typer(no_args_is_help=True, help="LMO-DP noise: what it costs, the search for it, and how it compares.")

Params = Annotated[Path, typer.Option(help="JSON file with the parameters of the noise.", exists=True, dir_okay=False)]
Delta = Annotated[float, typer.Option(help="In (0, 1); the paper's is 1e-10.")]
Steps = Annotated[int, typer.Option(help="Noisy steps that share the budget.", min=1)]
Sampling = Annotated[float, typer.Option(help="q = B / N_k, in (0, 1].")]
Sensitivity = Annotated[float, typer.Option(help="L2, in units of the clip norm.")]
_PRIVACY, _SEARCH = "fedpriv.privacy.accounting", "fedpriv.methods.lmo.search"
Combination = Annotated[
    Any, one_of(f"{_PRIVACY}.lmo_parameters:Combination", "Of the parts: by weights that sum to one, or by factors.")
]
Parts = Annotated[list[str] | None, one_of(f"{_SEARCH}:PARTS", "May be repeated; by default all.", "--part")]
Objective = Annotated[Any, one_of(f"{_SEARCH}:Objective", "What makes one noise better than another.")]
Accounting = Annotated[
    Any, one_of(f"{_PRIVACY}.lmo_parameters:LmoAccounting", "published is no guarantee for a vector.")
]
Ranges = Annotated[
    Path | None, typer.Option(help="JSON file that maps names to lists of low and high.", exists=True, dir_okay=False)
]
Seed = Annotated[int, typer.Option(help="Of the search.", min=0)]


@command(app)
def account(
    params: Params,
    order: Annotated[float | None, typer.Option(help="Renyi order alpha > 1, unless u stays hidden.")] = None,
    observer: Annotated[
        str, one_of(f"{_PRIVACY}.lmo_renyi:Observer", "Who sees what of a release.")
    ] = "noise-and-scale",
    dimension: Annotated[int, typer.Option(help="Coordinates that are noised.", min=1)] = 1,
    sensitivity: Sensitivity = 1.0,
) -> Result:
    """The cost of one release: Renyi divergences, as published, for a single number, and sound, for a vector.

    With --observer noise-only, whom every run has, u stays hidden: the epsilon of pure differential privacy (Theorem
    A.2), and the noise multiplier of Gaussian noise that protects no more.

    Example: fedpriv lmo account --params lmo.json --order 8 --dimension 76808
    """
    from fedpriv.privacy.accounting.lmo_distribution import Columns
    from fedpriv.privacy.accounting.lmo_parameters import LmoParameters
    from fedpriv.privacy.accounting.lmo_renyi import divergences, gaussian_multiplier, largest_loss

    of = Columns.of(LmoParameters.from_json(read_text(params)))
    noise = {"dimension": dimension, "sensitivity": sensitivity}
    if observer == "noise-only":
        costs: dict[str, Any] = {"pure_epsilon": float(largest_loss(of, **noise))}
        costs |= {"effective_noise_multiplier": gaussian_multiplier(of, sensitivity)}
    elif order is None:
        raise InputError("order: is missing; --observer noise-only needs none")
    else:
        costs = {**divergences(of, order, **noise), "published_is_guarantee": dimension == 1}
    values = {"order": order, "observer": observer, **noise, **costs, "variance": float(of.variance)}
    return Result(values, entries(values))


@command(app, "search")
def search_noise(
    epsilon: Annotated[float, typer.Option(help="Budget of all steps together.")],
    delta: Delta = 1e-10,
    steps: Steps = 1,
    sampling_probability: Sampling = 1.0,
    dimension: Annotated[int, typer.Option(help="Coordinates that are noised.", min=1)] = 1,
    sensitivity: Sensitivity = 1.0,
    accounting: Accounting = "sound",
    combination: Combination = "mixture",
    part: Parts = None,
    objective: Objective = "usefulness",
    tolerance: Annotated[float, typer.Option(help="Largest noise that counts as useful, in clip norms.")] = 1.0,
    ranges: Ranges = None,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="Also write the parameters to this JSON file.")] = None,
) -> Result:
    """The smallest LMO noise within a budget (the paper's Algorithm 3), and up to which dimension the budget holds.

    Example: fedpriv lmo search --epsilon 2 --accounting published --combination linear --objective variance
    """
    from dataclasses import asdict

    from fedpriv.methods.lmo import Budget
    from fedpriv.methods.lmo.comparison import sizes
    from fedpriv.methods.lmo.search import search

    check_new_file(out)
    budget = Budget(
        epsilon=epsilon,
        delta=delta,
        steps=steps,
        sampling_probability=sampling_probability,
        sensitivity=sensitivity,
        dimension=dimension,
        accounting=accounting,
    )
    space = _space(combination, part, ranges)
    found = search(space, budget, objective=objective, tolerance=tolerance, seed=seed)
    parameters = found.parameters.to_dict()
    values: dict[str, Any] = {
        **asdict(budget),
        "epsilon": found.epsilon,
        "valid_dimension": found.valid_dimension,
        "is_guarantee": found.valid_dimension >= dimension,
        "objective": objective,
        "value": found.value,
        "num_candidates": found.num_candidates,
        **sizes(found.parameters),
        "parameters": parameters,
    }
    if out is not None:
        write_new(out, f"{json.dumps(parameters, indent=2)}\n".encode(), mode=None)
    return Result(values, entries(values | {"parameters": json.dumps(parameters)}))


@command(app, "compare")
def compare_noises(
    epsilon: Annotated[list[float] | None, typer.Option(help="May be repeated; by default 0.3, 0.7, 2 and 3.")] = None,
    delta: Delta = 1e-10,
    steps: Steps = 1,
    sampling_probability: Sampling = 1.0,
    dimension: Annotated[int, typer.Option(help="Of a vector, compared as a single number is.", min=1)] = 76808,
    sensitivity: Sensitivity = 1.0,
    combination: Combination = "linear",
    objective: Objective = "usefulness",
    ablations: Annotated[bool, typer.Option("--ablations", help="Every choice of one, two or three parts.")] = False,
    plots: Annotated[Path | None, typer.Option(help="Folder for plots.")] = None,
    seed: Seed = 0,
) -> Result:
    """Compare LMO, Laplace and Gaussian noise of equal cost: the paper's Figures 6 and 7; with --ablations, 10 to 15.

    Example: fedpriv lmo compare --epsilon 0.3 --epsilon 3 --ablations --plots results
    """
    from fedpriv.methods.lmo import Budget
    from fedpriv.methods.lmo.comparison import EPSILONS, compare, reductions

    epsilons = tuple(epsilon or EPSILONS)
    budget = Budget(
        epsilon=1.0, delta=delta, steps=steps, sampling_probability=sampling_probability, sensitivity=sensitivity
    )
    records = compare(
        budget,
        epsilons=epsilons,
        dimensions=sorted({1, dimension}),
        combination=combination,
        objective=objective,
        ablations=ablations,
        seed=seed,
    )
    written: list[str] = []
    if plots is not None:
        from fedpriv.methods.lmo.comparison import write_plots

        written = [str(path) for path in write_plots(records, plots)]
    summary: dict[str, Any] = {
        "records": records,
        # The paper's figures are for one release of one number.
        "reductions": reductions(records, sensitivity) if steps == sampling_probability == 1 else [],
        "plots": written,
    }
    columns = ["epsilon", "dimension", "noise", "parts", "variance", "entropy", "mean_absolute", "median_absolute"]
    columns += ["mean_absolute_reduction", "median_absolute_reduction", "epsilon_at_dimension"]
    lines = table(records, columns)
    if summary["reductions"]:
        lines += ["", "reduction of the mean size of the noise on one number, as a share of Gaussian noise's:"]
        lines += table(summary["reductions"], list(summary["reductions"][0]))
    return Result(summary, lines)


@command(app, "coverage")
def coverage_of_space(
    quantisation: Annotated[
        list[float] | None, typer.Option(help="May be repeated; by default 0.1, 0.01 and 0.001.")
    ] = None,
    domain_size: Annotated[
        list[int] | None, typer.Option(help="Number of cells; may be repeated. By default 11, 51 and 101.")
    ] = None,
    num_samples: Annotated[
        int, typer.Option(help="Number of simulated noises, and of LMO noises.", min=1, max=4096)
    ] = 256,
    combination: Combination = "mixture",
    part: Parts = None,
    ranges: Ranges = None,
    seed: Seed = 0,
) -> Result:
    """How close LMO noise comes to arbitrary noise on a grid (the paper's Algorithm 2 and Figure 5).

    Example: fedpriv lmo coverage --quantisation 0.01 --domain-size 51
    """
    from fedpriv.methods.lmo.comparison import coverage

    records = coverage(
        _space(combination, part, ranges),
        quantisations=tuple(quantisation or (0.1, 0.01, 0.001)),
        domain_sizes=tuple(domain_size or (11, 51, 101)),
        num_samples=num_samples,
        seed=seed,
    )
    return Result({"records": records}, table(records, list(records[0])))


def _space(combination: Any, parts: Any, ranges: Path | None) -> Any:
    """The search space that the options describe."""
    from fedpriv.methods.lmo.search import PARTS, RANGES, SearchSpace

    given: Any = {}
    if ranges is not None:
        text = read_text(ranges)
        try:
            given = json.loads(text)
        except (ValueError, RecursionError):
            raise InputError(f"ranges = {str(ranges)!r}: must be JSON, {{name: [low, high]}}") from None
    if not isinstance(given, dict) or set(given) - set(RANGES):
        raise InputError(f"ranges = {str(ranges)!r}: must be a JSON object with some of {', '.join(RANGES)}")
    for name, bounds in given.items():
        if not isinstance(bounds, list) or not all(type(bound) in (int, float) for bound in bounds):
            raise InputError(f"{name} = {bounds!r}: must be [low, high]")
    return SearchSpace(
        combination=combination,
        parts=tuple(dict.fromkeys(parts)) if parts else PARTS,
        **{name: tuple(bounds) for name, bounds in given.items()},
    )
