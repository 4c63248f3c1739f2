"""Batches: what is in them, that slices are slices of the whole, and that nothing is lost."""

import hashlib
from collections import Counter
from itertools import product

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ulysses_jax.data.batches import EvalBatches, TrainBatches
from ulysses_jax.data.store import TokenStore

ALL = slice(None)


def store_of(lengths: list[int], first: int = 1) -> TokenStore:
    """Documents of the given lengths; every token is `first` plus its index."""
    starts = np.cumsum([0, *lengths[:-1]], dtype=np.int64)
    return TokenStore(np.arange(first, first + sum(lengths), dtype=np.uint16), starts)


def train(lengths, seq_len=5, global_batch=3, seed=0, document_mask=False, vocab_size=2**16):
    store = store_of(lengths)
    return TrainBatches(store, seq_len, global_batch, seed, document_mask, vocab_size)


def evaluate(lengths, seq_len=5, batch=3, document_mask=False, vocab_size=2**16):
    return EvalBatches(store_of(lengths), seq_len, batch, document_mask, vocab_size)


def test_document_mask_keeps_packed_documents_apart():
    batch = evaluate([5, 11], seq_len=16, batch=1, document_mask=True).read(0, ALL, ALL)
    tokens = np.arange(1, 17)
    np.testing.assert_array_equal(batch.tokens_BS, [tokens])
    np.testing.assert_array_equal(batch.positions_BS, [[*range(5), *range(11)]])
    np.testing.assert_array_equal(batch.segments_BS, [[0] * 5 + [1] * 11])
    np.testing.assert_array_equal(batch.labels_BS, [[2, 3, 4, 5, -100, *range(7, 17), -100]])


def test_document_begun_in_an_earlier_window_starts_again_at_zero():
    batches = evaluate([3, 5, 2, 6], seq_len=4, batch=4, document_mask=True)
    batch = batches.read(0, ALL, ALL)
    #   documents: 0 0 0 1 | 1 1 1 1 | 2 2 3 3 | 3 3 3 3
    np.testing.assert_array_equal(
        batch.segments_BS, [[0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 0, 0]]
    )
    np.testing.assert_array_equal(
        batch.positions_BS, [[0, 1, 2, 0], [0, 1, 2, 3], [0, 1, 0, 1], [0, 1, 2, 3]]
    )
    np.testing.assert_array_equal(
        batch.labels_BS,
        [[2, 3, -100, 5], [6, 7, 8, -100], [10, -100, 12, 13], [14, 15, 16, -100]],
    )


def test_without_document_mask_labels_cross_and_positions_run_on():
    batch = evaluate([5, 11], seq_len=16, batch=1).read(0, ALL, ALL)
    np.testing.assert_array_equal(batch.labels_BS, [[*range(2, 17), -100]])
    np.testing.assert_array_equal(batch.positions_BS, [range(16)])
    assert batch.segments_BS is None


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_no_label_is_lost_or_shifted_twice_at_the_end_of_a_shard(shards):
    batches = evaluate([8], seq_len=8, batch=1)
    width = 8 // shards
    labels = np.concatenate(
        [
            batches.read(0, ALL, slice(left, left + width)).labels_BS[0]
            for left in range(0, 8, width)
        ]
    )
    np.testing.assert_array_equal(labels, [2, 3, 4, 5, 6, 7, 8, -100])
    assert batches.predictions == (labels != -100).sum() == 7


LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@settings(max_examples=40, deadline=None)
@given(
    lengths=LENGTHS,
    split=st.sampled_from([(1, 1), (1, 2), (2, 1), (3, 2), (2, 3), (6, 6), (1, 6)]),
    step=st.integers(0, 5),
    document_mask=st.booleans(),
    kind=st.sampled_from([train, evaluate]),
)
def test_slices_on_any_mesh_are_slices_of_the_whole_batch(
    lengths, split, step, document_mask, kind
):
    rows, seq_len = 6, 6
    batches = kind([*lengths, 8], seq_len, rows, document_mask=document_mask)
    whole = batches.read(step, ALL, ALL)
    data, seq = split
    r, c = rows // data, seq_len // seq
    pieces = [
        batches.read(step, slice(row, row + r), slice(column, column + c))
        for row, column in product(range(0, rows, r), range(0, seq_len, c))
    ]
    joined = jax.tree.map(
        lambda *leaves: np.block([list(leaves[d * seq : (d + 1) * seq]) for d in range(data)]),
        *pieces,
    )
    jax.tree.map(np.testing.assert_array_equal, joined, whole)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 7), st.integers(1, 5), st.booleans())
def test_evaluation_predicts_every_token_exactly_once_whatever_the_batch(
    lengths, seq_len, batch, document_mask
):
    lengths = [*lengths, 2]
    batches = evaluate(lengths, seq_len, batch, document_mask)
    found = [batches.read(index, ALL, ALL) for index in range(len(batches))]
    labels = np.concatenate([batch.labels_BS.ravel() for batch in found])
    tokens = np.concatenate([batch.tokens_BS.ravel() for batch in found])
    is_predicted = labels != -100
    first = np.cumsum([1, *lengths[:-1]])
    unpredicted = first if document_mask else first[:1]
    expected = np.setdiff1d(np.arange(1, sum(lengths) + 1), unpredicted)
    np.testing.assert_array_equal(labels[is_predicted], expected)
    np.testing.assert_array_equal(tokens[is_predicted] + 1, labels[is_predicted])
    assert batches.predictions == len(expected)
    assert all(batch.tokens_BS.shape == found[0].tokens_BS.shape for batch in found)


@pytest.mark.parametrize("document_mask", [False, True])
def test_evaluation_pads_a_ragged_tail_and_missing_rows_with_nothing_to_predict(document_mask):
    batch = evaluate([7], seq_len=5, batch=3, document_mask=document_mask).read(0, ALL, ALL)
    np.testing.assert_array_equal(
        batch.tokens_BS, [[1, 2, 3, 4, 5], [6, 7, 0, 0, 0], [0, 0, 0, 0, 0]]
    )
    np.testing.assert_array_equal(batch.labels_BS[1:], [[7] + [-100] * 4, [-100] * 5])
    if batch.segments_BS is not None:
        np.testing.assert_array_equal(batch.segments_BS, [[0] * 5, [0, 0, 1, 1, 1], [0] * 5])
        np.testing.assert_array_equal(batch.positions_BS, [range(5), [0, 1, 0, 1, 2], range(5)])


@pytest.mark.parametrize("length", [2, 5, 6])
def test_heldout_part_shorter_than_a_sequence_is_evaluated(length):
    batches = evaluate([length], seq_len=11, batch=2)
    assert (len(batches), batches.predictions) == (1, length - 1)


@pytest.mark.parametrize("mesh", [(1, 1), (2, 4), (4, 2), (1, 8)])
def test_one_epoch_holds_each_sample_once_and_a_sequence_group_reads_the_same_rows(mesh):
    data, seq = mesh
    seq_len, rows, steps = 8, 4, 5
    batches = train([seq_len * rows * steps + 3], seq_len, rows, seed=7)
    assert batches.windows == rows * steps
    per_device: dict[tuple[int, int], list[list[str]]] = {}
    for step, d, s in product(range(steps), range(data), range(seq)):
        r, c = rows // data, seq_len // seq
        local = batches.read(step, slice(d * r, (d + 1) * r), slice(s * c, (s + 1) * c))
        # Tokens are 1 + their index, so that a slice's samples are known from its tokens.
        samples = (local.tokens_BS[:, 0] - 1 - s * c) // seq_len
        assert (local.tokens_BS == samples[:, None] * seq_len + np.arange(c) + 1 + s * c).all()
        per_device.setdefault((d, s), []).append([digest(sample) for sample in samples])
    for d, s in per_device:
        assert per_device[d, s] == per_device[d, 0]
    seen = Counter(sample for d in range(data) for step in per_device[d, 0] for sample in step)
    assert seen == {digest(sample): 1 for sample in range(rows * steps)}


