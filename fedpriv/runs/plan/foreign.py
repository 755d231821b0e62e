"""The cost of another platform's privacy setting, from its users' files, which are parsed and never imported or run.

Files bind names to values (`_Names`). A call or filter of a known kind (`_KINDS`) makes releases, which are accounted.
What decides a cost and is in no file is asked for by name.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import os
import re
import stat
import tomllib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fedpriv.errors import InputError
from fedpriv.privacy.accounting import sensitivity as clipping
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.calibration import noise_multiplier_for
from fedpriv.privacy.accounting.events import Event, PureEpsilon, SubsampledGaussian, Unit
from fedpriv.privacy.accounting.risk import risk_of
from fedpriv.privacy.accounting.trade_off import gaussian_epsilon

_Releases = tuple[Event, ...]
_MOST_BYTES, _MOST_STEPS = 2**20, 100_000
_UNKNOWN, _ITSELF, _ABSENT = object(), object(), "none"
# Above this epsilon without sampling everybody is found, and the trade-off function of millions of releases is slow.
_EVERYBODY = 1000.0

_ALSO = {"num_rounds": ("num_server_rounds", "rounds"), "delta": ("target_delta",), "target_epsilon": ("max_epsilon",)}
_WHOLE = {"num_rounds", "records", "batch_size", "epochs", "num_parameters", "num_sampled_clients", "num_tensors"}
_WHOLE |= {"engines"}
_SHARES = {"delta", "fraction", "sampling_probability"}
_MAY_BE_ZERO = {"noise_multiplier", "sensitivity", "clipped_count_stddev", "target_clipped_quantile"}
_TYPES = {"clipping": str, "poisson_sampling": bool, "drop_last": bool, "dp_enabled": bool, "head": bool}

_MATH: Mapping[Any, Callable[..., float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.Pow: math.pow,
    "abs": abs, "ceil": math.ceil, "exp": math.exp, "float": float, "int": math.trunc, "log": math.log, "max": max,
    "min": min, "sqrt": math.sqrt,
}  # fmt: skip
_NOISE, _EPSILON, _ROUND = (re.compile(word) for word in ("noise|sigma", "(^|_)eps(ilon)?(_|$)", "round"))


class Condition(NamedTuple):
    """A property that no file ensures: whether the epsilon needs it, and the releases in the other case, if known."""

    text: str
    is_counted_on: bool
    otherwise: _Releases | None = None


@dataclass(frozen=True)
class ForeignSetting:
    """The releases that a setting makes in a whole run, and what its file states.

    Attributes:
        releases: those that the claim is about first; None where the file does not say which.
        claimed: an epsilon > 0, stated for `claimed_for`; None without one.
        instead: the file's own terms for a noise multiplier.
        lost: the chance, >= 0, that the noise is smaller.
    """

    releases: _Releases | None
    claimed: float | None
    claimed_for: str
    conditions: Sequence[Condition]
    instead: Callable[[float], dict[str, float]]
    lost: float = 0.0

    def figures(self, delta: float) -> dict[str, Any]:
        """The cost at delta, the conditions with the cost in the other case, and what would meet the claim."""
        first = (self.releases or self.conditions[0].otherwise or ())[0]
        q, needed = first.sampling_probability, None
        if self.claimed:
            needed = noise_multiplier_for(self.claimed, delta, sampling_probability=q, steps=first.count)
        is_gaussian = self.releases and isinstance(first, SubsampledGaussian)
        return {
            "unit": first.unit,
            "effective_noise_multiplier": first.effective_noise_multiplier if is_gaussian else None,
            "releases": first.count,
            "sampling_probability": q,
            **_cost(self.releases, delta, self.lost),
            "delta": delta,
            "claimed_epsilon": self.claimed,
            "claimed_for": self.claimed_for if self.claimed else None,
            "conditions": [
                {"condition": each.text, "is_counted_on": each.is_counted_on} | _cost(each.otherwise, delta, self.lost)
                for each in self.conditions
            ],
            "needed_noise_multiplier": needed,
            "instead": self.instead(needed) if needed else None,
        }


def _cost(releases: _Releases | None, delta: float, lost: float) -> dict[str, Any]:
    """Epsilon, and the share found at 1 % false accusations; None where the releases are not known."""
    if releases is None:
        return {"epsilon": None, "found": None}
    left, plain = delta - lost, all(event.sampling_probability == 1 for event in releases)
    if left <= 0 or not all(event.is_noised for event in releases):
        return {"epsilon": math.inf, "found": 1.0}
    is_gaussian = isinstance(releases[0], SubsampledGaussian)
    if plain and not is_gaussian and (quick := epsilon_of(releases, left, "rdp").epsilon) > _EVERYBODY:
        return {"epsilon": quick, "found": 1.0}
    risk = risk_of(releases, left)
    epsilon = gaussian_epsilon(risk.mu, left) if plain and is_gaussian else epsilon_of(releases, left).epsilon
    return {"epsilon": epsilon, "found": min(1.0, risk.tpr_at_fpr["0.01"] + lost)}


def check_settings(paths: Sequence[Path], given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The privacy settings in the files of one app or job, with what they cost: see `ForeignSetting.figures`.

    Args:
        paths: Python, .json, .conf or .toml, each of at most 1 MiB; names in one may have their values in another.
        given: {name: value} of what the files do not say, or what holds in its place; - and _ are alike.

    Raises:
        InputError: a file cannot be read, holds no setting of a known kind, or a value is missing or out of range.
    """
    files, found = ", ".join(map(str, paths)), list[_Mention]()
    names = _Names({_plain(name): value for name, value in given.items()})
    for path in paths:
        if path.suffix not in _READERS:
            raise InputError(f"{path}: must be one of {', '.join(_READERS)}")
        text = _text(path)
        try:
            found += _READERS[path.suffix](text, path.name, names)
        except (RecursionError, MemoryError):
            raise InputError(f"{path}: is nested too deeply to be read") from None
        except (ValueError, SyntaxError) as error:
            raise InputError(f"{path}: is no {path.suffix} file ({str(error).splitlines()[0][:120]})") from None
    if not found:
        raise InputError(f"{files}: no privacy setting found; known are {', '.join(_KINDS)}")
    try:
        values = [each.values(names) for each in found]
    except RecursionError:
        raise InputError(f"{files}: names lead to each other too often to be followed") from None
    if missing := sorted({name for each in values for name, value in each.items() if value is _UNKNOWN}):
        wanted = " ".join(f"--set {name}=..." for name in missing)
        raise InputError(f"{files}: {', '.join(missing)} cannot be read there; give {wanted}")
    if unused := sorted(names.given.keys() - names.used):
        raise InputError(f"--set {unused[0]}: no such name decides a cost in {files}")
    shown = [{name: v for name, v in each.items() if v not in ("auto", _ABSENT)} for each in values]
    return [
        {"mechanism": each.kind, "place": each.place, "read": read}
        | _KINDS[each.kind].cost(v).figures(v["dp_delta" if "dp_delta" in v else "delta"])
        for each, v, read in zip(found, values, shown, strict=True)
    ]


