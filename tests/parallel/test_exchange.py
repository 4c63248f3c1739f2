"""The exchange: every element lands where the layout says, and comes back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from ulysses_jax.parallel.exchange import heads_to_seq, seq_to_heads
from ulysses_jax.parallel.mesh import SEQ, make_mesh


def _on_mesh(function, ways, in_spec, out_spec):
    mesh = make_mesh(1, ways, jax.devices()[:ways])
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_spec, out_specs=out_spec))


SEQ_SPLIT = PartitionSpec(None, SEQ)
HEADS_SPLIT = PartitionSpec(None, None, SEQ)


@pytest.mark.parametrize("ways", [2, 3, 4])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_first_exchange_keeps_every_element_at_its_global_place(ways, batch):
    # B, S/P and H/P are distinct primes where they can be, so no two dimensions can be mixed.
    shape = (batch, 7 * ways, 5 * ways, 2)
    x = jnp.arange(np.prod(shape)).reshape(shape)
    gather_sequence = _on_mesh(lambda x: seq_to_heads(x, SEQ), ways, SEQ_SPLIT, HEADS_SPLIT)
    exchanged = gather_sequence(x)
    np.testing.assert_array_equal(exchanged, x)
    for shard in exchanged.addressable_shards:
        assert shard.data.shape == (batch, 7 * ways, 5, 2)


@pytest.mark.parametrize("ways", [2, 3, 4])
def test_second_exchange_inverts_the_first_bitwise(ways):
    shape = (3, 7 * ways, 5 * ways, 2)
    x = jnp.arange(np.prod(shape)).reshape(shape)
    there_and_back = _on_mesh(
        lambda x: heads_to_seq(seq_to_heads(x, SEQ), SEQ), ways, SEQ_SPLIT, SEQ_SPLIT
    )
    np.testing.assert_array_equal(there_and_back(x), x)
