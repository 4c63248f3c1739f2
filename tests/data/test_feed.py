"""Global arrays on devices: right values, only addressable slices read, threads that end."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ulysses_jax.data import feed
from ulysses_jax.data.batches import TrainBatches
from ulysses_jax.data.feed import device_batches
from ulysses_jax.data.store import TokenStore

ROWS, SEQ_LEN = 4, 8


def batches(document_mask: bool = False) -> TrainBatches:
    starts = np.array([0, 5, 30, 100])
    store = TokenStore(np.arange(1, 202, dtype=np.uint16), starts)
    return TrainBatches(store, SEQ_LEN, ROWS, 0, document_mask, 2**16)


def sharding(data: int, seq: int, *leading: None) -> NamedSharding:
    mesh = jax.make_mesh(
        (data, seq),
        ("data", "seq"),
        axis_types=(AxisType.Auto,) * 2,
        devices=jax.devices()[: data * seq],
    )
    return NamedSharding(mesh, P(*leading, "data", "seq"))


def reader_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("batch-reader")]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not reader_threads()


@pytest.mark.parametrize("document_mask", [False, True])
@pytest.mark.parametrize("mesh", [(1, 1), (2, 4), (4, 2), (1, 8)])
def test_global_arrays_are_the_batch_on_any_mesh(mesh, document_mask):
    source, place = batches(document_mask), sharding(*mesh)
    with jax.transfer_guard("disallow"):
        found = list(device_batches(source.read, (ROWS, SEQ_LEN), place, 3, 6))
    for step, batch in zip(range(3, 6), found, strict=True):
        assert batch.tokens_BS.sharding == place
        assert (batch.segments_BS is None) != document_mask
        whole = source.read(step, slice(None), slice(None))
        jax.tree.map(np.testing.assert_array_equal, batch, whole)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_micro_batches_are_consecutive_rows_of_the_batch(accumulate):
    source = batches(document_mask=True)
    shape = accumulate, ROWS // accumulate, SEQ_LEN
    (batch,) = device_batches(source.read, shape, sharding(2, 4, None), 0, 1)
    whole = source.read(0, slice(None), slice(None))
    jax.tree.map(
        lambda leaf, expected: np.testing.assert_array_equal(leaf, expected.reshape(shape)),
        batch,
        whole,
    )


def test_each_addressable_slice_is_read_once_a_step():
    source = batches()
    read = []

    def spy(step, rows, columns):
        read.append((step, rows.start, rows.stop, columns.start, columns.stop))
        return source.read(step, rows, columns)

    list(device_batches(spy, (ROWS, SEQ_LEN), sharding(2, 2), 0, 2))
    slices = [(0, 2, 0, 4), (0, 2, 4, 8), (2, 4, 0, 4), (2, 4, 4, 8)]
    assert read == [(step, *piece) for step in (0, 1) for piece in slices]


def test_reads_two_steps_ahead_and_no_further(monkeypatch):
    submitted = []

    class Recorder(ThreadPoolExecutor):
        def submit(self, fn, step):
            submitted.append(step)
            return super().submit(fn, step)

    monkeypatch.setattr(feed, "ThreadPoolExecutor", Recorder)
    steps = device_batches(batches().read, (ROWS, SEQ_LEN), sharding(1, 1), 10, 14)
    for expected in ([10, 11, 12], [10, 11, 12, 13], [10, 11, 12, 13]):
        next(steps)
        assert submitted == expected
    steps.close()


def test_closing_early_ends_the_reader():
    steps = device_batches(batches().read, (ROWS, SEQ_LEN), sharding(1, 1), 0, 1000)
    next(steps)
    assert reader_threads()
    steps.close()
    assert not reader_threads()


def test_error_of_the_reader_is_raised_at_its_step():
    source = batches()

    def fail_at_2(step, rows, columns):
        if step == 2:
            raise ValueError("token 7 is too large")
        return source.read(step, rows, columns)

    steps = device_batches(fail_at_2, (ROWS, SEQ_LEN), sharding(1, 2), 0, 5)
    next(steps)
    next(steps)
    with pytest.raises(ValueError, match="token 7 is too large"):
        next(steps)
    assert not reader_threads()


def test_no_steps_yield_nothing():
    assert not list(device_batches(batches().read, (ROWS, SEQ_LEN), sharding(1, 1), 3, 3))
