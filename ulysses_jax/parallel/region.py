"""Where a call of attention runs: the mesh, its axes, and what each splits of the call's arrays."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int32

from ulysses_jax.attention.announce import announce
from ulysses_jax.attention.spec import AttentionSpec

DEFAULT_BATCH_AXES = ("data",)

_COMPARED: dict[str, Callable[[Mesh | AbstractMesh], Any]] = {
    "axes": lambda mesh: dict(mesh.shape),
    "axis types": lambda mesh: mesh.axis_types,
}


@dataclass(frozen=True)
class Region:
    """The manual region of one call: axes that it makes manual, and those that already are.

    Attributes:
      mesh: what `shard_map` is to be given; None: the mesh of the context, or none.
      made: the axes that this call makes manual. Of none, it runs where it stands.
      explicit: those of them that are Explicit, over which arrays must be resharded first.
      platform: of the devices; None where it is not known.
      seq: the sequence axis; None where there is no mesh.
      ways: its size P.
      rows: axes over which the batch is split, by this call or around it.
      heads: axes over which the heads are split, by this call or around it.
      head_ways: parts of the heads that this call makes.
      nested: whether some axes are manual around a call that makes others manual.
    """

    mesh: Mesh | AbstractMesh | None = None
    made: tuple[str, ...] = ()
    explicit: frozenset[str] = frozenset()
    platform: str | None = None
    seq: str | None = None
    ways: int = 1
    rows: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    head_ways: int = 1
    nested: bool = False

    @property
    def splits_seq(self) -> bool:
        """Whether this call splits the sequence: else it is handed parts already."""
        return self.seq in self.made

    def own(self, axes: tuple[str, ...]) -> tuple[str, ...] | None:
        """Those of `axes` that this call makes manual, as an entry of a PartitionSpec."""
        return tuple(axis for axis in axes if axis in self.made) or None

    def tokens(self) -> PartitionSpec:
        """Of [B, S, H, D] arrays."""
        return PartitionSpec(
            self.own(self.rows), self.seq if self.splits_seq else None, self.own(self.heads)
        )

    def reshard(self, x: Any, spec: PartitionSpec) -> Any:
        """`x` placed by `spec`, as a region with Explicit axes demands it; else `x`."""
        if not self.explicit:
            return x

        def kept(entry: Any) -> Any:
            names = (entry,) if isinstance(entry, str) else entry or ()
            return tuple(name for name in names if name in self.explicit) or None

        known = PartitionSpec(*(kept(entry) for entry in spec))
        return jax.reshard(x, known if self.mesh is None else NamedSharding(self.mesh, known))


def index_over(axes: tuple[str, ...]) -> Int32[Array, ""] | int:
    """This device's place among the parts that `axes`, all manual, split something into."""
    index: Int32[Array, ""] | int = 0
    for axis in axes:
        index = index * lax.axis_size(axis) + lax.axis_index(axis)
    return index


def region_of(
    q: Any,
    mesh: Mesh | AbstractMesh | None,
    seq_axis: str,
    batch_axes: Sequence[str],
    head_axes: Sequence[str],
) -> Region:
    """The region for queries [B, S, H, D].

    The mesh is that of the manual region the call stands in, or of `jax.set_mesh`, which `mesh`
    must then be too; else `mesh`; else the one that `q` is known to lie on; else there is none.

    Raises:
      ValueError: the mesh has no such axis, an axis is named twice, or two meshes differ.
    """
    batch_axes, head_axes = _names(batch_axes), _names(head_axes)
    found, given = _mesh(q, mesh, seq_axis)
    if found is None:
        return Region()
    sizes = dict(zip(found.axis_names, found.axis_sizes, strict=True))
    if batch_axes == DEFAULT_BATCH_AXES:
        batch_axes = tuple(axis for axis in batch_axes if axis in sizes)
    named = (seq_axis, *batch_axes, *head_axes)
    for axis in named:
        if axis not in sizes:
            raise ValueError(
                f"the mesh has the axes {tuple(sizes)}, but none called {axis!r}: name its own in "
                "seq_axis, batch_axes and head_axes"
            )
        if named.count(axis) > 1:
            raise ValueError(
                f"axis {axis!r} is named {named.count(axis)} times in seq_axis, batch_axes and "
                "head_axes: let it split one thing"
            )
    types = dict(zip(found.axis_names, found.axis_types, strict=True))
    made = tuple(axis for axis in sizes if types[axis] != AxisType.Manual)
    batch, _, heads, _ = q.shape
    rows = _splitting("batch rows", batch, batch_axes, made, sizes)
    split_heads = _splitting("query heads", heads, head_axes, made, sizes)
    for axis in made:
        if axis not in named and sizes[axis] > 1:
            announce(
                f"attention: the {sizes[axis]} parts of axis {axis!r} all compute the same; name "
                "it in batch_axes or head_axes to split the work"
            )
    return Region(
        mesh=given,
        made=made,
        explicit=frozenset(axis for axis in made if types[axis] == AxisType.Explicit),
        platform=_platform(found),
        seq=seq_axis,
        ways=sizes[seq_axis],
        rows=rows,
        heads=split_heads,
        head_ways=math.prod(sizes[axis] for axis in split_heads if axis in made),
        nested=0 < len(made) < len(sizes),
    )