def _text(path: Path) -> str:
    """The text of a regular file that is no link, so that a hostile folder leads nowhere."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            is_file = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            content = file.read(_MOST_BYTES + 1) if is_file else b""
    except OSError as error:
        reason = "is a link; name the file itself" if path.is_symlink() else f"cannot be read ({error.strerror})"
        raise InputError(f"{path}: {reason}") from None
    if not is_file or len(content) > _MOST_BYTES:
        raise InputError(f"{path}: must be a file of at most {_MOST_BYTES:,} bytes")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path}: is not text in UTF-8") from None


class _Names:
    """The values that files bind to names. A name has one only if everything that binds it says the same."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given, self.used, self._steps = given, set[str](), 0
        self._bound = defaultdict[str, list[Any]](list)

    def bind(self, name: Any, value: Any) -> None:
        """Note one more value of a name: a plain one, or an expression."""
        self._bound[_plain(str(name))].append(value)

    def look_up(self, name: str, default: Any = _UNKNOWN, seen: frozenset[str] = frozenset()) -> Any:
        """The value of a name; the default if nothing binds it."""
        name = _plain(name)
        if name in self.given:
            self.used.add(name)
            return self.given[name]
        if name in seen:
            return _ITSELF
        bound = [each for also in (name, *_ALSO.get(name, ())) for each in self._bound.get(also, ())]
        found = {self.value(each, seen | {name}) for each in bound} - {_ITSELF}
        return default if not bound else found.pop() if len(found) == 1 else _UNKNOWN

    def value(self, node: Any, seen: frozenset[str] = frozenset()) -> Any:
        """The value of an expression of names, numbers and arithmetic; that of anything else is not known."""
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise RecursionError
        match node:
            case ast.Constant(value=bool() | int() | float() | str() as value):
                return value
            case ast.Name() | ast.Attribute():
                return self.look_up(_last(node), seen=seen)
            case ast.Subscript(slice=ast.Constant(value=str(name))):
                return self.look_up(name, seen=seen)
            case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value=str(name)), *rest]):
                default = self.value(rest[0], seen) if rest else _UNKNOWN
                found = self.look_up(name, default, seen)
                return default if found is _ITSELF and len(self._bound[_plain(name)]) == 1 else found
            case ast.Call(args=arguments) if _last(node.func) in _MATH:
                return self._computed(_MATH[_last(node.func)], arguments, seen)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self._computed(operator.neg, [operand], seen)
            case ast.BinOp(left=left, op=kind, right=right) if type(kind) in _MATH:
                return self._computed(_MATH[type(kind)], [left, right], seen)
            case str() if placeholder := re.fullmatch(r"\$?\{([\w.-]+)\}", node):  # NVFLARE's, and HOCON's
                return self.look_up(placeholder[1].rpartition(".")[2], seen=seen)
            case bool() | int() | float() | str():
                return node
        return _UNKNOWN

    def _computed(self, function: Callable[..., float], arguments: Sequence[Any], seen: frozenset[str]) -> Any:
        """The finite result of arithmetic in floats, which no power makes slow."""
        try:
            result = float(function(*(float(self.value(each, seen)) for each in arguments)))
        except (TypeError, ValueError, ArithmeticError):
            return _UNKNOWN
        return result if math.isfinite(result) else _UNKNOWN


