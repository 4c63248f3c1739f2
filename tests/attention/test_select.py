"""Implementations are found by name."""

import pytest

from ulysses_jax.attention import blockwise, reference
from ulysses_jax.attention.select import attention_function


def test_names_give_their_implementation() -> None:
    assert attention_function("blockwise") is blockwise.attend
    assert attention_function("reference") is reference.attend


def test_an_unknown_name_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="'flash': choose one of blockwise, reference"):
        attention_function("flash")
