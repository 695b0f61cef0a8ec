"""Recipes say, as data, what becomes of each tensor of a draft. Imports no other package."""

from typing import TYPE_CHECKING

from .packages import lazy_names

if TYPE_CHECKING:
    from .errors import DraftQuantError as DraftQuantError
    from .errors import RecipeError as RecipeError
    from .formats import KvCacheFormat as KvCacheFormat
    from .library import aliases as aliases
    from .library import built_in_recipes as built_in_recipes
    from .library import load_recipe as load_recipe
    from .library import recipe_of_alias as recipe_of_alias
    from .schema import ActivationFormat as ActivationFormat
    from .schema import Algorithm as Algorithm
    from .schema import Expectation as Expectation
    from .schema import Format as Format
    from .schema import GateChoice as GateChoice
    from .schema import Recipe as Recipe
    from .schema import Rule as Rule
    from .schema import WeightFormat as WeightFormat
    from .schema import recipe_sha256 as recipe_sha256
    from .schema import to_mapping as to_mapping

__all__, __getattr__ = lazy_names(__name__)