class _Mention(NamedTuple):
    """A setting in a file, with its arguments there, each a plain value or an expression."""

    kind: str
    place: str
    arguments: Mapping[str, Any]
    times: Collection[str] = ()
    line: Any = None

    def values(self, names: _Names) -> dict[str, Any]:
        """{name: value} of what decides the cost; `_UNKNOWN` where it has to be asked for."""
        kind, values = _KINDS[self.kind], dict[str, Any]()
        for name, default in [*kind.reads.items(), *dict.fromkeys(self.times).items()]:
            default = _UNKNOWN if default is None else default
            own = self.arguments.get(name, self.arguments.get("**"))
            if isinstance(own, ast.Constant) and own.value is None:
                own = default
            if name in names.given or (own is None and name not in kind.order.split()):
                value = names.look_up(name, default)
            else:
                value = default if own is None else names.value(own)
            values[name] = value if value is _UNKNOWN or value in ("auto", _ABSENT) else _checked(name, value)
        if self.line is not None and _UNKNOWN not in values.values():
            values["adds_up_to"] = _added_up(self.line, names, values)
        return values


def _checked(name: str, value: Any) -> Any:
    """A value in its range."""
    plain, kind = name.removeprefix("dp_"), _TYPES.get(name)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if kind:
        right, wanted = isinstance(value, kind), "a name" if kind is str else "true or false"
    elif plain in _WHOLE:
        right, wanted = is_number and 1 <= value <= 1e12 and value == int(value), "a whole number in [1, 1e12]"
    elif plain in _SHARES:
        right, wanted = (
            is_number and 0 < value <= 1 and (plain, value) != ("delta", 1),
            f"a number in (0, {'1)' if plain == 'delta' else '1]'}",
        )
    else:
        right = is_number and (value > 0 or (value == 0 and plain in _MAY_BE_ZERO))
        wanted = f"a number {'>=' if plain in _MAY_BE_ZERO else '>'} 0"
    if not right:
        raise InputError(f"{name} = {str(value)[:60]!r}: must be {wanted}")
    return value if kind else int(value) if plain in _WHOLE else float(value)


