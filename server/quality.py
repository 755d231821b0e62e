"""How good the final model is, beside what needs no federation, and when that is nothing to be proud of."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fedpriv.runs.rows import RoundRow
from fedpriv.training.evaluation import Evaluation
from fedpriv.training.metrics import accuracy_standard_error, log_perplexity_change, macro_f1, majority_share

if TYPE_CHECKING:
    from fedpriv.baselines import Baselines

_STANDARD_ERRORS = 2


def quality(
    rows: list[RoundRow], test: Evaluation | None, labels: tuple[str, ...], baselines: Baselines | None
) -> dict[str, Any]:
    """The keys of summary.json about a classifier's test, and `warnings`; None where something is not known.

    Args:
        rows: of the run.
        test: of the final model on the server's test set, if there is one.
        labels: the classes, in the order of the confusion matrix.
        baselines: if they were computed.
    """
    confusion = test.confusion if test else None
    figures = {
        "majority_accuracy": majority_share(confusion) if confusion else None,
        "accuracy_standard_error": accuracy_standard_error(confusion) if confusion else None,
        "macro_f1": macro_f1(confusion) if confusion else None,
    }
    return figures | {
        "confusion_matrix": [list(row) for row in confusion] if confusion else None,
        "labels": list(labels) if confusion else None,
        "probe_accuracy": baselines.probe_accuracy if baselines else None,
        "tfidf_accuracy": baselines.tfidf_accuracy if baselines else None,
        "baselines": asdict(baselines) if baselines else None,
        "warnings": warnings_of(
            accuracy=rows[-1].test_accuracy,
            standard_error=figures["accuracy_standard_error"],
            majority=figures["majority_accuracy"],
            loss_initial=rows[0].test_loss,
            loss=rows[-1].test_loss,
        ),
    }


def perplexities(
    untrained: Evaluation | None, test: Evaluation | None, non_private: Evaluation | None
) -> dict[str, float | None]:
    """The keys of summary.json about perplexity; None for a classifier and where something is not known.

    Args:
        untrained, test: before and after the run, of the same records.
        non_private: of the comparison run.
    """
    change = None
    if untrained and untrained.tokens and test and test.tokens:
        change = log_perplexity_change(untrained.tokens, test.tokens)
    return {
        "perplexity": test.perplexity if test else None,
        "perplexity_initial": untrained.perplexity if untrained else None,
        "perplexity_non_private": non_private.perplexity if non_private else None,
        "log_perplexity_change": change.mean if change else None,
        "log_perplexity_change_standard_error": change.standard_error if change else None,
    }


def warnings_of(
    *,
    accuracy: float | None,
    standard_error: float | None,
    majority: float | None,
    loss_initial: float | None,
    loss: float | None,
) -> list[str]:
    """What a user must not overlook, a line each. Nothing is compared with what is not known.

    Args:
        accuracy: of the final model, in [0, 1].
        standard_error: of the accuracy.
        majority: share of the largest class among the records of the accuracy.
        loss_initial: of the untrained model, nats.
        loss: of the final model on the same records; NaN counts as a rise.
    """
    found = []
    # "At most": on a test set of one class, where both accuracies are 1, nothing is shown either.
    if (
        accuracy is not None
        and standard_error is not None
        and majority is not None
        and accuracy - majority <= _STANDARD_ERRORS * standard_error
    ):
        found.append(
            f"accuracy {accuracy:.3f} ± {standard_error:.3f} is not above {majority:.3f}, the share of the largest "
            f"class, by {_STANDARD_ERRORS} standard errors: no better than always guessing that class"
        )
    if loss_initial is not None and loss is not None and not loss <= loss_initial:
        found.append(f"test loss rose from {loss_initial:.3f} (untrained) to {loss:.3f}: training made the model worse")
    return found
