"""The device mesh (tp, cp): its axis names, its order, and the only place that makes one.

Both axes always exist, at size 1 if unused, so one device is not a special case. cp is the minor (fastest) axis: device
(t, c) is rank t * cp + c of the whole group, and that rank is the head chunk which it owns after the combine.
"""

from collections.abc import Sequence

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

TP = "tp"
CP = "cp"
AXES = (TP, CP)

DeviceMesh = Mesh  # for annotations elsewhere: who is handed a mesh need not know how one is made


def device_mesh(tp: int, cp: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh over the first tp * cp of `devices` (all of JAX's if None).

    Raises ValueError if there are fewer, with the way to simulate more.
    """
    devices = jax.devices() if devices is None else list(devices)
    need = tp * cp
    if len(devices) < need:
        raise ValueError(
            f"tp={tp} x cp={cp} needs {need} devices, but there are {len(devices)} ({devices[0].platform}); choose "
            f"tp * cp <= {len(devices)}, or simulate {need} host devices: kimi_jax.simulate_devices({need}) before JAX "
            f"starts, or --devices {need} on the command line"
        )
    return jax.make_mesh((tp, cp), AXES, devices=devices[:need], axis_types=(AxisType.Auto, AxisType.Auto))


def abstract_mesh(tp: int, cp: int) -> AbstractMesh:
    """The same mesh without devices: enough for shard shapes, bytes and lowering."""
    return AbstractMesh((tp, cp), AXES, axis_types=(AxisType.Auto, AxisType.Auto))