def _gaussian(z: float, count: int = 1, q: float = 1.0, unit: Unit = "client") -> _Releases:
    return (SubsampledGaussian(noise_multiplier=z, sampling_probability=q, count=count, unit=unit),)


def _claimed(v: Mapping[str, Any]) -> tuple[float | None, str]:
    return None if v["target_epsilon"] == _ABSENT else v["target_epsilon"], "the whole run"


def _scaled(factor: float, needed: float) -> dict[str, float]:
    return {"noise_multiplier": factor * needed}


def _local(v: Mapping[str, Any]) -> ForeignSetting:
    """Gaussian noise on a client's whole clipped update, sized by the classical bound for one epsilon."""
    v = {name.removeprefix("dp_"): value for name, value in v.items()}
    clip, sensitivity, rounds = v["clipping_norm"], v["sensitivity"], v["num_rounds"]
    largest = clipping.UPLOAD_FACTOR * clip
    z = clipping.local_dp_multiplier(clip, sensitivity, v["epsilon"], v["delta"]) if v.get("enabled", True) else 0.0
    at_one = clipping.local_dp_multiplier(clip, largest, 1.0, v["delta"])
    text = f"what is protected moves the update by at most {sensitivity:g}, though clipping allows {largest:g}"
    trusting = Condition(text, False, _gaussian(z * largest / sensitivity, rounds) if z else None)
    conditions = [Condition("nobody sees an upload but in a secure sum", False), *[trusting] * (sensitivity < largest)]

    def own_terms(needed: float) -> dict[str, float]:
        return {"sensitivity": largest, "epsilon": at_one / needed}

    return ForeignSetting(_gaussian(z, rounds), v["epsilon"], "each round", conditions, own_terms)


def _central(v: Mapping[str, Any]) -> ForeignSetting:
    """Noise that a server adds to an average of clipped updates; two of one client are up to twice the clip apart."""
    rounds, factor = v["num_rounds"], clipping.UPLOAD_FACTOR
    z, lost = _late(v) if "clipped_count_stddev" in v else (v["noise_multiplier"], 0.0)
    trusted = "the server is trusted: it sees each upload, or their exact sum, before it adds the noise"
    conditions = [
        Condition(trusted, True, _gaussian(0.0)),
        Condition("as many clients answer as stated, and all weigh the same", True),
        Condition("a client is left out, not given other data", False, _gaussian(z, rounds)),
        Condition("who takes part is a Poisson sample that nobody sees", False),
    ]
    return ForeignSetting(_gaussian(z / factor, rounds), *_claimed(v), conditions, partial(_scaled, factor), lost)


