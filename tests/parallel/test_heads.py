"""The head plan: what it refuses, and how much it says is moved."""

import pytest

from ulysses_jax.parallel.heads import HeadPlan


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ways", "kind"),
    [(6, 6, 4, "6 query heads"), (8, 2, 4, "2 key/value heads")],
)
def test_refusal_names_the_heads_and_the_devices(heads, kv_heads, ways, kind):
    with pytest.raises(ValueError, match=f"{ways} devices does not divide {kind}"):
        HeadPlan.of(heads, kv_heads, ways)


def test_query_heads_must_be_a_multiple_of_the_kv_heads():
    with pytest.raises(ValueError, match="6 query heads are not a multiple of 4"):
        HeadPlan.of(6, 4, 2)


def test_elements_moved_is_the_papers_volume_with_one_kv_head_a_query_head():
    sequence, hidden, ways = 1024, 64, 8
    plan = HeadPlan.of(8, 8, ways)
    assert plan.elements_moved(sequence // ways, hidden // 8) == 4 * sequence * hidden // ways
