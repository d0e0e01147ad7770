"""sharding_rules: where things live. Logical axis names, one table from them to a mesh (tp, cp), and the guards.

Imports jax and the standard library; knows neither flax nor the model.
"""

from sharding_rules import axes, stripes
from sharding_rules.checks import Size, check, misfits, valid_meshes
from sharding_rules.helix import SINGLE, helix
from sharding_rules.layout import Layout

__all__ = ["SINGLE", "Layout", "Size", "axes", "check", "helix", "misfits", "stripes", "valid_meshes"]
