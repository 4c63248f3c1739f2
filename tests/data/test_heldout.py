"""What is held out of a text corpus."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ulysses_jax.data.heldout import heldout_budget, heldout_bytes
from ulysses_jax.data.source import Document


def documents_of(sizes: list[int]) -> list[Document]:
    return [Document(f"{i}.txt", Path(f"{i}.txt"), size, "") for i, size in enumerate(sizes)]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(0, 2000))
def test_held_out_part_is_at_most_the_budget_and_at_least_half_of_it(sizes, tokens):
    budget = heldout_budget(sum(sizes), tokens)
    held = heldout_bytes(documents_of(sizes), budget)
    assert all(0 <= cut <= size for cut, size in zip(held, sizes, strict=True))
    assert budget / 2 <= sum(held) <= budget <= sum(sizes) / 10
    assert sum(0 < cut < size for cut, size in zip(held, sizes, strict=True)) <= 1


@given(st.permutations(range(20)))
def test_choice_depends_on_names_and_not_on_order(order):
    documents = documents_of([7 * i + 1 for i in range(20)])
    held = heldout_bytes(documents, 100)
    shuffled = heldout_bytes([documents[i] for i in order], 100)
    assert shuffled == [held[i] for i in order]


def test_whole_documents_are_held_out_and_none_above_a_quarter_of_the_budget():
    sizes = [10] * 50 + [26] * 50
    held = heldout_bytes(documents_of(sizes), 100)
    assert sum(held) == 100
    assert set(held) == {0, 10}


@pytest.mark.parametrize("sizes", [[1000], [5, 1000], [1000, 2000, 3000]])
def test_tail_of_a_document_is_held_out_where_whole_ones_are_too_big(sizes):
    held = heldout_bytes(documents_of(sizes), 100)
    assert sum(held) == 100
