"""Places of a sequence are told by the part that holds them."""

import pytest

from ulysses_jax.verification.places import Sequences


@pytest.mark.parametrize(
    ("length", "parts", "token", "name"),
    [
        (16, 4, 4, "token 4, the first of part 1 of 4"),
        (16, 4, 7, "token 7, the last of part 1 of 4"),
        (16, 4, 6, "token 6, in part 1 of 4"),
        (7, 3, 6, "token 6, the first of part 2 of 3"),
        (8, 3, 7, "token 7, the last of part 2 of 3"),
        (2, 3, 1, "token 1, the first of part 1 of 3"),
        (16, 1, 4, "token 4"),
    ],
)
def test_token_is_named_by_its_part(length, parts, token, name):
    assert Sequences(length, parts).name(token) == name