def _late(v: Mapping[str, Any]) -> tuple[float, float]:
    """The least noise multiplier of sum and count together, and the chance that it is smaller.

    Flower's noise has the clip after its update, exp(-rate (share clipped - target)) times that of the updates. The
    share has noise of its own, of which less than 1e-9 lies beyond six standard deviations.
    """
    stated, clients, stddev = v["noise_multiplier"], v["num_sampled_clients"], v["clipped_count_stddev"]
    stddev = clients / 20 if stddev == "auto" else stddev
    if stated == 0 or stddev == 0:
        return 0.0, 0.0
    if stated >= 2 * stddev:
        raise InputError(f"noise_multiplier = {stated:g}: must be < 2 clipped_count_stddev = {2 * stddev:g}")
    most = max(0.0, 1 + 6 * stddev / clients - v["target_clipped_quantile"])
    of_count, shrunk = (2 * stddev) ** -2, math.exp(-v["clip_norm_lr"] * most)
    return ((stated**-2 - of_count) / shrunk**2 + of_count) ** -0.5, 1e-9 * v["num_rounds"]


def _sparse(v: Mapping[str, Any]) -> ForeignSetting:
    """NVFLARE's sparse vector: epsilon for which values are sent, and Laplace noise on each of those."""
    rounds, sent = v["num_rounds"], math.ceil(v["num_parameters"] * v["fraction"])
    each = v["noise_var"] if v["epsilon_release"] == "auto" else v["epsilon_release"] / sent
    costs, half = ((v["epsilon"], rounds), (each, sent * rounds)), v["epsilon"] / (2 * rounds)
    releases = tuple(PureEpsilon(epsilon=epsilon, count=count, unit="client") for epsilon, count in costs)
    text = f"the choice costs what is stated, though it ends with a whole pass, not at {sent:,} values"
    conditions = [Condition(text, True), Condition("no parameter is a single number, which gets no noise", True)]
    claimed_for = "the choice of one round's values"
    return ForeignSetting(
        releases, v["epsilon"], claimed_for, conditions, lambda _: {"epsilon": half, "epsilon_release": half}
    )


def _without_noise(v: Mapping[str, Any]) -> ForeignSetting:
    """A filter that clips or leaves out, or whose noise has a size that the update itself decides."""
    condition = Condition("noise of a fixed size on an update of bounded norm", False)
    return ForeignSetting(_gaussian(0.0), None, "", [condition], partial(_scaled, clipping.UPLOAD_FACTOR))


def _opacus(v: Mapping[str, Any]) -> ForeignSetting:
    """Opacus' noisy steps: q = 1 / (number of batches), so many steps an epoch; anew in each round where it is made."""
    if v["clipping"] not in ("flat", "per_layer"):  # whose noise has the norm of all layers' clips
        raise InputError(f"clipping = {v['clipping']!r}: must be flat or per_layer, of which the cost is known")
    whole, rest = divmod(v["records"], v["batch_size"])
    batches, epochs, rounds = max(1, whole + (rest > 0 and not v["drop_last"])), v["epochs"], v.get("num_rounds", 1)
    rounds *= v.get("engines", 1)
    z, claimed, steps = v.get("noise_multiplier"), v.get("target_epsilon"), epochs * batches
    if z is None:
        z = noise_multiplier_for(v["target_epsilon"], v["delta"], sampling_probability=1 / batches, steps=steps)
    # Without Poisson sampling a record is in one batch of each epoch, and everybody may know in which.
    cases = [_gaussian(z, steps * rounds, 1 / batches, "record"), _gaussian(z, epochs * rounds, unit="record")]
    releases, otherwise = cases if v["poisson_sampling"] else cases[::-1]
    claimed_for = "each engine" if rounds > 1 else "the whole run"
    conditions = [Condition("batches are Poisson samples", v["poisson_sampling"], otherwise)]
    return ForeignSetting(releases, claimed, claimed_for, conditions, partial(_scaled, 1.0))


