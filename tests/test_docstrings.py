"""Every public name says what it takes, and its example runs as it stands."""

import doctest

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import ulysses_jax
from ulysses_jax.attention.block_layout import longformer

# What a reader of the examples has imported; every public name besides.
NAMES = {
    "jax": jax,
    "jnp": jnp,
    "longformer": longformer,
    "nn": nn,
    "nnx": nnx,
    "np": np,
    "PartitionSpec": PartitionSpec,
} | {name: getattr(ulysses_jax, name) for name in ulysses_jax.__all__}


@pytest.mark.parametrize("name", ulysses_jax.__all__)
def test_the_example_of_a_public_name_runs(name):
    documented = getattr(ulysses_jax, name)
    (found,) = doctest.DocTestFinder(recurse=False).find(documented, name, globs=NAMES)
    failed, tried = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(found)
    assert tried > 0
    assert failed == 0
