"""Preprocessing of a table's columns into features, fitted on the training part alone."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import pandas as pd
import torch
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, OneHotEncoder, StandardScaler

from fedpriv.errors import InputError
from fedpriv.methods.integral._selection import Indices
from fedpriv.methods.integral.procedure import Data

Scaling = Literal["standard", "min-max"]

_MAX_CLASSES = 100

# If a column has more categories than this, the rarest ones share one feature.
_MAX_CATEGORIES = 50

# Fewer distinct whole numbers than this may well be a count or an age that happens not to repeat.
_MIN_NUMBERED = 20

# A categorical column with more distinct values per record than this is taken for a name or an id.
_ID_SHARE = 0.5

_MISSING = "(missing)"

# What a column says of rarer classes gives them away if it is right so often, and of so large a share of their records.
_PURITY, _SHARE_GIVEN_AWAY = 0.995, 0.1
_LEAST_OF_A_VALUE, _BINS = 5, 50


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedTable(Data):
    """Features, float32, and labels of a table, split into two parts.

    Attributes:
        left_out: {column: why it is not a feature}.
        num_unlabelled: records without a label, which were left out.
        giveaways: {column: training accuracy of its values alone, each taken for its commonest class} of the columns
            that name other classes than the commonest almost without error; of several also of all, as `all of them`.
    """

    feature_names: tuple[str, ...]
    left_out: Mapping[str, str]
    num_unlabelled: int
    giveaways: Mapping[str, float]


def prepare(
    frame: pd.DataFrame,
    target: str,
    *,
    test_fraction: float = 0.3,
    seed: int = 0,
    drop: Sequence[str] = (),
    keep: Sequence[str] = (),
    scaling: Scaling = "standard",
) -> PreparedTable:
    """The table, split by class into a training and a test part, as features that the training part alone determines.

    Blanks around names and values do not count, and a value of nothing else is missing. A class that differs from
    another by a full stop behind it alone is the other, as `>50K.` in the test file of UCI Adult is `>50K`.

    A column is numeric if all of its training values are; it is scaled, and missing values, as well as test values
    that are not numbers, become the training median. All other columns are categorical: one feature for each category
    and one for missing values, but none for a category that does not occur in training. Columns without information
    are left out, and so are ids: whole numbers none of which repeats, and names that hardly ever do.

    Args:
        frame: one row per record, of strings or numbers.
        test_fraction: in (0, 1).
        keep: columns that become features although they look like ids.
        scaling: of numeric columns: `standard`, to mean 0 and variance 1, or `min-max`, to [0, 1].

    Raises:
        InputError: a column does not exist, the target does not hold classes, there are too few records, or no
            column is left to learn from.
    """
    frame = frame.rename(columns=str.strip).map(lambda value: value.strip() if isinstance(value, str) else value)
    target, drop, keep = target.strip(), [name.strip() for name in drop], [name.strip() for name in keep]
    _check_columns(frame, target, drop, keep)
    if not 0 < test_fraction < 1:
        raise InputError(f"test_fraction = {test_fraction}: must lie in (0, 1)")
    if scaling not in get_args(Scaling):
        raise InputError(f"scaling = {scaling!r}: must be one of {', '.join(get_args(Scaling))}")
    frame = frame.astype(object).where(frame.notna() & (frame != ""), None)
    labelled = frame[frame[target].notna()]
    stopped = {f"{name}.": name for name in set(labelled[target].map(str))}
    labelled = labelled.assign(**{target: labelled[target].map(lambda value: stopped.get(str(value), value))})
    classes = _classes(labelled, target)
    numbers = {name: number for number, name in enumerate(classes)}
    labels = labelled[target].map(str).map(numbers).to_numpy(dtype=np.int64)
    train, test = _split(labels, classes, test_fraction, seed)
    columns = [name for name in frame.columns if name != target and name not in drop]
    train_part, test_part = labelled[columns].iloc[train], labelled[columns].iloc[test]
    numeric, categorical, left_out = _column_kinds(train_part, keep)
    if not numeric and not categorical:
        raise InputError(f"target = {target!r}: no other column holds anything to learn from; left out: {left_out}")
    preprocessing = _preprocessing(numeric, categorical, scaling)
    typed = _typed(train_part, numeric, categorical)
    features = preprocessing.fit_transform(typed)
    return PreparedTable(
        train_features=torch.from_numpy(np.asarray(features, dtype=np.float32)),
        train_labels=torch.from_numpy(labels[train]),
        test_features=torch.from_numpy(
            np.asarray(preprocessing.transform(_typed(test_part, numeric, categorical)), dtype=np.float32)
        ),
        test_labels=torch.from_numpy(labels[test]),
        classes=classes,
        feature_names=tuple(map(str, preprocessing.get_feature_names_out())),
        left_out=left_out,
        num_unlabelled=len(frame) - len(labelled),
        giveaways=_giveaways(typed, labels[train]),
    )


def _check_columns(frame: pd.DataFrame, target: str, drop: Sequence[str], keep: Sequence[str]) -> None:
    known = ", ".join(map(str, frame.columns))
    if not frame.columns.is_unique:
        raise InputError(f"columns: two have one name but for blanks around it; rename one of {known}")
    for key, name in (("target", target), *(("drop", name) for name in drop), *(("keep", name) for name in keep)):
        if name not in frame.columns:
            raise InputError(f"{key} = {name!r}: no such column; there are {known}")
    if target in drop:
        raise InputError(f"drop = {target!r}: is the target")
    if target in keep:
        raise InputError(f"keep = {target!r}: is the target, which is never a feature")
    if both := sorted(set(drop) & set(keep)):
        raise InputError(f"keep = {both[0]!r}: is to be dropped too; give one of the two")


def _classes(labelled: pd.DataFrame, target: str) -> tuple[str, ...]:
    names = sorted(set(labelled[target].map(str)))
    if len(names) < 2:
        raise InputError(f"target = {target!r}: {len(names)} classes; there must be at least 2")
    if len(names) > _MAX_CLASSES:
        raise InputError(f"target = {target!r}: {len(names)} distinct values; at most {_MAX_CLASSES} can be classes")
    return tuple(names)


def _split(
    labels: np.ndarray, classes: Sequence[str], test_fraction: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the training and of the test part, both with the class distribution of the whole data set."""
    counts = np.bincount(labels)
    if counts.min() < 2:
        raise InputError(
            f"class {classes[int(counts.argmin())]!r}: has {counts.min()} record; two are needed, one for the test"
        )
    rows, smaller = np.arange(len(labels)), min(test_fraction, 1 - test_fraction) * len(labels)
    if smaller < len(classes):
        raise InputError(
            f"test_fraction = {test_fraction}: {len(labels)} records are too few to have all {len(classes)} classes on "
            "both sides"
        )
    train, test = train_test_split(rows, test_size=test_fraction, random_state=seed, stratify=labels)
    return np.sort(train), np.sort(test)


