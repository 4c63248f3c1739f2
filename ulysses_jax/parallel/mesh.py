"""The ('data', 'seq') device mesh, in an order that keeps a sequence group inside a node."""

from collections.abc import Iterable, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

DATA = "data"
SEQ = "seq"
AXES = (DATA, SEQ)
"""Both axes, data first: the order in which ZeRO numbers its data × sequence ranks."""


def in_mesh_order(devices: Iterable[jax.Device]) -> list[jax.Device]:
    """The devices of each process next to each other, as the fastest axis takes them."""
    return sorted(devices, key=lambda device: (device.process_index, device.id))


def make_mesh(data: int, seq: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Builds the mesh of `data` × `seq` devices, all axes Auto.

    Args:
      data: size of the 'data' axis; −1 takes as many as the devices allow.
      seq: size of the 'seq' axis: how many devices share one sequence.
      devices: the devices to use; all of them by default.

    'seq' is the fastest axis over devices sorted by process, so that the all-to-alls of one
    sequence group cross as few nodes as they can.

    Raises:
      ValueError: the mesh needs more devices than there are, leaves some of several processes
        without work, or `data` = −1 finds a count that `seq` does not divide.

    Example:
      >>> dict(make_mesh(2, 4).shape)
      {'data': 2, 'seq': 4}
    """
    found = in_mesh_order(jax.devices() if devices is None else devices)
    count = len(found)
    if data == -1:
        if count % seq and count > seq:
            raise ValueError(
                f"mesh.seq = {seq} does not divide the {count} devices; "
                f"use a divisor of {count}, or give mesh.data a number"
            )
        data = max(1, count // seq)
    needed = data * seq
    if needed > count:
        raise ValueError(
            f"mesh.data × mesh.seq = {data} × {seq} = {needed} devices, but there "
            f"{'is' if count == 1 else 'are'} {count}; use a smaller mesh, or simulate on CPU "
            f"with mesh.simulated_devices = {needed}, in Python "
            f"jax.config.update('jax_num_cpu_devices', {needed}) before JAX is first used"
        )
    used = found[:needed]
    if {d.process_index for d in used} != {d.process_index for d in found}:
        raise ValueError(
            f"mesh.data × mesh.seq = {data} × {seq} = {needed} leaves whole processes of the "
            f"{count} devices idle; use mesh.data = {count // seq}"
        )
    return Mesh(np.asarray(used).reshape(data, seq), AXES, axis_types=(AxisType.Auto,) * 2)