def _row(v: Mapping[str, Any]) -> ForeignSetting:
    """A row of a paper's table: steps on Poisson samples, under a clipping rule."""
    rule, rounds = clipping.clipping_rule(v["clipping"]), v["num_rounds"]
    parts = clipping.num_parts(rule, num_tensors=v["num_tensors"], head=v["head"])
    factor = clipping.sensitivity_factor(rule, parts)
    cases = [_gaussian(v["noise_multiplier"] / factor, rounds, q, "record") for q in (v["sampling_probability"], 1.0)]
    conditions = [Condition("batches are Poisson samples, and nobody knows who is in one", True, cases[1])]
    return ForeignSetting(cases[0], *_claimed(v), conditions, partial(_scaled, factor))


def _formula(v: Mapping[str, Any]) -> ForeignSetting:
    """A line whose "epsilon" rises with the noise, as none does; which noise the file adds is not known."""
    z, rounds, factor = v["noise_multiplier"], v["num_rounds"], clipping.UPLOAD_FACTOR
    text = f"each client's part of a sum is clipped to C, and the noise is {z:g} C, fixed before"
    best, claimed_for = Condition(text, False, _gaussian(z / factor, rounds)), "the run, though it rises with the noise"
    return ForeignSetting(None, v["adds_up_to"], claimed_for, [best], partial(_scaled, factor))


class _Kind(NamedTuple):
    """A mechanism: its cost, what decides it with defaults, and its parameters in its platform's order.

    What has the default None is asked for; a name that is no parameter is looked up among all names of the files.
    """

    cost: Callable[[Mapping[str, Any]], ForeignSetting]
    reads: Mapping[str, Any]
    order: str = ""


_RUN = {"num_rounds": None, "delta": 1e-5}
_AIMED = {"target_epsilon": _ABSENT, "delta": 1e-5}
_FLIP = {"clipping_norm": 1.0, "sensitivity": 1e-4, "epsilon": 10.0, "delta": 1e-5}
_FLIP_MOD = {"dp_enabled": True} | {f"dp_{name}": value for name, value in _FLIP.items()}
_LOADER = {"batch_size": None, "records": None, "drop_last": False}
_ENGINE = {"clipping": "flat", "poisson_sampling": True, "epochs": None} | _LOADER
_NOISY = {"noise_multiplier": None, "num_rounds": None}
_QUANTILE = {"num_sampled_clients": None, "target_clipped_quantile": 0.5, "clip_norm_lr": 0.2}
_SPARSE = {"fraction": 0.1, "epsilon": 0.1, "noise_var": 0.1, "epsilon_release": "auto", "num_parameters": None}
_FIXED = _Kind(_central, _NOISY | _AIMED, "strategy noise_multiplier clipping_norm num_sampled_clients")
_ADAPTIVE = _Kind(
    _central,
    _NOISY | _AIMED | _QUANTILE | {"clipped_count_stddev": "auto"},
    "strategy noise_multiplier num_sampled_clients",
)
_KINDS = {
    "SVTPrivacy": _Kind(_sparse, _SPARSE | _RUN, "fraction epsilon noise_var"),
    "PercentilePrivacy": _Kind(_without_noise, {"delta": 1e-5}),
    "GaussianPrivacy": _Kind(_without_noise, {"delta": 1e-5}),
    "flip_local_dp_mod": _Kind(_local, _FLIP_MOD | {"num_rounds": None}),
    "LocalDpMod": _Kind(_local, dict.fromkeys((*_FLIP, "num_rounds")), " ".join(_FLIP)),
    "DifferentialPrivacyServerSideFixedClipping": _FIXED,
    "DifferentialPrivacyClientSideFixedClipping": _FIXED,
    "DifferentialPrivacyServerSideAdaptiveClipping": _ADAPTIVE,
    "DifferentialPrivacyClientSideAdaptiveClipping": _ADAPTIVE,
    "make_private": _Kind(_opacus, _ENGINE | {"noise_multiplier": None, "delta": 1e-5}),
    "make_private_with_epsilon": _Kind(_opacus, _ENGINE | {"target_epsilon": None, "delta": None}),
    "a table's row": _Kind(
        _row, _NOISY | _AIMED | {"sampling_probability": None, "clipping": "joint", "head": False, "num_tensors": 1}
    ),
    "a line that adds up epsilon": _Kind(_formula, _NOISY | {"delta": 1e-5}),
}


