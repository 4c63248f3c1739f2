"""The layer under JAX's transformations, and in bfloat16."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ulysses_jax import make_mesh, ulysses_attention
from ulysses_jax.parallel.collectives import collectives

SIZES = 2, 7, 7, 4, 2, 3


@pytest.fixture
def attend():
    """Causal attention on two by two devices that do not divide the length."""
    return partial(ulysses_attention, mesh=make_mesh(2, 2), attention="reference", is_causal=True)


@pytest.fixture
def expected(arrays, definition):
    """Results and gradients of one call, of which only the output has a cotangent."""
    given = arrays(*SIZES)
    given = given._replace(dlse=0 * given.dlse)
    return given, definition(given, is_causal=True)


def _assert_close(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * max(1, np.abs(wanted).max()))


@pytest.mark.parametrize("wrapped", [jax.jit, lambda function: function])
def test_value_and_gradients_are_exact_compiled_and_eager(attend, expected, wrapped):
    given, wanted = expected

    def loss(q, k, v):
        return jnp.vdot(given.dout, attend(q, k, v))

    value, gradients = wrapped(jax.value_and_grad(loss, (0, 1, 2)))(*given[:3])
    _assert_close(value, np.vdot(given.dout, wanted["out"]))
    for name, found in zip(("dq", "dk", "dv"), gradients, strict=True):
        _assert_close(found, wanted[name])


def test_vmap_over_arrays_equals_one_call_each(attend, expected):
    given, wanted = expected
    stacked = [np.stack([x, 2 * x]) for x in given[:3]]

    @jax.jit
    def both(q, k, v):
        out, vjp = jax.vjp(jax.vmap(attend), q, k, v)
        return out, *vjp(np.stack([given.dout, given.dout]))

    out, dq, *_ = both(*stacked)
    _assert_close(out[0], wanted["out"])
    _assert_close(dq[0], wanted["dq"])
    _assert_close(out[1], attend(*(x[1] for x in stacked)))


def test_vmap_over_masks_alone_equals_one_call_each(attend, arrays, definition):
    given = arrays(*SIZES)
    masks = np.random.default_rng(1).random((3, 1, 1, 7, 7)) < 0.6
    out = jax.jit(jax.vmap(lambda mask: attend(*given[:3], mask=mask)))(masks)
    for found, mask in zip(out, masks, strict=True):
        _assert_close(found, definition(given, is_causal=True, mask=mask)["out"])


def _layers(attend, x, weights):
    def layer(x, weight):
        q = jnp.einsum("bshd,de->bshe", x, weight)
        return x + attend(q, x[:, :, :2], x[:, :, 2:]), None

    return jax.lax.scan(layer, x, weights)[0]


def test_scan_over_layers_equals_the_same_layers_without_a_mesh(attend, arrays):
    x = arrays(*SIZES).q
    weights = np.random.default_rng(2).standard_normal((3, 3, 3)).astype(np.float32)

    def results(attend):
        def loss(x, weights):
            return jnp.sum(jnp.cos(_layers(attend, x, weights)))

        return jax.jit(jax.value_and_grad(loss, (0, 1)))(x, weights)

    alone = partial(ulysses_attention, attention="reference", is_causal=True)
    found, wanted = results(attend), results(alone)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        _assert_close(x, y)


@pytest.mark.parametrize(
    ("policy", "all_to_alls"),
    [
        # q, k and v again for the backward pass.
        (jax.checkpoint_policies.nothing_saveable, 5),
        (jax.checkpoint_policies.save_only_these_names("attn_exchanged"), 5),
        (
            jax.checkpoint_policies.save_only_these_names(
                "attn_q", "attn_k", "attn_v", "attn_out", "attn_lse", "attn_exchanged"
            ),
            4,
        ),
        (jax.checkpoint_policies.everything_saveable, 4),
    ],
)
def test_recomputation_changes_no_gradient(attend, expected, policy, all_to_alls):
    given, wanted = expected

    def results(q, k, v):
        out, vjp = jax.vjp(jax.checkpoint(attend, policy=policy), q, k, v)
        return out, *vjp(given.dout)

    compiled = jax.jit(results).lower(*given[:3]).compile()
    for name, found in zip(("out", "dq", "dk", "dv"), compiled(*given[:3]), strict=True):
        _assert_close(found, wanted[name])
    kinds = [collective.kind for collective in collectives(compiled.as_text())]
    assert kinds.count("all-to-all") == all_to_alls


def test_shapes_are_known_without_computing(attend):
    q, kv = (jax.ShapeDtypeStruct((2, 7, heads, 3), jnp.bfloat16) for heads in (4, 2))
    out, lse = jax.eval_shape(partial(attend, return_lse=True), q, kv, kv)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert (lse.shape, lse.dtype) == ((2, 4, 7), jnp.float32)


@pytest.mark.parametrize(("kv_heads", "chunks"), [(2, 2), (2, 4), (8, 4)])
def test_chunks_of_heads_change_no_gradient(
    attend, arrays, gradients_of, definition, assert_equal, kv_heads, chunks
):
    given = arrays(2, 7, 7, 8, kv_heads, 3)
    bias = np.linspace(-2, 2, 8 * 7, dtype=np.float32).reshape(1, 8, 1, 7)
    found = gradients_of(attend, given, chunks=chunks, bias=bias, return_lse=True)
    assert_equal(found, definition(given, is_causal=True, bias=bias))


@pytest.mark.parametrize("attention", ["reference", "blockwise"])
def test_bfloat16_stays_and_the_log_sum_exp_is_float32(
    attend, arrays, gradients_of, definition, attention
):
    given = arrays(*SIZES)
    halved = [x.astype(jnp.bfloat16) for x in given[:4]]
    rounded = given._replace(**dict(zip(given._fields, halved, strict=False)))
    found = gradients_of(partial(attend, attention=attention), rounded, return_lse=True)
    assert {name: x.dtype for name, x in found.items()} == {
        name: jnp.float32 if name == "lse" else jnp.bfloat16 for name in found
    }
    for name, y in definition(rounded, is_causal=True).items():
        x = np.asarray(found[name], np.float64)
        np.testing.assert_allclose(x, y, rtol=0, atol=0.02 * np.abs(y).max(), err_msg=name)
