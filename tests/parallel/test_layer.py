"""Where the layer runs, what it moves, where its result lies, and what it says and refuses."""

import contextlib
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from ulysses_jax import (
    AttentionSpec,
    BlockLayout,
    attention_function,
    exchanged_attention,
    make_mesh,
    ulysses_attention,
)
from ulysses_jax.attention.announce import announce
from ulysses_jax.parallel.collectives import collectives

TOKENS = PartitionSpec("data", "seq")
reference_attention = partial(ulysses_attention, attention="reference")


@pytest.fixture
def said(capsys):
    """What was said on stderr since; what other tests were told counts as unsaid."""
    announce.cache_clear()
    return lambda: capsys.readouterr().err


def _placed(qkv, mesh, spec=TOKENS):
    return jax.device_put(qkv, NamedSharding(mesh, spec))


def _kinds(function, *arguments):
    """The kind of each collective of the compiled program."""
    program = jax.jit(function).lower(*arguments).compile().as_text()
    return [collective.kind for collective in collectives(program)]


@pytest.mark.parametrize("wrapped", [jax.jit, lambda function: function])
@pytest.mark.parametrize("source", ["given", "set", "set, Explicit", "of the array", "none"])
def test_mesh_is_given_set_or_that_of_the_array(arrays, make_axes, definition, wrapped, source):
    given = arrays(2, 8, 8, 4, 2, 3)
    qkv = given[:3]
    # In a jitted function only the types of Explicit axes say where an array lies.
    explicit = source == "set, Explicit" or (source == "of the array" and wrapped is jax.jit)
    mesh = make_axes(AxisType.Explicit if explicit else AxisType.Auto, data=2, seq=4)
    attend = wrapped(partial(reference_attention, mesh=mesh if source == "given" else None))
    if source == "of the array":
        qkv = _placed(qkv, mesh)
    with jax.set_mesh(mesh) if source.startswith("set") else contextlib.nullcontext():
        out = attend(*qkv)
    np.testing.assert_allclose(out, definition(given)["out"], rtol=0, atol=1e-5)
    if source == "none":
        assert len(out.sharding.device_set) == 1
    else:
        assert out.sharding.is_equivalent_to(NamedSharding(mesh, TOKENS), 4)


@pytest.mark.parametrize("mesh", [None, make_mesh(2, 1), make_mesh(1, 1)])
def test_nothing_is_exchanged_where_one_device_has_the_sequence(arrays, mesh):
    attend = partial(reference_attention, mesh=mesh, is_causal=True, chunks=2, exchange="auto")
    assert _kinds(attend, *arrays(2, 8, 8, 4, 2, 3)[:3]) == []


@pytest.mark.parametrize(
    "manual", [("data", "seq", "tensor"), ("data",), ("seq",), ("data", "tensor"), ("data", "seq")]
)
def test_manual_region_has_parts_of_tokens_and_whole_descriptions(
    arrays, make_axes, gradients_of, definition, assert_equal, manual
):
    """Rows, heads and tokens of manual axes are local; rules are of local rows and all tokens."""
    mesh = make_axes(data=2, seq=2, tensor=2)
    rows, seq, heads = (axis if axis in manual else None for axis in ("data", "seq", "tensor"))
    tokens, pairs = PartitionSpec(rows, seq, heads), PartitionSpec(None, heads)

    def attend(q, k, v, bias, key, ids, lengths, **keywords):
        def region(q, k, v, bias, key, ids, lengths):
            return reference_attention(
                q, k, v, head_axes="tensor", q_segment_ids=ids, kv_lengths=lengths,
                bias=bias, dropout_rate=0.4, dropout_rng=key, **keywords,
            )  # fmt: skip

        of_rows = PartitionSpec(rows)
        inside = jax.shard_map(
            region,
            mesh=mesh,
            in_specs=(*[tokens] * 3, pairs, PartitionSpec(), of_rows, of_rows),
            out_specs=(tokens, PartitionSpec(rows, heads, seq)),
            axis_names=set(manual),
        )
        return inside(q, k, v, bias, key, ids, lengths)

    given = arrays(4, 6, 6, 8, 4, 2)
    bias = np.linspace(-2, 2, 8 * 6 * 6, dtype=np.float32).reshape(1, 8, 6, 6)
    ids = np.array([[1, 1, 1, 0, 0, 1], [2, 2, 2, 2, 2, 2]] * 2, np.int32)
    lengths = np.array([6, 3, 2, 6], np.int32)
    found = gradients_of(
        attend, given, bias=bias, key=jax.random.key(5), ids=ids, lengths=lengths,
        is_causal=True, return_lse=True,
    )  # fmt: skip
    expected = definition(
        given, bias=bias, q_segment_ids=ids, kv_lengths=lengths, is_causal=True,
        dropout_rate=0.4, dropout_seed=5,
    )  # fmt: skip
    assert_equal(found, expected)


