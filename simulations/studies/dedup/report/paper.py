"""The figures of Guan et al. 2025: Tables 1 to 8, and of its figures the numbers that the text gives.

C.R. is the compression ratio in percent: distinct blocks after deduplication over those before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Found = tuple[float, float]
"""C.R. in percent, and number of validations."""

EIGHT = ("A1", "A2", "A3", "A4", "A5", "B1", "B2", "B3")


@dataclass(frozen=True)
class PaperScenario:
    """A row of Table 1.

    Attributes:
        models: architecture and data.
        epsilons: of the models; empty where the table gives none.
        epsilon_bound: by how much each may rise; None where none is given.
        utility_bound: by how much each accuracy may fall, as a share.
    """

    models: str
    epsilons: tuple[float, ...]
    epsilon_bound: float | None = None
    utility_bound: float | None = None


_A4_EPSILONS = (0.5, 0.6, 0.75, 1.0, 2.0)

SCENARIOS: Mapping[str, PaperScenario] = {
    "A1": PaperScenario("RoBERTa, QNLI", (1, 2, 4, 6, 7), 1.0, 0.015),
    "A2": PaperScenario("RoBERTa, SST-2", (0.3, 0.4, 0.6, 0.8, 1.0), 0.05, 0.015),
    "A3": PaperScenario("RoBERTa, 5 parts of MNLI", (0.2, 0.4, 0.8, 1.6, 2.0), 0.2, 0.015),
    "A4": PaperScenario("ViT-Large, CIFAR-100", _A4_EPSILONS, 0.5, 0.02),
    "A5": PaperScenario("ResNet-152, CelebA", (0.4, 0.6, 0.8, 1.0, 2.0), 0.5, 0.02),
    "B1": PaperScenario("RoBERTa, QNLI", tuple(range(1, 11)), 1.0, 0.015),
    "B2": PaperScenario("ViT-Large, CIFAR-100", tuple(each / 100 for each in range(50, 100, 5)), 0.5, 0.02),
    "B3": PaperScenario("ResNet-152, CelebA", tuple(each / 10 for each in range(2, 22)), 0.2, 0.02),
    "C1": PaperScenario("RoBERTa, QNLI", (5, 6, 7, 8, 9), 5.0, 0.015),
    "C2": PaperScenario("ViT-Large, CIFAR-100", _A4_EPSILONS, 0.5, 0.02),
    "C3": PaperScenario("ResNet-152, CelebA", (0.7, 0.8, 0.9, 1.0, 2.0), 0.7, 0.02),
    "C4": PaperScenario("RoBERTa, 4 parts of MNLI", (0.4, 0.8, 1.6, 2.0), 0.3, 0.015),
    "hetero": PaperScenario(
        models="four ViT-Large (CIFAR-10, CelebA, GTSRB, SVHN), three RoBERTa (SST-2, IMDB, QNLI)",
        epsilons=(2, 2, 2, 2, 5, 5, 5),
    ),
}
"""Table 1, and the seven models of section 5.1.1, whose bounds are not given."""


def _table(columns: Sequence[str], text: str) -> dict[str, dict[str, Found]]:
    """{row: {column: C.R. and validations}} of lines with a name and two numbers for each column."""
    found = {}
    for line in text.split("\n"):
        name, *numbers = line.split()
        pairs = zip(map(float, numbers[::2]), map(float, numbers[1::2]), strict=True)
        found[name] = dict(zip(columns, pairs, strict=True))
    return found


_Row = Mapping[str, Found]

SEARCHES: Mapping[str, _Row] = _table(
    EIGHT,
    """\
dedup-20     48.1 42  95.7 18  56.4 38  32.1 60  87.4 12  40.8 98  34.5 116  85.4 57
dedup-30     48.1 30  95.7 17  56.9 28  33.4 43  94.9 9  39.7 70  32.6 85  85.2 57
mistique-20  84.4 19  100.0 10  77.3 26  63.5 56  97.6 9  76.2 108  90.4 126  91.9 38
mistique-30  84.4 15  100.0 10  78.0 21  63.5 38  94.9 10  88.6 72  88.8 81  87.6 38
mcts-20      39.9 257  82.3 246  36.9 391  33.4 909  35.9 743  23.3 1280  20.4 2266  39.7 2628
mcts-30      41.1 107  58.4 307  35.4 331  32.0 571  42.2 447  20.1 1031  20.2 1417  40.7 1031
greedy-20    28.5 44  29.4 55  24.4 44  30.0 60  33.3 48  16.1 99  18.6 135  37.2 228
greedy-30    25.1 32  30.4 40  29.9 32  32.0 40  36.9 32  16.2 72  20.8 90  40.8 152
drd          29.7 18  27.3 30  24.4 16  34.1 19  35.5 21  17.0 55  24.7 50  37.6 114
dred         31.6 26  35.6 36  23.9 20  33.4 26  34.2 25  17.7 59  24.6 56  37.7 149""",
)
"""Table 2: {search: {scenario: result}}."""

SPARSE: Mapping[str, _Row] = _table(
    EIGHT,
    """\
