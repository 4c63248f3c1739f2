"""Flax's own attention modules, Linen and NNX, give the same with our attention_fn on any mesh."""

import functools
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ulysses_jax import make_mesh
from ulysses_jax.parallel.flax import make_attention_fn
from ulysses_jax.parallel.layer import ulysses_attention

B, S, E, H = 2, 7, 12, 4
X = jax.random.normal(jax.random.key(0), (B, S, E))
# Dense attention compiles fastest, and the others are tested elsewhere.
dense = functools.partial(make_attention_fn, attention="reference")
PADDED = np.arange(S) < np.array([[5], [7]])


def _close(found, wanted, tolerance=1e-5):
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True
    ):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        # The bias of keys has no gradient but rounding errors.
        atol = tolerance * max(np.abs(y).max(), 0.1)
        np.testing.assert_allclose(x, y, rtol=0, atol=atol, err_msg=jax.tree_util.keystr(path))


def _linen(attention_fn=nn.dot_product_attention, **fields):
    return nn.MultiHeadDotProductAttention(num_heads=H, attention_fn=attention_fn, **fields)


def _nnx(attention_fn=nnx.dot_product_attention, **fields):
    fields = {"num_kv_heads": 2, "decode": False} | fields
    return nnx.MultiHeadAttention(
        num_heads=H, in_features=E, attention_fn=attention_fn, rngs=nnx.Rngs(1), **fields
    )


def _results(apply, params):
    """The output on X, and the gradients of a loss in all parameters and in X."""

    @jax.jit
    def run(params, x):
        out, vjp = jax.vjp(apply, params, x)
        return out, vjp(jnp.cos(out))

    return run(params, X)


@pytest.fixture(scope="module")
def linen_params():
    return jax.jit(_linen().init)(jax.random.key(1), X)


def test_a_linen_module_is_unchanged_and_sees_its_masks(linen_params):
    # Masks of Flax are float32 arrays.
    mask = nn.combine_masks(nn.make_causal_mask(X[..., 0]), nn.make_attention_mask(PADDED, PADDED))
    mask = jnp.maximum(mask, jnp.eye(S))

    def results(module, mask):
        return _results(lambda params, x: module.apply(params, x, mask=mask), linen_params)

    found = results(_linen(make_attention_fn(make_mesh(2, 2))), mask)
    _close(found, results(_linen(), mask))


def test_an_nnx_module_with_fewer_kv_heads_is_unchanged_and_fixed_options_restrict_its_mask():
    graph, params, rest = nnx.split(_nnx(), nnx.Param, ...)
    mask = np.ones((B, 1, S, S), bool)
    mask[:, :, 4:, 3] = False
    band = np.tri(S, dtype=bool) & ~np.tri(S, k=-4, dtype=bool)
    seen = mask & PADDED[:, None, None] & band

    def results(attention_fn, mask, **options):
        def apply(params, x):
            module = nnx.merge(graph, params, rest)
            module.attention_fn = attention_fn
            return module(x, mask=mask, **options)

        return _results(apply, params)

    fixed = dense(make_mesh(1, 4), window=(3, None), kv_lengths=PADDED.sum(1))
    found = results(fixed, mask, is_causal=True)
    _close(found, results(nnx.dot_product_attention, seen))


@pytest.mark.parametrize(
    ("broadcast", "shapes"), [(True, [(2, 2)]), (False, [(1, 1), (2, 2), (1, 4)])]
)
def test_dropout_has_its_rate_and_depends_on_no_mesh(broadcast, shapes):
    rate, length = 0.3, 16
    # Equal scores and values that are unit vectors: the output is the weights.
    q = jnp.zeros((B, length, H, length))
    v = jnp.broadcast_to(jnp.eye(length)[:, None], q.shape)

    def weights(mesh):
        options = {"dropout_rng": jax.random.key(2), "broadcast_dropout": broadcast}
        return np.asarray(dense(mesh)(q, q, v, dropout_rate=rate, **options))

    whole = weights(None)
    dropped = whole == 0.0
    draws = length**2 * (1 if broadcast else B * H)
    assert abs(dropped.mean() - rate) < 4 * np.sqrt(rate * (1 - rate) / draws)
    np.testing.assert_allclose(whole[~dropped], 1 / length / (1 - rate), rtol=1e-6)
    assert (dropped == dropped[:1, :, :1]).all() == broadcast
    for shape in shapes:
        np.testing.assert_allclose(weights(make_mesh(*shape)), whole, rtol=0, atol=1e-7)