@pytest.mark.parametrize("manual", [("data", "seq"), ("data",), ("seq",)])
def test_function_of_the_users_own_has_its_gradients_in_a_manual_region(
    arrays, gradients_of, definition, assert_equal, manual
):
    tokens = PartitionSpec(*(axis if axis in manual else None for axis in ("data", "seq")))
    region = jax.shard_map(
        partial(ulysses_attention, attention=jax.nn.dot_product_attention, is_causal=True),
        mesh=make_mesh(2, 2),
        in_specs=tokens,
        out_specs=tokens,
        axis_names=set(manual),
    )
    given = arrays(2, 4, 4, 2, 2, 3)
    given = given._replace(dlse=0 * given.dlse)
    expected = definition(given, is_causal=True)
    del expected["lse"]
    assert_equal(gradients_of(region, given), expected)


@pytest.mark.parametrize("axes", [("inner", "outer"), ("outer", "inner")])
def test_axes_around_the_call_cut_before_its_own_in_whatever_order_they_are_named(
    arrays, make_axes, definition, axes
):
    """Two axes of one role, of which one is manual around the call: layouts and dropout count."""
    mesh = make_axes(inner=2, seq=2, outer=2)
    table = BlockLayout(2, 2, np.random.default_rng(0).random((12, 3, 3)) < 0.6)
    what = {"block_layout": table, "dropout_rate": 0.4}

    def region(q, k, v, spec, **roles):
        inside = jax.shard_map(
            partial(reference_attention, dropout_rng=jax.random.key(5), **roles, **what),
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
            axis_names={"outer"},
        )
        return jax.jit(inside)(q, k, v)

    given = arrays(4, 6, 6, 12, 12, 2)
    expected = definition(given, dropout_seed=5, **what)["out"]
    for spec, roles in [
        (PartitionSpec(None, None, "outer"), {"head_axes": axes}),
        (PartitionSpec("outer"), {"batch_axes": axes}),
    ]:
        found = region(*given[:3], spec, **roles)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5, err_msg=str(roles))


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (6, 3), (12, 3), (5, 5)])
def test_head_axes_may_divide_queries_keys_both_or_none(
    arrays, make_axes, gradients_of, definition, assert_equal, said, heads, kv_heads
):
    given = arrays(2, 5, 5, heads, kv_heads, 2)
    attend = partial(reference_attention, mesh=make_axes(data=2, tensor=2, seq=2))
    bias = np.arange(heads * 5, dtype=np.float32).reshape(1, heads, 1, 5) % 3
    table = np.arange(heads * 9).reshape(heads, 3, 3) % 4 > 0
    what = {"bias": bias, "block_layout": BlockLayout(2, 2, table)}
    found = gradients_of(attend, given, head_axes="tensor", return_lse=True, **what)
    assert_equal(found, definition(given, **what))
    line = "the 2 parts of axis 'tensor' do not divide 5 query heads and all compute the same"
    assert (line in said()) == (heads == 5)


@pytest.mark.parametrize("batch", [1, 3])
def test_batch_that_the_data_axis_does_not_divide_is_exact_and_said(
    arrays, definition, said, batch
):
    given = arrays(batch, 4, 4, 2, 2, 3)
    out = jax.jit(partial(reference_attention, mesh=make_mesh(2, 2)))(*given[:3])
    np.testing.assert_allclose(out, definition(given)["out"], rtol=0, atol=1e-5)
    line = f"the 2 parts of axis 'data' do not divide {batch} batch rows and all compute the same"
    assert line in said()


def test_axis_that_is_not_named_is_said_to_compute_the_same(arrays, make_axes, said):
    mesh = make_axes(seq=2, pipeline=3)
    jax.eval_shape(partial(reference_attention, mesh=mesh), *arrays(1, 4, 4, 2, 2, 3)[:3])
    assert "the 3 parts of axis 'pipeline' all compute the same" in said()


