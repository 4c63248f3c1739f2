"""What other sequence-parallel systems got wrong, each as the layer must do it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ulysses_jax import make_mesh, ulysses_attention

pytestmark = pytest.mark.filterwarnings("ignore:.* devices for .* query heads")


def masked(query, key, value, mask=None):
    """A user's own attention."""
    groups = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, groups, axis=2) for x in (key, value))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * query.shape[-1] ** -0.5
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)


def unmasked(query, key, value):
    return masked(query, key, value)


ON_CPU = {
    "blockwise": "blockwise",
    "reference": "reference",
    "jax.nn": jax.nn.dot_product_attention,
    "a user's own": masked,
}


@pytest.fixture
def assert_exact(arrays, gradients_of, definition, assert_equal):
    """Values and gradients of a call equal the definition."""

    def check(sizes, mesh, attention="reference", exchange="auto", chunks=1, **what):
        given = arrays(*sizes)
        found = gradients_of(
            partial(ulysses_attention, mesh=mesh),
            given,
            attention=attention,
            exchange=exchange,
            chunks=chunks,
            return_lse=True,
            **what,
        )
        assert_equal(found, definition(given, **what))

    return check


def _ones_of_each(query, key, value):
    """A token's first number from the queries, its second from the keys, its third from values."""
    return jnp.concatenate([query[..., :1], key[..., 1:2], value[..., 2:]], axis=-1)


# B, S/P and H/P are distinct primes where they can be, so that no two dimensions can be mixed.
@pytest.mark.parametrize(("batch", "ways"), [(1, 2), (2, 2), (3, 4), (2, 4), (2, 3), (3, 6)])
def test_attention_that_returns_what_it_is_given_changes_no_bit(batch, ways):
    shape = (batch, 7 * ways, 5 * ways, 3)
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    out = ulysses_attention(x, x, x, mesh=make_mesh(1, ways), attention=_ones_of_each)
    np.testing.assert_array_equal(out, x)


@pytest.mark.parametrize(("length", "ways"), [(10, 4), (7, 8), (1, 4)])
@pytest.mark.parametrize("exchange", ["all_to_all", "halo"])
def test_lengths_that_the_devices_do_not_divide_are_exact(assert_exact, length, ways, exchange):
    window = (3, 1) if exchange == "halo" else None
    sizes = (2, length, length, 8, 4, 2)
    assert_exact(sizes, make_mesh(1, ways), exchange=exchange, window=window)


def _checkpointed(q, k, v, **keywords):
    return jax.checkpoint(partial(ulysses_attention, **keywords))(q, k, v)


@pytest.mark.parametrize(
    ("shape", "attend"),
    [
        ((1, 8), ulysses_attention),
        ((2, 4), ulysses_attention),
        ((2, 4), _checkpointed),
        ((4, 2), ulysses_attention),
        ((8, 1), ulysses_attention),
    ],
)
def test_call_with_nothing_but_arrays_is_exact_on_every_shard(
    arrays, gradients_of, definition, shape, attend
):
    given, mesh = arrays(8, 8, 8, 8, 2, 3), make_mesh(*shape)
    by_tokens = NamedSharding(mesh, PartitionSpec("data", "seq"))
    qkv = jax.device_put(dict(zip("qkv", given, strict=False)), by_tokens)
    placed = given._replace(dlse=0 * given.dlse, **qkv)
    found = gradients_of(partial(attend, mesh=mesh, attention="reference"), placed)
    expected = definition(placed)
    for name, x in found.items():
        assert x.sharding.is_equivalent_to(by_tokens, 4), name
        assert len(x.addressable_shards) == 8
        for shard in x.addressable_shards:
            y = expected[name]
            largest = np.abs(y).max()
            np.testing.assert_allclose(shard.data, y[shard.index], rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ways"),
    [
        (6, 6, 4),
        (6, 2, 4),
        (8, 2, 8),
        (8, 1, 4),
        (28, 4, 8),
        (10, 2, 4),
        (3, 3, 8),
        # Two devices share the second of three key/value heads.
        (12, 3, 2),
    ],
)
def test_heads_that_the_devices_do_not_divide_are_exact(assert_exact, heads, kv_heads, ways):
    sizes = (1, 9, 9, heads, kv_heads, 2)
    assert_exact(sizes, make_mesh(1, ways), is_causal=True)


@pytest.mark.parametrize("heads", [8, 6])
def test_each_head_has_its_own_slope(assert_exact, heads):
    query, key = np.ogrid[:9, :9]
    slopes = np.arange(heads, dtype=np.float32).reshape(1, -1, 1, 1)
    bias = (-slopes / heads * (query - key)).astype(np.float32)
    assert_exact((2, 9, 9, heads, 2, 2), make_mesh(1, 4), is_causal=True, bias=bias)


@pytest.mark.parametrize("is_causal", [True, False])
def test_packed_documents_equal_separate_calls(arrays, is_causal):
    q, k, v, *_ = arrays(1, 16, 16, 4, 2, 3)
    ids = np.repeat(np.array([[4, 1]], np.int32), (5, 11), axis=1)
    attend = partial(
        ulysses_attention, mesh=make_mesh(1, 4), attention="reference", is_causal=is_causal
    )

    @jax.jit
    def both(q, k, v):
        parts = [attend(*(x[:, part] for x in (q, k, v))) for part in (slice(5), slice(5, 16))]
        return attend(q, k, v, q_segment_ids=ids), jnp.concatenate(parts, axis=1)

    packed, separate = both(q, k, v)
    np.testing.assert_allclose(packed, separate, rtol=0, atol=1e-5)