def _of_python(text: str, file: str, names: _Names) -> Iterator[_Mention]:
    tree = ast.parse(text)
    times = defaultdict[int, set[str]](set)
    for node in ast.walk(tree):
        if repeats := "num_rounds" if _is_round(node) else "engines" if isinstance(node, (ast.For, ast.While)) else "":
            for inner in ast.walk(node):
                times[id(inner)].add(repeats)
    for node in ast.walk(tree):
        place = f"{file}:{getattr(node, 'lineno', 0)}"
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    _bind(target, value, names)
            case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
                _bind(target, value, names)
            case ast.AugAssign(target=target) | ast.For(target=target) | ast.comprehension(target=target):
                _bind(target, _UNKNOWN, names)
            case ast.keyword(arg=name, value=value):
                names.bind(name, value)
            case ast.Dict(keys=keys, values=values):
                for key, value in zip(keys, values, strict=True):
                    names.bind(getattr(key, "value", None), value)
            case ast.Name(id="flip_local_dp_mod"):
                yield _Mention("flip_local_dp_mod", place, {})
            case ast.Call(func=func, args=arguments, keywords=keywords):
                kind, given = _last(func), dict[str, Any]((each.arg or "**", each.value) for each in keywords)
                if kind == "add_argument":  # its default holds until a person types another
                    flags = [str(each.value) for each in arguments if isinstance(each, ast.Constant)]
                    flag = next((flag for flag in flags if flag.startswith("--")), "".join(flags[:1])).lstrip("-")
                    names.bind(getattr(given.get("dest"), "value", flag), given.get("default", _UNKNOWN))
                elif kind in _KINDS:
                    order = _KINDS[kind].order.split()
                    if len(arguments) > len(order) or any(isinstance(each, ast.Starred) for each in arguments):
                        given = {"**": _UNKNOWN}
                    found = dict(zip(order, arguments, strict=False)) | given
                    found |= {"delta": found["target_delta"]} if "target_delta" in found else {}
                    yield _Mention(kind, place, found, times[id(node)] if _KINDS[kind].cost is _opacus else ())
        if isinstance(node, (ast.AugAssign, ast.Assign)) and _rises(node):
            yield _Mention("a line that adds up epsilon", place, {}, line=node)


def _is_round(node: ast.AST) -> bool:
    """Whether a function runs once in each round of a Flower app."""
    decorators = [getattr(each, "func", each) for each in getattr(node, "decorator_list", ())]
    return isinstance(node, ast.FunctionDef) and (node.name == "fit" or "train" in map(_last, decorators))


def _bind(target: ast.expr, value: Any, names: _Names) -> None:
    """Note what a target gets; of several at once nothing is known."""
    if isinstance(target, (ast.Tuple, ast.List)):
        for each in ast.walk(target):
            names.bind(_last(each), _UNKNOWN)
    else:
        is_item = isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant)
        names.bind(target.slice.value if is_item else _last(target), value)  # type: ignore[attr-defined]


def _rises(node: ast.AugAssign | ast.Assign) -> bool:
    """Whether a line gives something called epsilon a value with the noise in a numerator."""
    target = node.target if isinstance(node, ast.AugAssign) else node.targets[0]
    return bool(_EPSILON.search(_plain(_last(target)))) and _has_above(node.value)


def _has_above(node: ast.expr, is_above: bool = True) -> bool:
    """Whether a name of noise is in a numerator of an expression."""
    match node:
        case ast.Name() | ast.Attribute():
            return is_above and bool(_NOISE.search(_plain(_last(node))))
        case ast.BinOp(left=left, op=ast.Mult() | ast.Add() | ast.Div() as op, right=right):
            return _has_above(left, is_above) or _has_above(right, is_above ^ isinstance(op, ast.Div))
        case ast.Call(func=func, args=arguments) if _last(func) in _MATH:
            return any(_has_above(each, is_above) for each in arguments)
    return False