def digest(sample: int) -> str:
    return hashlib.sha256(np.int64(sample).tobytes()).hexdigest()


def windows(batches: TrainBatches, steps: range) -> list[int]:
    return [int(row[0] - 1) // 5 for t in steps for row in batches.read(t, ALL, ALL).tokens_BS]


def test_every_epoch_has_each_window_once_in_a_new_order_also_where_a_batch_straddles_two():
    order = windows(train([5 * 7 + 1]), range(7))
    epochs = [order[start : start + 7] for start in (0, 7, 14)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3


def test_order_depends_on_the_seed_alone():
    assert windows(train([36], seed=1), range(3)) == windows(train([36], seed=1), range(3))
    assert windows(train([36], seed=1), range(3)) != windows(train([36], seed=2), range(3))


def test_order_is_that_of_earlier_releases_so_that_old_runs_resume_in_place():
    assert windows(train([36], seed=3), range(3)) == [4, 6, 0, 2, 5, 3, 1, 2, 1]


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_training_data_shorter_than_a_sequence_is_refused(tokens):
    with pytest.raises(ValueError, match=rf"has {tokens} tokens.*train\.seq_len=5 needs 6; lower"):
        train([tokens])


@pytest.mark.parametrize(
    ("lengths", "document_mask"), [([1], False), ([1], True), ([1, 1, 1], True)]
)
def test_heldout_part_with_nothing_to_predict_is_refused(lengths, document_mask):
    with pytest.raises(ValueError, match=r"leaves none to predict.*raise data\.heldout_tokens"):
        evaluate(lengths, document_mask=document_mask)


def test_empty_heldout_part_is_refused():
    empty = TokenStore(np.empty(0, np.uint8), np.empty(0, np.int64))
    with pytest.raises(ValueError, match="has 0 tokens in 0 documents"):
        EvalBatches(empty, 5, 1, False, 256)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_out_of_range_is_refused(seed):
    with pytest.raises(ValueError, match=rf"seed={seed} is out of range; use 0 to 4294967295"):
        train([36], seed=seed)


def test_training_token_outside_the_vocabulary_is_refused_where_it_is_read():
    # One window: its inputs are all below 9, and the label of the last one is not.
    batches = train([10], seq_len=8, global_batch=1, vocab_size=9)
    batches.read(0, ALL, slice(0, 7))
    with pytest.raises(
        ValueError, match=r"token 9 at index 8 .*model\.vocab_size=9; raise .* to at least 10"
    ):
        batches.read(0, ALL, slice(0, 8))


def test_held_out_token_outside_the_vocabulary_is_refused_before_training():
    with pytest.raises(ValueError, match=r"token 16 at index 15 .*model\.vocab_size=9"):
        evaluate([16], seq_len=4, batch=1, vocab_size=9)


def test_largest_uint32_token_is_refused_and_not_wrapped():
    store = TokenStore(np.array([1, 2**32 - 1, 1], np.uint32), np.zeros(1, np.int64))
    with pytest.raises(ValueError, match="token 4294967295 at index 1"):
        TrainBatches(store, 2, 1, 0, False, 50257).read(0, ALL, ALL)


def test_only_the_tokens_of_the_slice_and_one_more_are_read():
    read: list[tuple[int, int]] = []

    class Spy(np.ndarray):
        def __getitem__(self, key):
            read.append((key.start, key.stop))
            return np.asarray(self)[key]

    store = store_of([50])
    spied = TokenStore(store.tokens.view(Spy), store.document_starts)
    EvalBatches(spied, 10, 4, True, 2**16).read(0, slice(1, 3), slice(5, 7))
    assert read == [(15, 18), (25, 28)]
