"""cuDNN attention: what it refuses, and what is done around its two kernels.

The kernels themselves need a GPU. Here dense ones stand for them that know what cuDNN documents of
masks and lengths, and write NaN where it promises nothing.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ulysses_jax.attention import cudnn, limits
from ulysses_jax.attention.dropout import Dropout
from ulysses_jax.attention.spec import AttentionSpec

Run = Callable[..., dict[str, np.ndarray]]
Check = Callable[..., None]
SIZES = (3, 23, 23, 6, 2, 8)
LENGTHS = np.array([0, 7, 23], np.int32)
IDS = np.zeros((3, 23), np.int32)
TOLERANCE = 2 * float(jnp.finfo(jnp.bfloat16).eps)


def _scores(q: Any, k: Any, kv_lengths: Any, options: dict[str, Any]) -> jax.Array:
    """[B, h, S, T], -inf where cuDNN's masks rule a pair out."""
    assert options["sliding_window_length"] is None or options["mask_type"].name == "CAUSAL"
    k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    distance = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])
    pairs = jnp.full((q.shape[0], 1, *distance.shape), True)
    if "CAUSAL" in options["mask_type"].name:
        pairs &= distance >= 0
        pairs &= distance < (options["sliding_window_length"] or k.shape[1])
    if "PADDING" in options["mask_type"].name:
        pairs &= (jnp.arange(k.shape[1]) < kv_lengths[:, None])[:, None, None]
        # What it does for a length of 0 is not documented.
        q = jnp.where(kv_lengths[:, None, None, None] > 0, q, jnp.nan)
        k = jnp.where(kv_lengths[:, None, None, None] > 0, k, jnp.nan)
    scores = options["scale"] * jnp.einsum("bshd,bthd->bhst", *(x.astype(float) for x in (q, k)))
    return jnp.where(pairs | jnp.isnan(scores), scores, -jnp.inf)


def _forward(q: Any, k: Any, v: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
    assert options.pop("return_residual")
    scores = _scores(q, k, options.pop("kv_seqlen", None), options)
    v = jnp.repeat(v, q.shape[2] // v.shape[2], axis=2).astype(float)
    out = jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores), v)
    return out.astype(q.dtype), jax.nn.logsumexp(scores, axis=-1)


def _backward(q: Any, k: Any, v: Any, *rest: Any, **options: Any) -> tuple[jax.Array, ...]:
    _, _, kv_lengths, *_, lse, out, dout = rest
    group = q.shape[2] // k.shape[2]
    weights = jnp.exp(_scores(q, k, kv_lengths, options) - lse[..., None])
    whole = [jnp.repeat(x, group, axis=2).astype(float) for x in (k, v)]
    dout, out = dout.astype(float), out.astype(float)
    dweights = jnp.einsum("bshd,bthd->bhst", dout, whole[1])
    delta = jnp.einsum("bshd,bshd->bhs", dout, out)[..., None]
    dscores = options["scale"] * weights * (dweights - delta)
    dq = jnp.einsum("bhst,bthd->bshd", dscores, whole[0])
    dk = jnp.einsum("bhst,bshd->bthd", dscores, q.astype(float))
    dv = jnp.einsum("bhst,bshd->bthd", weights, dout)
    dk, dv = (x.reshape(*k.shape[:3], group, -1).sum(3) for x in (dk, dv))
    if "PADDING" in options["mask_type"].name:
        past = (jnp.arange(k.shape[1]) >= kv_lengths[:, None])[..., None, None]
        dk, dv = jnp.where(past, jnp.nan, dk), jnp.where(past, jnp.nan, dv)
    return tuple(x.astype(q.dtype) for x in (dq, dk, dv))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn.kernels, "cuda_versions", SimpleNamespace())
    monkeypatch.setattr(cudnn.kernels, "dot_product_attention", _forward)
    backward = SimpleNamespace(bind=_backward)
    monkeypatch.setattr(cudnn.kernels, "_dot_product_attention_bwd_p_wrapper", backward)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(),
        AttentionSpec(causal=True, window=(4, None)),
        AttentionSpec(window=(4, 0)),
        AttentionSpec(causal=True, window=(2**31 - 1, 7)),
        AttentionSpec(kv_lengths=LENGTHS),
        AttentionSpec(causal=True, kv_lengths=LENGTHS),
    ],
    ids=["all", "causal window", "window", "wide causal window", "lengths", "causal lengths"],
)
def test_results_and_gradients_equal_the_definition(
    differentiated: Callable[..., Run],
    definition: Run,
    assert_equal: Check,
    cases: dict[str, Any],
    spec: AttentionSpec,
) -> None:
    arrays = cases["causal"]._replace(sizes=SIZES, spec=spec).arrays()
    rounded = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), arrays)
    arrays = rounded._replace(dlse=rounded.dlse.astype(jnp.float32))
    actual = jax.jit(lambda arrays: differentiated(cudnn.attend)(arrays, spec))(arrays)
    expected = definition(arrays, spec)
    assert_equal({"lse": actual.pop("lse")}, {"lse": expected.pop("lse")}, 1e-5)
    assert_equal(actual, expected, TOLERANCE)