def test_nothing_is_gathered_where_arrays_lie_as_the_layer_has_them(arrays, make_axes):
    mesh = make_axes(data=2, tensor=2, seq=2)
    tokens = PartitionSpec("data", "seq", "tensor")
    given = arrays(2, 8, 8, 4, 4, 3)
    q, k, v, dout = _placed((*given[:3], given.dout), mesh, tokens)
    bias = _placed(np.ones((1, 4, 8, 8), np.float32), mesh, PartitionSpec(None, "tensor"))
    ids = _placed(np.ones((2, 8), np.int32), mesh, PartitionSpec("data"))
    attend = partial(reference_attention, mesh=mesh, head_axes="tensor")

    def call(q, k, v, bias, ids, dout):
        out, vjp = jax.vjp(partial(attend, bias=bias, q_segment_ids=ids), q, k, v)
        return out, *vjp(dout)

    results = jax.jit(call)(q, k, v, bias, ids, dout)
    # One exchange for q, k and v together and one back, in each direction.
    assert _kinds(call, q, k, v, bias, ids, dout) == ["all-to-all"] * 4
    for x in results:
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, tokens), 4)


def test_log_sum_exp_lies_as_its_queries_do(arrays, make_axes):
    mesh = make_axes(data=2, tensor=2, seq=2)
    attend = partial(reference_attention, mesh=mesh, head_axes="tensor", return_lse=True)
    _, lse = attend(*arrays(2, 8, 8, 4, 4, 3)[:3])
    where = NamedSharding(mesh, PartitionSpec("data", "tensor", "seq"))
    assert lse.dtype == jnp.float32
    assert lse.sharding.is_equivalent_to(where, 3)


def test_halo_moves_its_keys_to_the_neighbours_alone(arrays, said):
    mesh = make_mesh(1, 4)
    qkv = _placed(arrays(1, 32, 32, 4, 4, 3)[:3], mesh)
    attend = partial(reference_attention, mesh=mesh, window=(2, 1))
    assert _kinds(attend, *qkv) == ["collective-permute"] * 2
    assert "exchange: auto fetches 2 keys before and 1 after each part of 8 tokens" in said()


@pytest.mark.parametrize("source", ["given", "set"])
@pytest.mark.parametrize("name", ["q", "kv_lengths"])
def test_array_on_other_devices_is_refused_by_name(arrays, source, name):
    mesh = make_mesh(1, 4)
    given = dict(zip("qkv", arrays(1, 4, 4, 2, 2, 3), strict=False))
    given["kv_lengths"] = np.array([3], np.int32)
    given[name] = jax.device_put(given[name], jax.devices()[6])
    message = rf"{name} was put on .*6.*, but the mesh has 4 devices: use jax.device_put\({name}, "
    around = jax.set_mesh(mesh) if source == "set" else contextlib.nullcontext()
    with around, pytest.raises(ValueError, match=message):
        reference_attention(**given, mesh=mesh if source == "given" else None)


@pytest.mark.parametrize("shape", [(1, 1), (2, 4), (1, 3), None])
def test_which_weights_are_dropped_depends_on_no_mesh(arrays, definition, shape):
    given = arrays(2, 7, 7, 4, 2, 3)
    attend = partial(reference_attention, mesh=None if shape is None else make_mesh(*shape))
    out = jax.jit(partial(attend, dropout_rate=0.5, dropout_rng=jax.random.key(8)))(*given[:3])
    expected = definition(given, dropout_rate=0.5, dropout_seed=8)["out"]
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)


def test_function_of_the_users_own_is_given_whole_sequences_and_its_heads(arrays, definition):
    seen = []

    def attention(query, key, value, *, is_causal=False, scale=1.0):
        seen.append((query.shape, key.shape, value.shape, is_causal, scale))
        return jax.nn.dot_product_attention(query, key, value, is_causal=is_causal, scale=scale)

    given = arrays(2, 7, 9, 6, 3, 2)
    what = {"is_causal": True, "scale": 0.3}
    attend = partial(ulysses_attention, mesh=make_mesh(1, 3), attention=attention, **what)
    np.testing.assert_allclose(
        jax.jit(attend)(*given[:3]), definition(given, **what)["out"], rtol=0, atol=1e-5
    )
    assert set(seen) == {((2, 7, 2, 2), (2, 9, 1, 2), (2, 9, 1, 2), True, 0.3)}


class Scaled:
    """A user's attention with a parameter, which is no key of anything."""

    __hash__ = None

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, query, key, value):
        return self.factor * jax.nn.dot_product_attention(query, key, value)


def test_object_of_the_users_own_is_seen_as_it_is_now_and_has_its_gradient(arrays):
    q, k, v, *_ = arrays(1, 4, 4, 2, 2, 3)
    attention = Scaled(1.0)
    attend = partial(ulysses_attention, q, k, v, make_mesh(1, 2), attention=attention)
    once = attend()

    def total(factor):
        attention.factor = factor
        return attend().sum()

    np.testing.assert_allclose(jax.grad(total)(2.0), once.sum(), rtol=1e-5)
    attention.factor = 2.0
    np.testing.assert_allclose(attend(), 2 * once, rtol=1e-5)