def check_devices(region: Region, tokens: dict[str, Any], spec: AttentionSpec) -> None:
    """Raises ValueError if an array was committed to devices other than those of the mesh.

    Tracers cannot be asked: within `jax.jit` JAX finds it, when it compiles.
    """
    try:
        mesh = jax.sharding.get_mesh() if region.mesh is None else region.mesh
    except ValueError:  # Within `jax.jit`, where there are no devices yet.
        return
    if not region.made or mesh.empty or isinstance(mesh, AbstractMesh):
        return
    wanted = set(mesh.devices.flat)
    described = {
        jax.tree_util.keystr(path, simple=True): x
        for path, x in jax.tree_util.tree_leaves_with_path(spec)
    }
    for name, x in (tokens | described).items():
        if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer) or not x.committed:
            continue
        if x.sharding.device_set != wanted:
            on = sorted(str(device) for device in x.sharding.device_set)
            raise ValueError(
                f"{name} was put on {', '.join(on[:4])}{', …' if len(on) > 4 else ''}, but the "
                f"mesh has {len(wanted)} devices: use jax.device_put({name}, "
                "NamedSharding(mesh, spec)), or leave it uncommitted"
            )


def _names(axes: str | Sequence[str]) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)


def _mesh(
    q: Any, mesh: Mesh | AbstractMesh | None, seq_axis: str
) -> tuple[Mesh | AbstractMesh | None, Mesh | AbstractMesh | None]:
    """The mesh as it is seen here, and what `shard_map` must be told of it."""
    if not isinstance(mesh, Mesh | AbstractMesh | None):
        found = f"{mesh.dtype}{list(mesh.shape)}" if hasattr(mesh, "dtype") else repr(mesh)
        raise ValueError(
            f"mesh is {found}: use a jax.sharding.Mesh, or None, and give mask and bias by name"
        )
    context = jax.sharding.get_abstract_mesh()
    if not context.empty:
        # JAX compares the devices of a mesh that it is given, but takes none within a region.
        compared = mesh is not None and not context.manual_axes
        for what, of in _COMPARED.items():
            if mesh is not None and of(mesh) != of(context) and (compared or what == "axes"):
                raise ValueError(
                    f"the mesh given has the {what} {of(mesh)}, but the one set here has "
                    f"{of(context)}: give none, or the same"
                )
        return context, mesh if compared else None
    if mesh is None:
        traced = isinstance(q, jax.core.Tracer)
        sharding = jax.typeof(q).sharding if traced else getattr(q, "sharding", None)
        mesh = getattr(sharding, "mesh", None)
        if mesh is None or mesh.empty or mesh.size == 1:
            if jax.device_count() > 1:
                announce("attention: no mesh is set, so nothing is split")
            return None, None
    return mesh, mesh


def _platform(mesh: Mesh | AbstractMesh) -> str | None:
    if isinstance(mesh, Mesh):
        return mesh.devices.flat[0].platform
    return getattr(mesh.abstract_device, "platform", None)


def _splitting(
    what: str,
    count: int,
    axes: tuple[str, ...],
    made: tuple[str, ...],
    sizes: dict[str, int],
) -> tuple[str, ...]:
    """The axes that split `count` of something: the first ones that divide it, of those made.

    The axes of the region around the call come first: it cuts what the call then cuts further.
    """
    used, ways = [axis for axis in axes if axis not in made], 1
    for axis in axes:
        if axis not in made:
            continue
        if count % (ways * sizes[axis]) == 0:
            ways *= sizes[axis]
            used.append(axis)
        else:
            announce(
                f"attention: the {sizes[axis]} parts of axis {axis!r} do not divide {count} {what} "
                "and all compute the same"
            )
    return tuple(used)
