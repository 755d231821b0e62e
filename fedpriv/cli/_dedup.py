"""`fedpriv dedup ...`: store the variants of a model by the blocks that they share."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedpriv.cli._command import (
    AsJson,
    ModelName,
    Result,
    StorePath,
    check_new_file,
    command,
    one_of,
    result_of,
    show,
    table,
)
from fedpriv.errors import InputError
from fedpriv.texts import printable

if TYPE_CHECKING:
    from fedpriv.models.dedup.validation import Evaluator
    from fedpriv.models.dedup.work import Observer, Outcome, Progress
    from fedpriv.models.variants.folders import Described


app = typer.Typer(no_args_is_help=True, help="Store the variants of a model by the blocks that they share.")

Folder = Annotated[Path, typer.Argument(help="Folder with a folder for each variant, each with a variant.json.")]


_DEDUP = "fedpriv.models.dedup"
Strategy = Annotated[
    str, one_of(f"{_DEDUP}:Strategy", "One base for each variant; several; or several, which may have bases too.")
]
Fairness = Annotated[
    str, one_of(f"{_DEDUP}:Fairness", "Keep the order of epsilons by cutting every bound, or by giving up variants.")
]
Algorithm = Annotated[
    str, one_of(f"{_DEDUP}.algorithms:METHODS", "The search for blocks to replace; or lossless.", check=False)
]
EpsilonBound = Annotated[
    float | None, typer.Option(help="By how much epsilon may rise; by default each variant's own bound.", min=0)
]
MaxDistance = Annotated[
    float,
    typer.Option(
        help="Of metadata, within a cluster of variants that look for bases among themselves first; 2: all are one "
        "cluster, of whatever architecture.",
        min=0,
        max=2,
    ),
]
UtilityBound = Annotated[
    float | None, typer.Option(help="By how much accuracy may drop; by default each variant's own bound.", min=0, max=1)
]

# Test records of a run for validation, their seed, and how saliency is measured on them.
_BY_DEFAULT = None, None, "gradient"

_COLUMNS = (
    *("name", "bytes_own", "num_blocks", "num_shared", "epsilon_before", "epsilon_after"),
    *("accuracy", "perplexity", "acceptance", "bases"),
)


@command(app)
def plan(
    folder: Folder,
    algorithm: Algorithm = "drd",
    strategy: Strategy = "single",
    fairness: Fairness = "bounds",
    epsilon_bound: EpsilonBound = None,
    utility_bound: UtilityBound = None,
    max_distance: MaxDistance = 0.5,
) -> Result:
    """Which variants may take blocks of which others, and the epsilon and memory of each; no weights are read.

    Without loss (--algorithm lossless) nothing is taken from others, so there is nothing to plan.

    Example: fedpriv dedup plan variants --strategy multi
    """
    from fedpriv.models.dedup import DedupSettings, planning
    from fedpriv.models.dedup.algorithms import LOSSLESS
    from fedpriv.models.variants import blocks, folders
    from fedpriv.runs.figures import format_bytes

    how: dict[str, Any] = {"strategy": strategy, "fairness": fairness, "max_distance": max_distance}
    settings = DedupSettings(algorithm=algorithm, **how)
    if algorithm == LOSSLESS:
        raise InputError(f"algorithm = {algorithm!r}: stores every variant as it is, at its own epsilon; just run it")
    where = _described(folder, epsilon_bound, utility_bound)
    described, sizes = where.values(), {variant.name: folders.num_bytes(path) for path, variant in where.items()}
    block_size = min(blocks.fitting_block_size([size // 4]) for size in sizes.values())
    found = planning.plan(list(described), settings)
    targets: dict[str, Any] = {
        name: {"bases": list(a.bases), **asdict(a.guarantee), "epsilon_bound": a.limits.epsilon}
        | planning.search_memory(sizes[name], sum(sizes[base] for base in a.bases), block_size)
        for name, a in found.assignments.items()
    }
    lines = [
        f"{name}: blocks of {', '.join(t['bases'])}; epsilon {t['epsilon']:.4g} at delta {t['delta']:g}, "
        f"at most {t['epsilon_bound']:.4g}"
        for name, t in targets.items()
    ]
    lines += [f"{name}: stays as it is, {reason}" for name, reason in found.untouched.items()]
    unknown = [each.name for each in described if each.history.is_unknown]
    lines += [f"{name}: epsilon unknown, since nothing says what went into it" for name in unknown]
    if targets:
        most = max(targets.values(), key=lambda target: target["memory_bytes"])
        ours, published = (format_bytes(most[key]) for key in ("memory_bytes", "memory_bytes_published"))
        lines.append(f"a search holds {ours} at most, and its evaluator; its bases and one block take {published}")
    return Result({"targets": targets, "untouched": dict(found.untouched)}, lines)


@app.command()
def run(
    ctx: typer.Context,
    folder: Folder,
    store: StorePath,
    evaluator: Annotated[
        str,
        typer.Option(
            help="MODULE:FUNCTION that returns a fedpriv.models.dedup.Evaluator, or {variant: Evaluator}; or the "
            "folder of a run, which has a test set; by default that of the run beside the variants."
        ),
    ] = "",
    algorithm: Algorithm = "drd",
    block_size: Annotated[
        int | None,
        typer.Option(help="Values in a block; by default the store's, or as fits the smallest model.", min=1),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("-o", help="key=value, an option of the algorithm, or cutoff=NUM of private validation; repeats."),
    ] = None,
    acceptance: Annotated[
        str, one_of(f"{_DEDUP}.planning:Acceptance", "By a proof; or, unproven, by what the search's records lose.")
    ] = "proof",
    saliency: Annotated[
        str, one_of(f"{_DEDUP}.saliency:MEASURES", "As a run measures it; a FUNCTION has its own.")
    ] = "gradient",
    aggregation: Annotated[str, one_of(f"{_DEDUP}.saliency:AGGREGATIONS", "Of a block's saliency.")] = "l2",
    distance: Annotated[str, one_of(f"{_DEDUP}.distance:METRICS", "Of blocks.")] = "l2",
    strategy: Strategy = "single",
    fairness: Fairness = "bounds",
    epsilon_bound: EpsilonBound = None,
    utility_bound: UtilityBound = None,
    max_distance: MaxDistance = 0.5,
    validation_epsilon: Annotated[
        float | None, typer.Option(help="For private records: the epsilon of validating one variant.")
    ] = None,
    ledger: Annotated[Path | None, typer.Option(help="For private records: the ledger to charge.")] = None,
    validation_records: Annotated[
        int | None,
        typer.Option(help="Test records of the run for validation; 0 for all; by default its dedup_records.", min=0),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Which of them; by default the run's seed.", min=0)] = None,
    workers: Annotated[
        int, typer.Option(help="Processes that search targets on public records side by side.", min=1)
    ] = 1,
    as_json: AsJson = False,
) -> None:
    """Store all variants, replacing as many of their blocks by blocks of their bases as validation accepts.

    The variants of a run, RUN/variants, are validated on the run's own test set. With --algorithm lossless all are
    stored bit for bit, and nothing is validated. Interrupted, the same command goes on with the variants that are not
    stored yet.

    Example: fedpriv dedup run RUN/variants RUN/store --fairness outcome --validation-records 500

    Example: fedpriv dedup run variants store --evaluator study:evaluator --algorithm dred -o min_batch=10

    Example: fedpriv dedup run RUN/variants RUN/store --algorithm lossless

    Example: fedpriv dedup add later/variants store --evaluator RUN
    """
    from fedpriv.config import parse_overrides
    from fedpriv.models.dedup import DedupSettings, pipeline
    from fedpriv.models.dedup.algorithms import LOSSLESS
    from fedpriv.models.variants.store import Store
    from fedpriv.runs import RunWriter
    from fedpriv.runs.files import STORE, STORED_ANSWERS

    adding = ctx.info_name == "add"
    described = _described(folder, epsilon_bound, utility_bound)
    variants, read = list(described.values()), _reader(described)
    options = parse_overrides(option or [])
    how: dict[str, Any] = {"strategy": strategy, "fairness": fairness, "acceptance": acceptance}
    settings = DedupSettings(
        **how,
        max_distance=max_distance,
        algorithm=algorithm,
        aggregation=aggregation,
        metric=distance,
        cutoff=options.pop("cutoff", None),
        block_size=block_size or _fitting(variants, read, store),
        options=options,
    )
    chosen = validation_records, seed, saliency
    if algorithm == LOSSLESS and (evaluator, *chosen) != ("", *_BY_DEFAULT):
        raise InputError(f"evaluator, validation_records, seed, saliency: algorithm = {algorithm!r} validates nothing")
    with _shown(quiet=as_json) as observer:
        pipeline.check(variants, read, store, settings)
        judged = ({}, "", None) if algorithm == LOSSLESS else _evaluators(folder, variants, evaluator, chosen)
        evaluators, evaluation, judge = judged
        queries = pipeline.private_queries(evaluators, validation_epsilon, ledger)
        apart = pipeline.searchers(workers, partial(_again, folder, described, evaluator, chosen))
        with queries as private, Store(store) as opened, apart as searchers:
            outcomes = pipeline.deduplicate(
                variants,
                read,
                evaluators,
                opened,
                settings,
                private=private,
                evaluation=evaluation,
                observer=observer,
                adding=adding,
                apart=searchers,
            )
            answers = judge.answers_side_by_side(outcomes, read, opened.tensors) if judge else []
            summary = {
                "compression_ratio": opened.compression_ratio,
                "bytes_stored": opened.bytes_stored,
                "bytes_logical": opened.bytes_logical,
                "block_size": settings.block_size,
                "num_validations": sum(outcome.num_validations for outcome in outcomes),
                "variants": [asdict(outcome) for outcome in outcomes],
                "answers": [asdict(answer) for answer in answers],
            }
    run_folder = folder.absolute().parent
    if store.absolute() == run_folder / STORE:
        RunWriter(run_folder).write_answers(answers, STORED_ANSWERS)
    lines = [_line(outcome) for outcome in outcomes]
    for each in answers:
        lines += [f"{each.variant} asked: {_short(each.prompt)}", f"  before: {_short(each.before)}"]
        lines.append(f"  after:  {_short(each.after)}")
    lines.append(f"{summary['bytes_stored']} of {summary['bytes_logical']} bytes stored")
    show(summary, lines, as_json)


app.command(
    "add",
    help="Store variants that came later: each takes blocks of one that the store holds whole, or of the others.\n\n"
    "What is stored already stays as it is. The options are those of `run`.\n\n"
    "Example: fedpriv dedup add later/variants store --evaluator RUN",
)(run)


@command(app, "import")
def import_(
    adapters: Annotated[list[Path], typer.Argument(metavar="ADAPTER...", help="Folders that peft wrote.")],
    store: Annotated[Path, typer.Option(help="Folder of the store, which is made if it is missing.")],
    public: Annotated[
        bool, typer.Option("--public", help="Nobody's privacy depends on what they learned from.")
    ] = False,
    ledger: Annotated[Path | None, typer.Option(help="The ledger that was charged for them.")] = None,
    client: Annotated[str, typer.Option(help="Whose records went into them, as `fedpriv ledger show` names it.")] = "",
    model: ModelName = "",
) -> Result:
    """Put plain peft adapters into a store, bit for bit, from where `fedpriv serve` answers for all of them.

    With --public each costs nobody anything. With --ledger and --client each counts all releases of the runs that the
    client took part in, since nothing tells which of them it descends from. With neither its epsilon is unknown, and
    infinite in every sum.

    Example: fedpriv dedup import adapters/* --store store --public

    Example: fedpriv dedup import adapters/* --store store --ledger node.sqlite --client 2
    """
    from fedpriv.models.dedup import DedupSettings, pipeline
    from fedpriv.models.dedup.algorithms import LOSSLESS
    from fedpriv.models.variants import composition, folders
    from fedpriv.models.variants.store import Store, check_name

    if public and (ledger or client):
        raise InputError("public: says that nobody's records went into them; leave out --ledger and --client")
    if (ledger is None) != (not client):
        raise InputError("ledger, client: whose releases went into them takes both")
    unledgered = frozenset[composition.Upload]() if public else None, dict[str, float]()
    uploads, deltas = composition.charged(ledger, client) if ledger else unledgered
    where: dict[str, Path] = {}
    found: dict[str, tuple[Described, str]] = {}
    for path in adapters:
        described, reason = folders.foreign(path, uploads, deltas, model=model)
        check_name(described.name)
        if described.name in found:
            raise InputError(f"ADAPTER = {str(path)!r}: another is named {described.name!r} too; rename its folder")
        where[described.name], found[described.name] = path, (described, reason)
    variants = [described for described, _ in found.values()]
    read = _reader({path: found[name][0] for name, path in where.items()})
    settings = DedupSettings(algorithm=LOSSLESS, block_size=_fitting(variants, read, store))
    pipeline.check(variants, read, store, settings)
    with Store(store) as opened:
        outcomes = pipeline.deduplicate(variants, read, {}, opened, settings)
        sizes = {"bytes_stored": opened.bytes_stored, "bytes_logical": opened.bytes_logical}
    unserved = {name: reason for name, (_, reason) in found.items() if reason}
    lines = [_line(outcome) for outcome in outcomes]
    lines += [f"{name}: not served, {reason}" for name, reason in unserved.items()]
    lines.append(f"{sizes['bytes_stored']} of {sizes['bytes_logical']} bytes stored; next: fedpriv serve {store}")
    return Result({"variants": [asdict(each) for each in outcomes], "unserved": unserved, **sizes}, lines)


@command(app)
def restore(
    store: StorePath,
    name: Annotated[str, typer.Argument(help="Name of the variant.")],
    out: Annotated[Path, typer.Option(help="The safetensors file to write.")],
) -> Result:
    """Write a stored variant as an ordinary safetensors file, bit for bit as it was validated.

    Example: fedpriv dedup restore store round-20 --out round-20.safetensors
    """
    from fedpriv.files import write_new
    from fedpriv.models.publishing.saved import tensor_file
    from fedpriv.models.variants.store import Store

    check_new_file(out)
    with Store(store, read_only=True) as opened:
        tensors = opened.tensors(name)
    write_new(out, tensor_file(tensors), mode=None)
    return Result({"name": name, "file": str(out), "num_tensors": len(tensors)}, [f"{len(tensors)} tensors in {out}"])


@command(app)
def verify(store: StorePath) -> Result:
    """Check that every block, manifest and extra tensor of a store is as it was written. Exit code 1 if not.

    Example: fedpriv dedup verify store
    """
    from fedpriv.models.variants.store import Store

    with Store(store, read_only=True) as opened:
        damage, names = opened.verify(), opened.names
    sound = [f"{len(names)} variants, all sound"]
    return Result({"names": names, "damage": damage}, damage or sound, code=1 if damage else 0)


@command(app, "list")
def list_(store: StorePath) -> Result:
    """The variants of a store: bytes and blocks of their own, epsilon and accuracy, and whose blocks they may hold.

    Example: fedpriv dedup list store
    """
    from fedpriv.models.variants.store import Store
    from fedpriv.models.variants.stored import UNKNOWN, stored_models

    with Store(store, read_only=True) as opened:
        models = stored_models(opened)
        summary = {"bytes_stored": opened.bytes_stored, "bytes_logical": opened.bytes_logical}
    rows = [asdict(model) | {"bases": ", ".join(model.bases)} for model in models]
    for row in rows:
        row |= dict.fromkeys(("epsilon_before", "epsilon_after"), UNKNOWN) if row["origin_known"] is False else {}
    lines = [*table(rows, _COLUMNS), f"{summary['bytes_stored']} of {summary['bytes_logical']} bytes stored"]
    return Result({"variants": [asdict(model) for model in models], **summary}, lines)


@command(app)
def remove(
    store: StorePath,
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names of the variants.")],
    originals: Annotated[
        Path | None,
        typer.Option(help="Folder of the variants as they were: those with blocks of a base may look for another one."),
    ] = None,
    evaluator: Annotated[str, typer.Option(help="As of `fedpriv dedup run`, to validate them.")] = "",
    algorithm: Algorithm = "drd",
) -> Result:
    """Remove variants; `gc` then frees the space that only they used.

    Blocks of a base that others hold stay, with its description, which their epsilons count. With --originals these are
    deduplicated again with another base, if that takes fewer bytes.

    Example: fedpriv dedup remove store client-2 client-3

    Example: fedpriv dedup remove store round-10 --originals RUN/variants
    """
    from fedpriv.models.dedup import DedupSettings, pipeline
    from fedpriv.models.variants import stored
    from fedpriv.models.variants.store import Store

    _check_store(store)
    with Store(store) as opened:
        rebased = []
        if originals:
            described = {p: v for p, v in _described(originals, None, None).items() if v.name in opened.names}
            variants, read = list(described.values()), _reader(described)
            size = _fitting(variants, read, store)
            settings = DedupSettings(algorithm=algorithm, fairness="outcome", block_size=size)
            evaluators, evaluation, _ = _evaluators(originals, variants, evaluator)
            rebased = pipeline.rebase(opened, names, variants, read, evaluators, settings, evaluation=evaluation)
        else:
            opened.remove(*names)
        left, kept_values = opened.names, stored.kept_for_others(opened, names)
    lines = [f"{len(left)} variants left: {', '.join(left) or 'none'}", *map(_line, rebased)]
    for name, others in kept_values.items():
        lines.append(f"note: values of {name} stay in the store, since {', '.join(others)} hold them")
    changed = [outcome.name for outcome in rebased]
    return Result({"removed": names, "left": left, "rebased": changed, "kept_for_others": kept_values}, lines)


@command(app)
def gc(store: StorePath) -> Result:
    """Free the space of blocks that no variant uses any more.

    Example: fedpriv dedup gc store
    """
    from fedpriv.models.variants.store import Store

    _check_store(store)
    with Store(store) as opened:
        before = opened.bytes_stored
        num_blocks = opened.compact()
        freed, left = before - opened.bytes_stored, opened.bytes_stored
    values = {"num_blocks": num_blocks, "bytes_freed": freed, "bytes_stored": left}
    return Result(values, [f"{num_blocks} blocks dropped, {freed} bytes given back, {left} left"])


def _evaluators(
    folder: Path,
    variants: Sequence[Described],
    evaluator: str,
    chosen: tuple[int | None, int | None, str] = _BY_DEFAULT,
) -> tuple[dict[str, Evaluator], str, Any]:
    """{variant: its evaluator}, what it is called, and that of a run, which can show answers."""
    from fedpriv.models.dedup.adapter_variants import AdapterEvaluator
    from fedpriv.runs.files import CONFIG

    run, names = Path(evaluator) if evaluator else folder.absolute().parent, [variant.name for variant in variants]
    if (run / CONFIG).is_file():
        judge = AdapterEvaluator.of_run(run, *chosen)
        return dict.fromkeys(names, judge), judge.description, judge
    if not evaluator:
        raise InputError(f"folder = {str(folder)!r}: is not the variants of a run; give an --evaluator for them")
    if chosen != _BY_DEFAULT:
        raise InputError("validation_records, seed, saliency: are for a run's own test set; an --evaluator has its own")
    found = result_of("evaluator", evaluator)
    given = found if isinstance(found, Mapping) else dict.fromkeys(names, found)
    return {name: each for name, each in given.items() if name in names}, evaluator, None


def _again(
    folder: Path, described: Mapping[Path, Described], evaluator: str, chosen: tuple[int | None, int | None, str]
) -> tuple[Callable[[str], dict[str, Any]], dict[str, Evaluator]]:
    """The reader and the evaluators of a run of deduplication, in another process."""
    return _reader(described), _evaluators(folder, list(described.values()), evaluator, chosen)[0]


def _short(text: str) -> str:
    """The beginning of a text, in one line."""
    return printable(textwrap.shorten(text, 100, placeholder=" ..."))


def _line(outcome: Outcome) -> str:
    before, after = (_epsilon(each, outcome.origin_known) for each in (outcome.epsilon_before, outcome.epsilon_after))
    if outcome.untouched:
        return f"{outcome.name}: stays as it is, {outcome.untouched}; epsilon {before}"
    needed = outcome.records_needed
    more = f" (more would take about {needed} validation records to prove)" if needed else ""
    return (
        f"{outcome.name}: {outcome.num_replaced} of {outcome.num_blocks} blocks replaced in "
        f"{outcome.num_validations} validations{more}, {_utility(outcome)}"
        f"epsilon {before} to {after}"
    )


def _epsilon(epsilon: float, origin_known: bool) -> str:
    """An epsilon for people; one of unknown origin is infinite in sums."""
    from fedpriv.models.variants.stored import UNKNOWN

    return f"{epsilon:.4g}" if origin_known else UNKNOWN


def _utility(outcome: Outcome) -> str:
    """Its loss in words, of accuracy or of perplexity; empty if its records are private or nothing was proven."""
    from fedpriv.models.variants.blocks import perplexity, unproven
    from fedpriv.runs.figures import format_bound

    before, after = outcome.utility_before, outcome.utility_after
    marked = unproven(outcome.acceptance)
    if before is None or after is None or (outcome.loss_limit is None and not marked):
        return f"{marked}, " if marked else ""
    figures = f"accuracy {before:.4f} to {after:.4f}"
    if outcome.utility != "accuracy":
        figures = f"perplexity {perplexity(before):.2f} to {perplexity(after):.2f}"
    if outcome.loss_limit is None:
        return f"{figures} of the {outcome.num_records} records of the search, {marked}, "
    most = f"at most {format_bound(outcome.loss_limit)}" if outcome.loss_limit > 0 else "none"
    return f"{figures} of {outcome.num_records} records, a loss of {most}, "


def _described(folder: Path, epsilon_bound: float | None, utility_bound: float | None) -> dict[Path, Described]:
    """{folder: the description of its variant}, with other bounds where these are given."""
    from fedpriv.models.variants import folders

    found = sorted(path.parent for path in folder.glob("*/variant.json"))
    if not found:
        raise InputError(f"folder = {str(folder)!r}: holds no variants; each is a folder with a variant.json")
    given = {"epsilon_bound": epsilon_bound, "utility_bound": utility_bound}
    bounds: dict[str, Any] = {name: bound for name, bound in given.items() if bound is not None}
    described = {path: replace(folders.read(path), **bounds) for path in found}
    names = [variant.name for variant in described.values()]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(f"name = {twice[0]!r}: two variants in {folder} have it")
    return described


