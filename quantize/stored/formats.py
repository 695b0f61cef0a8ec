"""The formats of a quantized folder in the words of recipes, whoever made it."""

from ...recipes.schema import ActivationFormat, Recipe, Rule, WeightFormat
