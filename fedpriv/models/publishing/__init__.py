r"""Outputs of a run: answers of its saved models, folders that load without fedpriv, model cards, and the Hub.

    saved = find(Path("results/RUN"), variant="global")
    classify(load(saved), ["a rash on the left knee"])  # the probability of each of saved.labels

What others wrote, such as labels, is put into a card so that it says what it says and does nothing else:

>>> from fedpriv.models.publishing import markdown
>>> print(markdown("# a [link](http://example.org)"))
\# a \[link\]\(http\:\/\/example\.org\)
"""

from typing import TYPE_CHECKING

from fedpriv.exports import lazy_exports

if TYPE_CHECKING:
    from fedpriv.models.publishing.card import markdown as markdown
    from fedpriv.models.publishing.saved import LoadedVariant as LoadedVariant
    from fedpriv.models.publishing.saved import SavedVariant as SavedVariant
    from fedpriv.models.publishing.saved import classify as classify
    from fedpriv.models.publishing.saved import find as find
    from fedpriv.models.publishing.saved import generate as generate
    from fedpriv.models.publishing.saved import load as load
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