greedy-20  28.9 44  72.7 22  27.3 44  35.9 56  42.1 47  18.0 97  26.6 127  40.3 206
greedy-30  28.9 32  77.3 20  29.9 32  42.8 38  50.0 32  16.3 72  24.3 90  42.8 148
drd        33.6 24  70.4 21  24.9 20  37.8 24  38.1 21  18.0 51  28.8 51  42.3 113
dred       32.1 28  69.9 17  24.2 26  35.3 21  40.4 24  19.0 49  29.1 46  43.5 96""",
)
"""Table 3: with private validation, cut-off 3."""

PRIVATE: _Row = SPARSE["dred"]

CUTOFFS: Mapping[int, Found] = {
    2: (33.6, 18), 3: (31.7, 23), 4: (31.7, 26), 5: (31.7, 28), 6: (31.7, 28), 7: (31.7, 28),
}  # fmt: skip
"""Table 8, for A1 by the text and for A4 by the caption."""

FIFTY: _Row = {
    "dedup-20": (57.1, 327), "dedup-30": (46.7, 257), "mistique-20": (87.1, 308), "mistique-30": (88.6, 222),
    "mcts-20": (32.2, 6811), "mcts-30": (28.3, 4117), "greedy-20": (21.2, 561), "greedy-30": (23.4, 386),
    "drd": (23.7, 264), "dred": (24.9, 320),
}  # fmt: skip
"""Table 4."""

HETEROGENEOUS: Mapping[str, tuple[Found, ...]] = {
    "greedy-1": ((63.4, 210), (69.5, 211), (68.6, 210), (54.2, 578), (15.9, 578), (54.8, 578), (58.8, 2365)),
    "greedy-20": ((90.3, 11), (90.8, 11), (90.3, 11), (73.7, 29), (23.1, 29), (77.6, 29), (73.8, 120)),
    "greedy-30": ((99.8, 7), (100.0, 8), (85.6, 7), (77.6, 20), (25.1, 20), (77.6, 20), (76.0, 82)),
    "drd": ((87.5, 5), (88.0, 5), (84.7, 8), (77.6, 11), (21.4, 8), (79.3, 13), (73.6, 50)),
    "dred": ((87.5, 8), (88.0, 8), (82.8, 18), (78.2, 18), (23.5, 13), (78.2, 18), (73.8, 83)),
}
"""Table 5: RoBERTa on SST-2, IMDB and QNLI, ViT on GTSRB, CelebA and SVHN, and overall."""


def of_search(name: str, scenario: str) -> Found | None:
    """The figures of Tables 2, 4 and 5; None where the paper has none."""
    if scenario == "fifty":
        return FIFTY.get(name)
    if scenario == "hetero":
        return HETEROGENEOUS[name][-1] if name in HETEROGENEOUS else None
    return SEARCHES.get(name, {}).get(scenario)


Ablation = tuple[float, float, float]
"""C.R. in percent, validations, largest drop of accuracy."""

BLOCK_SIZES: Mapping[int, Ablation] = {
    262_144: (32.12, 29, 0.020), 524_288: (32.5, 29, 0.020), 1_048_576: (33.4, 26, 0.018),
    2_097_152: (41.1, 16, 0.017), 4_194_304: (53.6, 9, 0.016),
}  # fmt: skip
"""Table 6, A4, by values in a block."""

ABLATIONS: Mapping[str, Mapping[str, Ablation]] = {
    "saliency": {
        "magnitude": (63.8, 49, 0.015), "wanda": (47.3, 30, 0.015), "fisher": (45.9, 24, 0.015),
        "gradient": (32.8, 31, 0.019),
    },
    "aggregation": {
        "l1": (27.6, 26, 0.014), "l2": (26.1, 31, 0.013), "linf": (30.0, 35, 0.015), "q75": (27.1, 32, 0.015),
    },
    "distance": {"l1": (25.9, 29, 0.014), "l2": (40.2, 31, 0.012), "cosine": (92.1, 63, 0.014)},
}  # fmt: skip
"""Table 6, A1: {what varies: {value: result}}."""

THRESHOLDS: Mapping[str, Mapping[float, float]] = {
    "A1": {0.0: 58.0, 0.005: 23.4, 0.01: 21.9, 0.015: 21.1, 0.02: 20.8},
    "A4": {0.0: 84.4, 0.005: 54.1, 0.01: 41.5, 0.015: 35.9, 0.02: 31.0},
    "A5": {0.0: 80.2, 0.005: 44.8, 0.01: 37.8, 0.015: 35.1, 0.02: 31.2},
}
"""Table 7: {scenario: {utility bound: C.R. in percent}}, without the column -0.5."""

SPEEDUPS: Mapping[str, Mapping[str, str]] = {
    "A2": {"hard disk": "about 1.3", "SSD": "about 1.3"},
    "A3": {"hard disk": "about 1.3", "SSD": "about 1.3"},
    "B1": {"hard disk": "14.1", "SSD": "5.6"},
    "B2": {"hard disk": "31.0", "SSD": "4.3"},
    "B3": {"hard disk": "18.8", "SSD": "2.2"},
    "hetero": {"hard disk": "43", "SSD": "14"},
    "fifty": {"hard disk": "28", "SSD": "11"},
}
"""Loading and inference of 100 queries, plain files over deduplicated ones, Figures 5 and 8: sections 5.2.1, 5.3."""
