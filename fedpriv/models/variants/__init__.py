"""Variants of a model: in a folder each, or in a store by the blocks that they share; and what publishing them costs.

Equal blocks are stored once, so a second model that differs in one of its 64 blocks adds that one:

>>> import numpy as np, pathlib, tempfile
>>> from fedpriv.models.variants import Store, layout_of
>>> first = {"w": np.arange(64 * 16, dtype="f4")}
>>> second = {"w": np.where(first["w"] < 16, 0, first["w"])}
>>> with tempfile.TemporaryDirectory() as folder, Store(pathlib.Path(folder) / "store") as store:
...     for name, model in {"first": first, "second": second}.items():
...         layout = layout_of(model, 16)
...         store.add(name, layout, *layout.to_blocks(model))
...     len(store.blocks)
65
"""

from typing import TYPE_CHECKING

from fedpriv.exports import lazy_exports

if TYPE_CHECKING:
    from fedpriv.models.variants._folder import is_store as is_store
    from fedpriv.models.variants.blocks import BlockLayout as BlockLayout
    from fedpriv.models.variants.blocks import Manifest as Manifest
    from fedpriv.models.variants.blocks import layout_of as layout_of
    from fedpriv.models.variants.composition import publication_cost as publication_cost
    from fedpriv.models.variants.folders import Described as Described
    from fedpriv.models.variants.store import Store as Store
    from fedpriv.models.variants.stored import StoredModel as StoredModel
    from fedpriv.models.variants.stored import StoredVariants as StoredVariants
    from fedpriv.models.variants.stored import stored_in as stored_in
    from fedpriv.models.variants.stored import stored_models as stored_models
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
