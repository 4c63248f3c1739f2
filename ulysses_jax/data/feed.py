"""Global device arrays from batches: each process reads only the slices its own devices hold."""

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import numpy as np
from jax.sharding import NamedSharding

from ulysses_jax.data.batches import Batch

_PREFETCHED_BATCHES = 2

_Bounds = tuple[tuple[int, int], ...]


def device_batches(
    read: Callable[[int, slice, slice], Batch],
    shape: tuple[int, ...],
    sharding: NamedSharding,
    start: int,
    stop: int,
) -> Generator[Batch, None, None]:
    """Yields the batches of steps `start` to `stop - 1` as global arrays, reading ahead by two.

    Close the generator (or exhaust it) to end its reader thread; close() returns when it has ended.

    Args:
        read: `read(step, rows, columns)` of `TrainBatches` or `EvalBatches`; what it raises is
            raised here, at the step it belongs to.
        shape: `(B, S)`, or `(A, B/A, S)` for A micro-batches a step: row r of micro-batch a is row
            a·B/A + r of the batch.
        sharding: of arrays of that shape, such as P("data", "seq") or P(None, "data", "seq").
        start: the first step.
        stop: the step to stop before.
    """
    piece_of = {
        device: _bounds(index, shape)
        for device, index in sharding.addressable_devices_indices_map(shape).items()
    }
    pieces = sorted(set(piece_of.values()))

    def read_local(step: int) -> list[Batch]:
        return [_read_piece(read, step, piece, shape) for piece in pieces]

    def assemble(*local: np.ndarray) -> jax.Array:
        by_piece = dict(zip(pieces, local, strict=True))
        # device_put is an explicit transfer, allowed where the loop disallows implicit ones.
        shards = jax.device_put([by_piece[piece] for piece in piece_of.values()], list(piece_of))
        return jax.make_array_from_single_device_arrays(shape, sharding, shards)

    pending: deque[Future[list[Batch]]] = deque()
    reader = ThreadPoolExecutor(1, thread_name_prefix="batch-reader")
    try:
        for step in range(start, stop):
            while len(pending) <= _PREFETCHED_BATCHES and step + len(pending) < stop:
                pending.append(reader.submit(read_local, step + len(pending)))
            yield jax.tree.map(assemble, *pending.popleft().result())
    finally:
        reader.shutdown(cancel_futures=True)


def _read_piece(
    read: Callable[[int, slice, slice], Batch], step: int, piece: _Bounds, shape: tuple[int, ...]
) -> Batch:
    *micro, (first, last), columns = piece
    if not micro:
        return read(step, slice(first, last), slice(*columns))
    rows = shape[1]
    parts = [
        read(step, slice(index * rows + first, index * rows + last), slice(*columns))
        for index in range(*micro[0])
    ]
    batch: Batch = jax.tree.map(lambda *leaves: np.stack(leaves), *parts)
    return batch


def _bounds(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> _Bounds:
    assert index is not None, "only addressable devices are asked for"
    return tuple(
        (dim.indices(size)[0], dim.indices(size)[1]) for dim, size in zip(index, shape, strict=True)
    )
