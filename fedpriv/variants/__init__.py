"""Variants of a model: in a folder each, or in a store by the blocks that they share; and what publishing them costs.

Equal blocks are stored once, so a second model that differs in one of its 64 blocks adds that one:

>>> import numpy as np, pathlib, tempfile
>>> from fedpriv.variants import Store, layout_of
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
    from fedpriv.variants._manifests import Manifest as Manifest
    from fedpriv.variants._opening import is_store as is_store
    from fedpriv.variants.blocks import BlockLayout as BlockLayout
    from fedpriv.variants.blocks import layout_of as layout_of
    from fedpriv.variants.composition import publication_cost as publication_cost
    from fedpriv.variants.folders import Described as Described
    from fedpriv.variants.kept import StoredModel as StoredModel
    from fedpriv.variants.kept import stored_models as stored_models
    from fedpriv.variants.store import Store as Store
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