def _reader(described: Mapping[Path, Described]) -> Callable[[str], dict[str, Any]]:
    """Reads the tensors of a variant by its name."""
    from fedpriv.models.variants import folders

    where = {variant.name: path for path, variant in described.items()}
    return lambda name: folders.read_tensors(where[name])


def _fitting(variants: Sequence[Described], read: Callable[[str], Mapping[str, Any]], store: Path) -> int:
    """The block size of what a store holds, or that which fits the smallest of the architectures."""
    from fedpriv.files import is_free
    from fedpriv.models.variants.blocks import fitting_block_size
    from fedpriv.models.variants.store import Store

    if not is_free(store):
        with Store(store, read_only=True) as opened:
            if opened.names:
                return opened.manifest(opened.names[0]).layout.block_size
    models = [read(name) for name in {variant.architecture: variant.name for variant in variants}.values()]
    return min(fitting_block_size(t.size for t in model.values() if t.dtype == "float32") for model in models)


@contextmanager
def _shown(*, quiet: bool) -> Iterator[Observer]:
    """Show on stderr, within this context, what the observer is told; Ctrl-C ends it in one line and exit code 130."""
    last: list[Progress] = []
    rewrites = sys.stderr.isatty()

    def observer(progress: Progress) -> None:
        last[:] = [progress]
        if not quiet and (rewrites or progress.stored):
            left = progress.seconds_left
            line = (
                f"{progress.num_stored} of {progress.num_variants} variants stored | {progress.name} | "
                f"{progress.num_validations} validations | "
            ) + ("estimating the time left" if left is None else f"{timedelta(seconds=round(left))} left")
            typer.echo(
                f"\r\x1b[K{line}" if rewrites else line,
                err=True,
                nl=not rewrites or progress.num_stored == progress.num_variants,
            )

    try:
        yield observer
    except KeyboardInterrupt:
        stored = f"{last[0].num_stored} of {last[0].num_variants} variants are stored" if last else "nothing is stored"
        typer.echo(f"interrupted: {stored}; the same command goes on from there", err=True)
        raise typer.Exit(130) from None


def _check_store(store: Path) -> None:
    """Refuse a folder that is no store, which opening it for writing would make one."""
    from fedpriv.models.variants.store import Store

    Store(store, read_only=True).close()