def _changed(attend, q, k, v, token):
    """The queries whose output has another bit when a token is another one."""
    run = jax.jit(attend)
    others = [np.array(x) for x in (q, k, v)]
    for x in others:
        x[:, token] = 9 - x[:, token]
    before, after = np.asarray(run(q, k, v)), np.asarray(run(*others))
    return np.flatnonzero((before != after).any(axis=(0, 2, 3))).tolist()


@pytest.mark.parametrize(
    ("name", "window"), [*((name, None) for name in ON_CPU), ("blockwise", (15, 15))]
)
def test_token_changes_no_bit_of_another_document(arrays, name, window):
    q, k, v, *_ = arrays(1, 16, 16, 4, 2, 3)
    ids = np.repeat(np.array([[4, 1]], np.int32), (5, 11), axis=1)
    attend = partial(
        ulysses_attention,
        mesh=make_mesh(1, 4),
        attention=ON_CPU[name],
        q_segment_ids=ids,
        window=window,
        exchange="all_to_all" if window is None else "halo",
    )
    assert _changed(attend, q, k, v, token=2) == list(range(5))
    assert _changed(attend, q, k, v, token=9) == list(range(5, 16))


@pytest.mark.parametrize("exchange", ["all_to_all", "halo"])
@pytest.mark.parametrize("left", [4, 5])
def test_window_ends_where_it_ends_whatever_a_device_holds(arrays, exchange, left):
    q, k, v, *_ = arrays(1, 16, 16, 4, 2, 3)
    attend = partial(
        ulysses_attention, mesh=make_mesh(1, 4), attention="blockwise", exchange=exchange
    )
    # The first query of the third device is the last one to see it.
    token = 8 - left
    causal = partial(attend, is_causal=True, window=(left, None))
    assert _changed(causal, q, k, v, token) == list(range(token, 9))
    both = partial(attend, window=(left, 1))
    assert _changed(both, q, k, v, token) == list(range(token - 1, 9))


@pytest.mark.parametrize("attention", [*ON_CPU.values(), unmasked])
@pytest.mark.parametrize("said", ["kv_lengths", "mask"])
def test_padding_is_honoured_or_refused(arrays, definition, attention, said):
    given = arrays(2, 6, 7, 4, 2, 3)
    lengths = np.array([4, 7], np.int32)
    mask = np.arange(7) < lengths[:, None, None, None]
    what = {"kv_lengths": lengths} if said == "kv_lengths" else {"mask": mask}
    call = partial(ulysses_attention, mesh=make_mesh(2, 2), attention=attention, **what)
    if attention is unmasked:
        with pytest.raises(NotImplementedError, match="unmasked does not take the keyword 'mask'"):
            call(*given[:3])
        return
    out = jax.jit(call)(*given[:3])
    np.testing.assert_allclose(out, definition(given, **what)["out"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kernel", ["cudnn", "tokamax", "pallas", "splash"])
def test_kernel_of_another_device_is_refused_by_name(arrays, kernel):
    q, k, v, *_ = arrays(1, 4, 4, 2, 2, 8)
    with pytest.raises(NotImplementedError, match=f"attention '{kernel}' runs on .PUs"):
        jax.eval_shape(partial(ulysses_attention, mesh=make_mesh(1, 2), attention=kernel), q, k, v)


@pytest.mark.parametrize(("data", "seq"), [(1, 4), (2, 1), (1, 1), (2, 3)])
def test_explicit_axes_of_any_size_are_exact(assert_exact, make_axes, data, seq):
    mesh = make_axes(AxisType.Explicit, data=data, seq=seq)
    with jax.set_mesh(mesh):
        assert_exact((2, 7, 5, 6, 2, 2), None, kv_lengths=np.array([3, 0], np.int32))


@pytest.mark.parametrize("ways", [3, 6])
def test_devices_of_no_power_of_two_are_exact(assert_exact, ways):
    bias = np.linspace(-1, 1, 4 * 11, dtype=np.float32).reshape(1, 4, 1, 11)
    assert_exact((2, 11, 11, 4, 2, 3), make_mesh(1, ways), attention="blockwise", bias=bias)


@pytest.mark.parametrize("exchange", ["halo", "all_to_all"])
@pytest.mark.parametrize(
    "lengths", [np.array([-(2**31), 8], np.int32), np.array([2**32 - 1, 5], np.uint32)]
)
def test_lengths_beyond_the_sequence_are_none_or_all_of_it(arrays, definition, exchange, lengths):
    given, what = arrays(2, 8, 8, 4, 2, 3), {"kv_lengths": lengths.astype(np.int64)}
    # As a JAX array, which no check on the host has seen.
    attend = partial(ulysses_attention, mesh=make_mesh(1, 4), window=(2, 2), exchange=exchange)
    for attention in ON_CPU.values():
        out = attend(*given[:3], kv_lengths=jnp.asarray(lengths), attention=attention)
        expected = definition(given, window=(2, 2), **what)["out"]
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("exchange", ["halo", "all_to_all"])
@pytest.mark.parametrize("attention", ["reference", "blockwise"])
def test_segments_of_64_bits_stay_apart(arrays, definition, exchange, attention):
    # Cut to 32 bits, the first and the third document would be one, in two places.
    ids = np.array([[2**40, 2**40, 1, 1, 0, 0, 2**40, 0]] * 2)
    given = arrays(2, 8, 8, 4, 2, 3)
    expected = definition(given, window=(5, 2), q_segment_ids=ids)["out"]
    with jax.enable_x64(True):
        out = ulysses_attention(
            *given[:3], make_mesh(1, 4), window=(5, 2), q_segment_ids=jnp.asarray(ids),
            exchange=exchange, attention=attention,
        )  # fmt: skip
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)
