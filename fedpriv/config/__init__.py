"""The configuration of a run: its keys, how they are read and checked, recipes, and the runs of a sweep.

>>> from fedpriv.config import parse
>>> config = parse({"rounds": 5, "batch_size": 32})
>>> print(config.recipe, config.rounds, config.noise_source)
per-sample 5 secure
"""

from typing import TYPE_CHECKING

from fedpriv.exports import lazy_exports

if TYPE_CHECKING:
    from fedpriv.config._federation_and_privacy import RULE_FACTS as RULE_FACTS
    from fedpriv.config._federation_and_privacy import FederationSection as FederationSection
    from fedpriv.config._federation_and_privacy import Phase as Phase
    from fedpriv.config._federation_and_privacy import RuleFacts as RuleFacts
    from fedpriv.config._federation_and_privacy import Trains as Trains
    from fedpriv.config._federation_and_privacy import UpdateSection as UpdateSection
    from fedpriv.config._model_and_data import EMBEDDED as EMBEDDED
    from fedpriv.config._model_and_data import IN_MEMORY as IN_MEMORY
    from fedpriv.config._model_and_data import ON_NODES as ON_NODES
    from fedpriv.config._model_and_data import OWN_MODEL as OWN_MODEL
    from fedpriv.config._model_and_data import AuditSection as AuditSection
    from fedpriv.config._model_and_data import BaseFormat as BaseFormat
    from fedpriv.config._model_and_data import DataSection as DataSection
    from fedpriv.config._model_and_data import Encoding as Encoding
    from fedpriv.config._model_and_data import MachineSection as MachineSection
    from fedpriv.config._model_and_data import Separator as Separator
    from fedpriv.config._model_and_data import TableChecks as TableChecks
    from fedpriv.config._model_and_data import Track as Track
    from fedpriv.config._model_and_data import Train as Train
    from fedpriv.config._recipes import BY_RECIPE as BY_RECIPE
    from fedpriv.config._recipes import RECIPES as RECIPES
    from fedpriv.config._recipes import WITH_AUTO as WITH_AUTO
    from fedpriv.config._recipes import Recipe as Recipe
    from fedpriv.config._recipes import why_recipe as why_recipe
    from fedpriv.config._run_config import RunConfig as RunConfig
    from fedpriv.config._schema import schema as schema
    from fedpriv.config._schema import schema_tables as schema_tables
    from fedpriv.config._section import Fact as Fact
    from fedpriv.config._values import KEYS as KEYS
    from fedpriv.config._values import Scalar as Scalar
    from fedpriv.config._values import SweepPoint as SweepPoint
    from fedpriv.config._values import checked as checked
    from fedpriv.config._values import is_sweep as is_sweep
    from fedpriv.config._values import parse as parse
    from fedpriv.config._values import parse_overrides as parse_overrides
    from fedpriv.config._values import read as read
    from fedpriv.config._values import sweep_points as sweep_points
    from fedpriv.config._values import to_flower as to_flower
    from fedpriv.config._values import to_toml as to_toml
    from fedpriv.config._values import with_mechanism_parameters as with_mechanism_parameters
    from fedpriv.config._values import with_overrides as with_overrides
    from fedpriv.config.keys import RunKeys as RunKeys
    from fedpriv.config.keys import SweepKeys as SweepKeys
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