def test_modules_draw_dropout_where_they_are_told_to(linen_params):
    linen = _linen(dense(make_mesh(2, 2)), dropout_rate=0.5)

    @jax.jit
    def results(key, params):
        rngs = {"dropout": key}
        return [linen.apply(params, X, rngs=rngs, deterministic=off) for off in (False, True)]

    one, plain = results(jax.random.key(0), linen_params)
    other, _ = results(jax.random.key(1), linen_params)
    _close(plain, _linen().apply(linen_params, X))
    of_nnx = _nnx(dense(), dropout_rate=0.5)
    pairs = [
        (one, plain),
        (one, other),
        (of_nnx(X, deterministic=False), of_nnx(X, deterministic=True)),
    ]
    assert all(np.abs(x - y).max() > 0.01 for x, y in pairs)


def test_init_with_one_dummy_row_gives_the_usual_parameters(linen_params):
    sharded = _linen(dense(make_mesh(2, 2)))
    _close(jax.jit(sharded.init)(jax.random.key(1), jnp.zeros((1, S, E))), linen_params, 0.0)


class Layer(nn.Module):
    attention_fn: object

    @nn.compact
    def __call__(self, x, mask):
        return x + _linen(self.attention_fn)(nn.LayerNorm()(x), mask=mask), None


class Stack(nn.Module):
    attention_fn: object

    @nn.compact
    def __call__(self, x, mask):
        layers = nn.scan(
            nn.remat(Layer),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=2,
        )
        return layers(self.attention_fn)(x, mask)[0]


def test_gradients_are_unchanged_under_vmap_scan_and_remat():
    mask = nn.make_causal_mask(X[..., 0])
    shapes = jax.eval_shape(Stack(nn.dot_product_attention).init, jax.random.key(0), X, mask)
    draw = np.random.default_rng(4)
    # Two models with parameters of their own.
    params = jax.tree.map(lambda x: draw.standard_normal((2, *x.shape), np.float32) / 3, shapes)

    def results(attention_fn):
        def loss(params):
            return jnp.sum(jnp.sin(Stack(attention_fn).apply(params, X, mask)))

        return jax.jit(jax.vmap(jax.value_and_grad(loss)))(params)

    _close(results(dense(make_mesh(2, 2))), results(nn.dot_product_attention))


def test_bfloat16_modules_compute_in_bfloat16(linen_params):
    module = _linen(dense(make_mesh(1, 4)), dtype=jnp.bfloat16)
    found = jax.jit(module.apply)(linen_params, X)
    assert found.dtype == jnp.bfloat16
    _close(found, _linen().apply(linen_params, X), 0.03)


def test_decoding_with_linen_attends_to_the_cache(linen_params):
    module = _linen(dense(make_mesh(1, 4), is_causal=True), decode=True)
    cache = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype),
        jax.eval_shape(module.init, jax.random.key(1), X)["cache"],
    )
    step = jax.jit(lambda variables, x: module.apply(variables, x, mutable=["cache"]))
    outs = []
    for i in range(3):
        out, variables = step(linen_params | {"cache": cache}, X[:, i : i + 1])
        cache = variables["cache"]
        outs.append(out)
    whole = _linen().apply(linen_params, X, mask=nn.make_causal_mask(X[..., 0]))
    _close(jnp.concatenate(outs, axis=1), whole[:, :3])


def test_decoding_with_nnx_attends_to_the_cache():
    module = _nnx(dense(make_mesh(1, 4), is_causal=True))
    module.init_cache(X.shape)
    outs = [module(X[:, i : i + 1], decode=True) for i in range(3)]
    _close(jnp.concatenate(outs, axis=1), _nnx()(X, is_causal=True)[:, :3])


def _shapes(attention_fn, lead, **options):
    q = jnp.zeros((*lead, 5, 4, 3))
    k = jnp.zeros((*lead, 6, 2, 3))
    return jax.eval_shape(lambda q, k: attention_fn(q, k, k, **options), q, k)


@pytest.mark.parametrize(
    ("lead", "mask", "rows"),
    [
        ((), (5, 6), 1),
        ((), (4, 5, 6), 1),
        ((2,), (1, 1, 5, 6), 1),
        ((2, 3), (5, 6), 1),
        ((2, 3), (1, 1, 1, 1, 6), 1),
        ((2, 3), (3, 4, 5, 6), 6),
        ((2, 3), (2, 1, 1, 5, 1), 6),
    ],
)
def test_leading_dimensions_are_one_batch_and_masks_stay_as_small_as_they_are(lead, mask, rows):
    seen = []

    def spy(query, key, value, mask=None, bias=None):
        seen.append((query.shape, mask.shape, bias.shape))
        return query

    attention_fn = make_attention_fn(attention=spy)
    out = _shapes(attention_fn, lead, mask=np.ones(mask, np.int32), bias=jnp.ones(mask))
    heads, q_len, kv_len = ((1,) * 3 + mask)[-3:]
    assert out.shape == (*lead, 5, 4, 3)
    assert seen == [
        ((int(np.prod(lead)), 5, 4, 3), (rows, heads, 5, 6), (rows, heads, q_len, kv_len))
    ]