def _column_kinds(train: pd.DataFrame, keep: Sequence[str]) -> tuple[list[str], list[str], dict[str, str]]:
    """Numeric columns, categorical columns, and those left out, with the reason; by the training part.

    An infinite number counts as missing and does not make its column categorical.
    """
    numeric, categorical, left_out = [], [], {}
    for name in train.columns:
        present = train[name].dropna()
        numbers = _numbers(present)
        num_distinct = present.map(str).nunique()
        if not len(present):
            left_out[name] = "empty"
        elif pd.to_numeric(present, errors="coerce").notna().all():
            if numbers.nunique() < 2:
                left_out[name] = "constant"
            elif name not in keep and _are_ids(numbers.dropna()):
                left_out[name] = "a whole number of its own in every record: an id"
            else:
                numeric.append(name)
        elif num_distinct < 2 and len(present) == len(train):
            left_out[name] = "constant"
        elif name not in keep and num_distinct > max(_ID_SHARE * len(present), 2):
            left_out[name] = f"{num_distinct} distinct values in {len(present)} records: an id or free text"
        else:
            categorical.append(name)
    return numeric, categorical, left_out


def _are_ids(numbers: pd.Series) -> bool:
    """Whether the numbers are whole and none of them repeats; measurements have fractions, and counts repeat."""
    is_whole = bool((numbers == numbers.round()).all())
    return is_whole and len(numbers) >= _MIN_NUMBERED and numbers.is_unique


def _numbers(column: pd.Series) -> pd.Series:
    """The column as floats; NaN for values that are not finite numbers."""
    numbers = pd.to_numeric(column, errors="coerce").astype(float)
    return numbers.where(numbers.abs() < math.inf)


def _typed(part: pd.DataFrame, numeric: Sequence[str], categorical: Sequence[str]) -> pd.DataFrame:
    """The feature columns as floats or strings."""
    columns = {name: _numbers(part[name]) for name in numeric}
    columns |= {name: part[name].map(lambda value: _MISSING if value is None else str(value)) for name in categorical}
    return pd.DataFrame(columns, index=part.index)


def _giveaways(typed: pd.DataFrame, labels: Indices) -> dict[str, float]:
    """The accuracies of columns that give classes away, alone and together; values in bins where there are many."""
    sizes = np.bincount(labels)

    def by(names: list[str]) -> tuple[float, bool]:
        """The accuracy of these values, and whether they speak often of rarer classes, and are almost always right."""
        counts = pd.crosstab([values[name] for name in names], labels)
        counts = counts[counts.sum(axis=1) >= _LEAST_OF_A_VALUE]
        rare = counts[counts.to_numpy().argmax(axis=1) != sizes.argmax()]
        right = rare.max(axis=1).sum()
        told = right >= max(_SHARE_GIVEN_AWAY * (len(labels) - sizes.max()), _PURITY * rare.to_numpy().sum())
        return float(counts.max(axis=1).sum() / len(labels)), bool(told)

    many = [name for name in typed if typed[name].nunique() > _BINS and typed[name].dtype == float]
    values = typed.assign(**{str(name): pd.qcut(typed[name], _BINS, duplicates="drop") for name in many})
    found = {name: accuracy for name in map(str, typed) for accuracy, told in [by([name])] if told}
    return found | ({"all of them": by(list(found))[0]} if len(found) > 1 else {})


def _preprocessing(numeric: Sequence[str], categorical: Sequence[str], scaling: Scaling) -> ColumnTransformer:
    # Clipped, so that a test value outside the training range stays in [0, 1].
    scaler = StandardScaler() if scaling == "standard" else MinMaxScaler(clip=True)
    numbers = make_pipeline(SimpleImputer(strategy="median"), scaler)
    # An unseen category is encoded as all zeros or, if the column has rare categories, as a rare one.
    names = OneHotEncoder(handle_unknown="infrequent_if_exist", max_categories=_MAX_CATEGORIES, sparse_output=False)
    return ColumnTransformer(
        [("number", numbers, list(numeric)), ("category", names, list(categorical))], verbose_feature_names_out=False
    )