def test_auto_exchanges_heads_where_the_function_can_do_no_halo(arrays, definition, said):
    def attention(query, key, value, *, is_causal=False, local_window_size=None):
        return jax.nn.dot_product_attention(
            query, key, value, is_causal=is_causal, local_window_size=local_window_size
        )

    given, what = arrays(1, 8, 8, 4, 4, 2), {"is_causal": True, "window": (2, None)}
    attend = partial(ulysses_attention, mesh=make_mesh(1, 4), attention=attention, **what)
    np.testing.assert_allclose(
        attend(*given[:3]), definition(given, **what)["out"], rtol=0, atol=1e-5
    )
    assert "exchange: auto takes all-to-alls, for with a halo attention attention" in said()
    with pytest.raises(NotImplementedError, match="does not take the keyword"):
        attend(*given[:3], exchange="halo")


def test_a_call_that_no_mesh_splits_is_said(arrays, said):
    jax.eval_shape(reference_attention, *arrays(1, 4, 4, 2, 2, 3)[:3])
    assert said() == "attention: no mesh is set, so nothing is split\n"


def test_an_array_on_a_mesh_without_the_sequence_axis_is_refused(arrays, make_axes):
    q, k, v = _placed(arrays(2, 4, 4, 2, 2, 3)[:3], make_axes(data=2, sp=2), PartitionSpec("data"))
    with pytest.raises(ValueError, match="but none called 'seq'"):
        reference_attention(q, k, v)


def test_numpy_rates_are_rates(arrays):
    qkv = arrays(1, 4, 4, 2, 2, 3)[:3]
    plain = reference_attention(*qkv, dropout_rate=np.float32(0))
    np.testing.assert_array_equal(plain, reference_attention(*qkv))
    key = jax.random.key(0)
    dropped = [
        reference_attention(*qkv, dropout_rate=rate, dropout_rng=key)
        for rate in (0.5, np.float32(0.5))
    ]
    np.testing.assert_array_equal(*dropped)


def test_plan_is_said_once_and_only_where_heads_are_not_dealt_out_plainly(arrays, said):
    attend = partial(reference_attention, mesh=make_mesh(1, 4))
    jax.eval_shape(attend, *arrays(1, 4, 4, 8, 4, 2)[:3])
    assert said() == ""
    for length in (4, 5):
        jax.eval_shape(attend, *arrays(1, length, length, 6, 2, 2)[:3])
    plan = "exchange: 6 query and 2 key/value heads on 4 devices: 2 and 1 a device; "
    assert said().count(plan) == 1


@pytest.mark.parametrize(("heads", "waste"), [(6, None), (5, "1.60"), (3, "2.67")])
def test_waste_above_one_and_a_half_is_warned(arrays, recwarn, heads, waste):
    ways = 8 if heads == 3 else 4
    attend = partial(reference_attention, mesh=make_mesh(1, ways))
    jax.eval_shape(attend, *arrays(1, 4, 4, heads, heads, 2)[:3])
    messages = [str(warning.message) for warning in recwarn]
    if waste is None:
        assert messages == []
    else:
        (message,) = messages
        assert f"compute {waste} × the attention of the model" in message