def _added_up(node: ast.AugAssign | ast.Assign, names: _Names, values: Mapping[str, Any]) -> float | None:
    """The sum of such a line over all rounds, which names of rounds without a value count; None if it is not known."""
    leaves = {_plain(_last(each)) for each in ast.walk(node.value)} - {""}
    noise = {leaf: values["noise_multiplier"] for leaf in leaves if _NOISE.search(leaf)}
    counters = [leaf for leaf in leaves if _ROUND.search(leaf) and names.look_up(leaf) is _UNKNOWN]
    view, found = copy(names), []
    for at in range(1, min(values["num_rounds"], 10_000) + 1):
        view.given = {**names.given, **noise, **dict.fromkeys(counters, at)}
        found.append(view.value(node.value))
    if not all(isinstance(value, float) and value > 0 for value in found):
        return None
    return math.fsum(found) if isinstance(node, ast.AugAssign) else found[-1]


def _last(node: Any) -> str:
    """The last part of a dotted name; empty for anything else."""
    return str(getattr(node, "id", getattr(node, "attr", "")))


def _plain(name: str) -> str:
    return name.replace("-", "_")


def _of_job(text: str, file: str, names: _Names) -> Iterator[_Mention]:
    """NVFLARE's filters anywhere in a configuration, whose plain values are names for the others."""
    left = [_hocon(text)]
    while left:
        node = left.pop()
        items = list(node.values()) if isinstance(node, dict) else node if isinstance(node, list) else []
        left += reversed(items)
        if isinstance(node, dict):
            for name, value in node.items():
                if isinstance(value, (bool, int, float, str)):
                    names.bind(name, value)
            kind = str(node.get("path", node.get("name", ""))).rpartition(".")[2]
            if kind in _KINDS and isinstance(node.get("args", {}), dict):
                yield _Mention(kind, file, node.get("args", {}))


def _of_toml(text: str, file: str, names: _Names) -> Iterator[_Mention]:
    """A Flower app's run configuration, or a row of a table by the names of its columns."""
    content = app = tomllib.loads(text)
    for name in ("tool", "flwr", "app", "config") if "tool" in content else ():
        app = app.get(name, {}) if isinstance(app, dict) else {}
    app = app if isinstance(app, dict) else {}
    for name, value in app.items():
        if isinstance(value, (bool, int, float, str)):
            names.bind(name, value)
    if any(_plain(name) in _FLIP_MOD for name in app):
        yield _Mention("flip_local_dp_mod", file, {})
    elif app is content:
        yield _Mention("a table's row", file, {})


_READERS = {".py": _of_python, ".json": _of_job, ".conf": _of_job, ".toml": _of_toml}
_TOKEN = re.compile(r'(?:#|//)[^\n]*|"(?:[^"\\\n]|\\.)*"|[][{}:=]|(?:\$\{[^}\n]*\}|[^\s,:=\[\]{}"#])+|"')


def _hocon(text: str) -> Any:
    """The part of HOCON that jobs are written in: JSON with =, without commas and quotes, and with comments."""
    parts, before = [], ""
    for token in _TOKEN.findall(text):
        if token.startswith(("#", "//")):
            continue
        token = {"=": ":"}.get(token, token)
        is_word = token not in "[]{}:"
        if is_word and not re.fullmatch(r'".*"|true|false|null|-?\d+(\.\d+)?([eE][-+]?\d+)?', token):
            token = json.dumps(token)
        if before and before not in "[{:" and (is_word or token in "[{"):
            parts.append(":" if token == "{" and before not in "]}" else ",")
        parts.append(token)
        before = token
    return json.loads("".join(parts) if parts[:1] in (["{"], ["["]) else f"{{{''.join(parts)}}}")