def test_bias_and_mask_of_several_leading_dimensions_equal_those_of_flax():
    draw = np.random.default_rng(0)
    q, k, v = (jnp.asarray(draw.standard_normal((2, 3, n, 4, 3)), jnp.float32) for n in (5, 6, 6))
    bias = jnp.asarray(draw.standard_normal((2, 1, 4, 5, 6)), jnp.float32)
    mask = draw.integers(0, 2, (3, 1, 5, 6)) * 7
    mask[..., 0] = -1
    options = {"bias": bias, "mask": mask}
    functions = dense(make_mesh(2, 2)), nn.dot_product_attention
    _close(*jax.jit(lambda *qkv: [f(*qkv, **options) for f in functions])(q, k, v))


@pytest.mark.parametrize("flax", [nn.dot_product_attention, nnx.dot_product_attention])
def test_every_keyword_of_flax_is_named(flax):
    ours = inspect.signature(make_attention_fn()).parameters
    theirs = inspect.signature(flax).parameters
    assert set(theirs) <= set(ours)
    assert list(theirs)[:12] == list(ours)[:12]
    assert all(p.kind == p.POSITIONAL_OR_KEYWORD for p in ours.values())


def test_every_fixed_option_of_the_layer_can_be_given():
    per_call = {"q", "k", "v", "mask", "bias", "return_lse", "broadcast_dropout"}
    per_call |= {"dropout_rate", "dropout_rng"}
    layer = inspect.signature(ulysses_attention).parameters
    assert set(inspect.signature(make_attention_fn).parameters) == set(layer) - per_call


def test_precision_reaches_products_that_leave_it_open():
    seen = []

    def spy(query, key, value):
        seen.append(jax.config.jax_default_matmul_precision)
        return query

    attention_fn = make_attention_fn(attention=spy)
    for precision in (None, "high", jax.lax.Precision.HIGHEST, ("default", "default")):
        _shapes(attention_fn, (1,), precision=precision)
    assert seen == [None, "high", "highest", "default"]
    with pytest.raises(ValueError, match="use one precision"):
        _shapes(attention_fn, (1,), precision=("high", "highest"))


def test_promote_dtype_is_that_of_the_caller():
    def to_bfloat16(qkv, *, dtype):
        return tuple(x.astype(dtype or jnp.bfloat16) for x in qkv)

    attention_fn = make_attention_fn()
    assert _shapes(attention_fn, (1,), promote_dtype=to_bfloat16).dtype == jnp.bfloat16
    assert _shapes(attention_fn, (1,), dtype=jnp.float16).dtype == jnp.float16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"module": object()}, "sow_weights=True asks for the attention weights"),
        ({"einsum_dot_general": jax.lax.dot_general}, "einsum_dot_general is <function"),
        ({"qk_attn_weights_einsum": jnp.einsum}, "qk_attn_weights_einsum is <function"),
        ({"attn_weights_value_einsum": jnp.einsum}, "attn_weights_value_einsum is <function"),
        ({"dropout_rate": 0.1}, "dropout_rng is None"),
        ({"mask": np.ones((3, 1, 5, 6))}, r"mask \[3, 1, 5, 6\] does not broadcast"),
        ({"mask": np.ones((1, 1, 1, 1, 6))}, "does not broadcast to the leading dimensions"),
        ({"bias": np.ones((2, 3, 5, 6), np.float32)}, "has 3 heads, but this call has 4"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        _shapes(make_attention_fn(), (2,), **options)


def test_modules_that_sow_their_weights_are_refused(linen_params):
    attention_fn = make_attention_fn()
    with pytest.raises(ValueError, match="sow_weights"):
        _linen(attention_fn).apply(linen_params, X, sow_weights=True)
    with pytest.raises(ValueError, match="sow_weights"):
        _nnx(attention_fn)(X, sow_weights=True)


def test_a_window_is_refused_where_the_position_is_not_known():
    attention_fn = make_attention_fn(window=(2, 0))
    q, k = jnp.zeros((2, 1, 4, 3)), jnp.zeros((2, 6, 4, 3))
    with pytest.raises(ValueError, match=r"window=.* in a step of decoding"):
        attention_fn(q, k, k, mask=jnp.ones((2, 1, 1, 6)))


def test_arrays_that_do_not_fit_are_refused_with_their_shapes():
    attention_fn = make_attention_fn()
    with pytest.raises(ValueError, match=r"query \[3, 4\], key \[3, 4\]"):
        attention_fn(*(jnp.zeros((3, 4)),) * 3)
    q, k = jnp.zeros((2, 3, 4, 5)), jnp.zeros((1, 3, 4, 5))
    with pytest.raises(ValueError, match="the same leading dimensions"):
        attention_fn(q, k, k)