TABLE = BlockLayout(6, 6, np.ones((1, 1, 1), bool))


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"seq_axis": "sp"}, "has the axes ('data', 'seq'), but none called 'sp'"),
        ({"batch_axes": "rows"}, "but none called 'rows'"),
        ({"batch_axes": ("data", "seq")}, "axis 'seq' is named 2 times"),
        ({"head_axes": "data"}, "axis 'data' is named 2 times"),
        ({"exchange": "ring"}, "no exchange called 'ring': choose one of auto, all_to_all, halo"),
        ({"chunks": 0}, "chunks is 0: use an integer of at least 1"),
        ({"chunks": True}, "chunks is True"),
        ({"chunks": 3}, "chunks = 3 does not divide the 2 query heads that a device computes"),
        ({"chunks": 2, "exchange": "halo"}, "chunks = 2 splits the heads of an all-to-all"),
        ({"exchange": "halo"}, "static size, but the window has no limit on the left"),
        ({"exchange": "halo", "window": (2, None)}, "the window has no limit on the right"),
        (
            {"exchange": "halo", "window": (2, 1), "block_layout": TABLE},
            "but a block layout",
        ),
        ({"scale": None}, "but it is compiled in: give a Python number"),
        ({"dropout_rate": 0.5}, "dropout_rate is 0.5, but dropout_rng is None: give a key"),
        ({"dropout_rate": 1.0, "dropout_rng": 0}, "the dropout rate is 1.0"),
        ({"dropout_rate": 0.1, "dropout_rng": 0}, "the dropout key is 0"),
        (
            {"return_lse": True, "attention": jax.nn.dot_product_attention},
            "a function of your own gives no log-sum-exp that has a gradient",
        ),
        ({"attention": "flash"}, "there is no attention called 'flash'"),
        ({"mask": np.ones((2, 3, 6, 6), bool)}, "has 3 heads, but this call has 8"),
        ({"bias": np.ones((2, 8, 3, 6), np.float32)}, "has 3 queries, but this call has 6"),
        ({"mask": np.ones((1, 1, 6, 6))}, "mask is float64[1, 1, 6, 6]"),
        ({"kv_lengths": np.ones(6, np.int32)}, "needs integers of shape [2]"),
        ({"q_segment_ids": np.ones((2, 3), np.int32)}, "needs integers of shape [2, 6]"),
        ({"window": (-1, 0)}, "the left side of window is -1"),
        ({"is_causal": 1}, "causal is 1, but it is static"),
        ({"mesh": "seq"}, "mesh is 'seq': use a jax.sharding.Mesh"),
    ],
)
def test_mistake_is_refused_with_its_value_and_fix(arrays, keywords, message):
    def call(q, k, v, traced):
        known = {"mesh": make_mesh(1, 4)} | keywords
        if "scale" in keywords:
            known["scale"] = traced
        return ulysses_attention(q, k, v, **known)

    with pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(call, *arrays(2, 6, 6, 8, 4, 2)[:3], 0.5)


@pytest.mark.parametrize(
    ("kv_len", "keywords", "message"),
    [
        (7, {}, "there are 6 queries but 7 keys"),
        (6, {"window": ("traced", 0)}, "the left side of the window is traced"),
        (6, {"dropout_rate": 0.5, "dropout_rng": "key"}, "dropout counts from the start"),
    ],
)
def test_halo_is_refused_with_the_reason(arrays, kv_len, keywords, message):
    def call(q, k, v, traced):
        known = {"window": (2, 0)} | keywords
        known = jax.tree.map(lambda x: traced.get(x, x) if isinstance(x, str) else x, known)
        return ulysses_attention(q, k, v, mesh=make_mesh(1, 4), exchange="halo", **known)

    traced = {"traced": 2, "key": jax.random.key(0)}
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(call, *arrays(2, 6, kv_len, 8, 4, 2)[:3], traced)


def test_mesh_that_is_not_the_one_set_is_refused(arrays):
    q, k, v, *_ = arrays(1, 4, 4, 2, 2, 3)
    message = "the mesh given has the axes {'data': 1, 'seq': 2}, but the one set here has"
    with jax.set_mesh(make_mesh(2, 2)), pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(partial(reference_attention, mesh=make_mesh(1, 2)), q, k, v)


def test_mesh_of_other_devices_or_axis_types_than_the_one_set_is_refused(arrays, make_axes):
    q, k, v, *_ = arrays(1, 4, 4, 2, 2, 3)
    elsewhere = make_mesh(1, 2, jax.devices()[2:4])
    with jax.set_mesh(make_axes(data=1, seq=2)), pytest.raises(ValueError, match="devices"):
        reference_attention(q, k, v, mesh=elsewhere)
    explicit = jax.set_mesh(make_axes(AxisType.Explicit, data=1, seq=2))
    with explicit, pytest.raises(ValueError, match="the mesh given has the axis types"):
        reference_attention(q, k, v, mesh=make_axes(data=1, seq=2))


def test_regions_own_attention_checks_its_exchange_too():
    spec, local = AttentionSpec(), attention_function("reference")

    def region(q):
        return exchanged_attention(
            q, q, q, spec, local=local, axis="seq", scale=1.0, exchange="ring"
        )

    rows = PartitionSpec(None, "seq")
    mapped = jax.shard_map(region, mesh=make_mesh(1, 2), in_specs=rows, out_specs=rows)
    with pytest.raises(ValueError, match="there is no exchange called 'ring'"):
        jax.eval_shape(mapped, jnp.ones((1, 4, 2, 3)))


def test_shapes_are_known_for_devices_that_are_elsewhere():
    mesh = AbstractMesh((16, 16), ("data", "seq"))
    q = jax.ShapeDtypeStruct((16, 1024, 32, 8), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((16, 1024, 4, 8), jnp.bfloat16)
    attend = partial(reference_attention, mesh=mesh, return_lse=True)
    out, lse = jax.eval_shape(attend, q, kv, kv)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert (lse.shape, lse.dtype) == ((16, 32, 1024), jnp.float32)
