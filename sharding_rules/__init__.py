"""sharding_rules: where things live. Logical axis names, one table from them to a mesh (tp, cp), and the guards.

Imports jax and the standard library; knows neither flax nor the model.
"""

from sharding_rules import axes, stripes
from sharding_rules.checks import Size, check, misfits, valid_meshes
from sharding_rules.helix import SINGLE, helix
from sharding_rules.layout import Layout
from sharding_rules.mesh import DeviceMesh
from sharding_rules.numbers import whole_number
from sharding_rules.rank_major import logical_to_rank_major, rank_major_to_logical

__all__ = [
    "SINGLE",
    "DeviceMesh",
    "Layout",
    "Size",
    "axes",
    "check",
    "helix",
    "logical_to_rank_major",
    "misfits",
    "rank_major_to_logical",
    "stripes",
    "valid_meshes",
    "whole_number",
]
