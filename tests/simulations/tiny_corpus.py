"""A corpus for studies that takes no time: two clients, and labels that are words of the texts."""

import numpy as np
import pandas as pd

from simulations.studies.corpora import Corpus
from tests.tiny import LABELS, WORDS


def tiny_corpus() -> Corpus:
    """120 records for training and 30 for testing; client b has two of four."""

    def frames(_data, seed):
        rng = np.random.default_rng(seed)
        labels = [LABELS[i % len(LABELS)] for i in range(150)]
        texts = [" ".join([label, *rng.choice(WORDS, 3)]) for label in labels]
        frame = pd.DataFrame({"text": texts, "label": labels, "client": (["a", "b", "b", "c"] * 38)[:150]})
        return frame[:120], frame[120:]

    return Corpus(frames=frames, sharing=(("partition", "natural"), ("client_column", "client")))