@pytest.mark.usefixtures("installed")
def test_a_row_without_keys_passes_nothing_on_whatever_its_scores_and_cotangents(
    differentiated: Callable[..., Run], cases: dict[str, Any]
) -> None:
    spec = AttentionSpec(kv_lengths=LENGTHS)
    arrays = cases["causal"]._replace(sizes=SIZES, spec=spec).arrays()
    arrays.q[0] *= 100
    arrays.k[0] *= 100
    arrays.dout[0], arrays.dlse[0] = np.nan, np.nan
    rounded = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), arrays)
    arrays = rounded._replace(dlse=rounded.dlse.astype(jnp.float32))
    results = jax.jit(differentiated(cudnn.attend))(arrays, spec)
    assert (results.pop("lse")[0] == -np.inf).all()
    for name, x in results.items():
        assert not x[0].any(), name
        assert jnp.isfinite(x).all(), name


def _attend(spec: AttentionSpec, sizes: tuple[int, ...] = SIZES, dtype: Any = "bfloat16") -> None:
    batch, q_len, kv_len, heads, kv_heads, dim = sizes
    q = jnp.zeros((batch, q_len, heads, dim), dtype)
    k = jnp.zeros((batch, kv_len, kv_heads, dim), dtype)
    jax.eval_shape(lambda *qkv: cudnn.attend(*qkv, spec, 1.0), q, k, k)


PAIR = (1, 1, 1, 1)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (AttentionSpec(q_segment_ids=IDS), "cannot keep segments apart"),
        (AttentionSpec(window=(3, 2)), "no window to the right .* such as 2"),
        (AttentionSpec(window=(3, None)), "left window, such as 3, only where no later key"),
        (AttentionSpec(window=(np.array(3), 0)), "AttentionSpec.window is traced"),
        (AttentionSpec(True, window=(3, 0), kv_lengths=LENGTHS), "not both"),
        (AttentionSpec(mask=np.ones(PAIR, bool)), "cannot apply AttentionSpec.mask"),
        (AttentionSpec(bias=np.ones(PAIR, np.float32)), "cannot apply AttentionSpec.bias"),
        (
            AttentionSpec(dropout=Dropout(rate=0.5, key=np.zeros(2, np.uint32))),
            "cannot apply AttentionSpec.dropout",
        ),
    ],
)
def test_what_cudnn_cannot_do_is_refused_with_the_reason(spec: AttentionSpec, message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        _attend(spec)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("sizes", "dtype", "message"),
    [
        (SIZES, "float32", "bfloat16 or float16, not float32, float32, float32"),
        ((1, 4, 4, 1, 1, 12), "bfloat16", "multiple of 8 up to 128, not 12"),
        ((1, 4, 4, 1, 1, 136), "bfloat16", "multiple of 8 up to 128, not 136"),
        ((1, 5, 4, 1, 1, 8), "bfloat16", "as many queries as keys only, not 5 and 4"),
    ],
)
def test_arrays_that_cudnn_cannot_take_are_refused(
    sizes: tuple[int, ...], dtype: str, message: str
) -> None:
    with pytest.raises(NotImplementedError, match=message):
        _attend(AttentionSpec(causal=True), sizes, dtype)


@pytest.mark.usefixtures("installed")
def test_hopper_takes_head_dims_up_to_256(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "compute_capability", lambda: 9.0)
    _attend(AttentionSpec(), (1, 4, 4, 1, 1, 256))
    with pytest.raises(NotImplementedError, match="up to 256, not 264"):
        _attend(AttentionSpec(), (1, 4, 4, 1, 1, 264))


def test_without_cudnn_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn.kernels, "cuda_versions", None)
    with pytest.raises(NotImplementedError, match=r"pip install 'ulysses_jax\[cuda12\]'"):
        _attend(AttentionSpec())


def test_a_gpu_that_is_not_nvidias_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    amd = SimpleNamespace(compute_capability="gfx942")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [amd])
    with pytest.raises(NotImplementedError, match="NVIDIA GPUs, not for gfx942"):
        limits.compute_capability()


def test_a_gpu_before_ampere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    volta = SimpleNamespace(compute_capability="7.0")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [volta])
    with pytest.raises(NotImplementedError, match=r"compute capability 8\.0 \(Ampere\), not 7\.0"):
        _attend(AttentionSpec())
