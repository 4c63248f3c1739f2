"""Batches as a pure function of (seed, step), read a slice at a time from a token store.

A window is seq_len inputs and the token that follows each of them (its label), so seq_len + 1
tokens; the next window starts seq_len later. Labels are shifted here, before anything is sliced for
a device: the label of a slice's last token lies in the next slice, and nobody shifts again.
"""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Int32, Int64

from ulysses_jax.data.store import TokenStore

IGNORED_LABEL = -100
_MAX_SEED = 2**32 - 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Rows of tokens, in numpy or on devices; a leading axis is micro-batches, where there are any.

    Attributes:
        tokens_BS: the inputs.
        labels_BS: the token that follows each input; -100 where there is none to predict.
        positions_BS: the position of each input, from 0 at the start of its row or document.
        segments_BS: 0, 1, … for the documents of a row in turn; None without a document mask.
    """

    tokens_BS: Int32[Any, "*A B S"]
    labels_BS: Int32[Any, "*A B S"]
    positions_BS: Int32[Any, "*A B S"]
    segments_BS: Int32[Any, "*A B S"] | None


class TrainBatches:
    """Shuffled training batches: row r of step t is entry t·B + r of an endless shuffle.

    The shuffle passes through all whole windows, each exactly once, in a new order each epoch; a
    batch may straddle two epochs. The store's last tokens, less than a window, are not used.

    Attributes:
        windows: windows an epoch.
    """

    def __init__(
        self,
        store: TokenStore,
        seq_len: int,
        global_batch: int,
        seed: int,
        document_mask: bool,
        vocab_size: int,
    ) -> None:
        """Plans the batches; reads no tokens.

        Args:
            store: what to read.
            seq_len: inputs a row.
            global_batch: rows a step, over all processes and micro-batches.
            seed: below 2³²; fixes the order on any machine and mesh.
            document_mask: keep the documents in a row apart (see `Batch`); no label then crosses
                from one document to the next.
            vocab_size: tokens read must be below it.

        Raises:
            ValueError: the seed is out of range or the data shorter than one sequence.
        """
        if not 0 <= seed <= _MAX_SEED:
            raise ValueError(f"seed={seed} is out of range; use 0 to {_MAX_SEED}")
        self.windows = max(len(store) - 1, 0) // seq_len
        if not self.windows:
            raise ValueError(
                f"the training data has {len(store)} tokens, but one sequence of "
                f"train.seq_len={seq_len} needs {seq_len + 1}; lower train.seq_len or give more "
                "data"
            )
        self._reader = _WindowReader(store, seq_len, document_mask, vocab_size)
        self._seq_len = seq_len
        self._global_batch = global_batch
        # Imported here, so that a `Batch` alone needs no more than JAX.
        import grain

        self._order = grain.MapDataset.range(self.windows).seed(seed).shuffle().repeat()

    def read(self, step: int, rows: slice, columns: slice) -> Batch:
        """The given rows and columns of step `step`, as numpy arrays [rows, columns].

        Raises:
            ValueError: a token read is not below vocab_size.
        """
        first = step * self._global_batch
        starts_B = [
            self._order[first + row] * self._seq_len for row in range(self._global_batch)[rows]
        ]
        return self._reader.read(starts_B, columns)


class EvalBatches:
    """The held-out store from first to last, each predictable token exactly once.

    What does not fill a row, or a batch of rows, is padded with token 0 and label -100. The padding
    behaves like one more document.

    Attributes:
        predictions: tokens predicted in one pass, the number of labels that are not -100.
    """

    def __init__(
        self,
        store: TokenStore,
        seq_len: int,
        batch: int,
        document_mask: bool,
        vocab_size: int,
    ) -> None:
        """Plans the batches, of `batch` rows each. Arguments as in `TrainBatches`.

        Raises:
            ValueError: there is no token to predict, or one is not below vocab_size.
        """
        # The first token of the store, or of each document, is predicted from nothing.
        self.predictions = max(len(store) - (len(store.document_starts) if document_mask else 1), 0)
        if not self.predictions:
            raise ValueError(
                f"the held-out part has {len(store)} tokens in {len(store.document_starts)} "
                "documents, which leaves none to predict, and at least 1 is needed; raise "
                "data.heldout_tokens or give more data"
            )
        self._reader = _WindowReader(store, seq_len, document_mask, vocab_size)
        # Before any training, whose last evaluation would otherwise find it.
        self._reader.check_vocabulary(store.tokens, 0)
        self._seq_len = seq_len
        self._batch = batch
        self._windows = -(-(len(store) - 1) // seq_len)
        self._tokens = len(store)

    def __len__(self) -> int:
        return -(-self._windows // self._batch)

    def read(self, index: int, rows: slice, columns: slice) -> Batch:
        """The given rows and columns of batch `index`, as numpy arrays [rows, columns].

        Raises:
            ValueError: a token read is not below vocab_size.
        """
        first = index * self._batch
        starts_B = [
            window * self._seq_len if window < self._windows else self._tokens
            for window in range(first, first + self._batch)[rows]
        ]
        return self._reader.read(starts_B, columns)


@dataclass(frozen=True)
class _WindowReader:
    store: TokenStore
    seq_len: int
    document_mask: bool
    vocab_size: int

    def read(self, starts_B: list[int], columns: slice) -> Batch:
        """Columns of the windows that start at the given tokens; what lies past the end is padding.

        Only the tokens of these columns and the one after them are read.
        """
        first, last, _ = columns.indices(self.seq_len)
        shape = len(starts_B), last - first
        tokens_BS = np.zeros(shape, np.int32)
        labels_BS = np.full(shape, IGNORED_LABEL, np.int32)
        positions_BS = np.empty(shape, np.int32)
        positions_BS[:] = np.arange(first, last)
        segments_BS = np.zeros(shape, np.int32) if self.document_mask else None
        for row, start in enumerate(starts_B):
            read = self.store.tokens[start + first : start + last + 1]
            self.check_vocabulary(read, start + first)
            inputs, labels = read[: last - first], read[1:]
            tokens_BS[row, : len(inputs)] = inputs
            labels_BS[row, : len(labels)] = labels
            if segments_BS is not None:
                bounds = self._document_bounds(start)
                column_S = np.arange(first, last)
                segments_BS[row] = _segment_of(bounds, column_S)
                positions_BS[row] = column_S - bounds[segments_BS[row]]
                labels_BS[row, _segment_of(bounds, column_S + 1) > segments_BS[row]] = IGNORED_LABEL
        return Batch(tokens_BS, labels_BS, positions_BS, segments_BS)

    def _document_bounds(self, start: int) -> Int64[np.ndarray, "segments"]:
        """The columns of the window at `start` where a segment begins; the first is always 0."""
        document_starts = self.store.document_starts
        begun, after = np.searchsorted(document_starts, [start, start + self.seq_len], side="right")
        bounds = np.asarray(document_starts[begun - 1 : after]) - start
        bounds[0] = 0  # this document may have begun in an earlier window
        padding = len(self.store) - start
        return np.append(bounds, padding) if padding else bounds

    def check_vocabulary(self, read: np.ndarray, offset: int) -> None:
        if len(read) and (largest := int(read.max())) >= self.vocab_size:
            raise ValueError(
                f"token {largest} at index {offset + int(read.argmax())} of the data is not below "
                f"model.vocab_size={self.vocab_size}; raise model.vocab_size to at least "
                f"{largest + 1}, or check data.token_dtype"
            )


def _segment_of(
    bounds: Int64[np.ndarray, "segments"], column_S: Int64[np.ndarray, "S"]
) -> Int64[np.ndarray, "S"]:
    """The segment each column lies in."""
    return np.searchsorted(bounds, column_S, side="right") - 1
