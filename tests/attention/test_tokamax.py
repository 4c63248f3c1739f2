"""tokamax attention: its Triton kernels, interpreted on the CPU, and what surrounds Mosaic's.

Skipped without the `tokamax` extra. Mosaic's kernels run on Hopper only: in their place stand
tokamax's own reference and its gradient, which take the same ranges.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from jax.experimental import pallas as pl

from ulysses_jax.attention.spec import AttentionSpec

pytest.importorskip("tokamax")
from tokamax._src.ops.attention import base

from ulysses_jax.attention import tokamax

Run = Callable[..., dict[str, np.ndarray]]
Check = Callable[..., None]
IDS = np.stack([np.repeat([4, 1, 9], [20, 30, 21]), np.repeat([7, 0], [1, 70])]).astype(np.int32)
LENGTHS = np.array([0, 50], np.int32)
MASK = np.ones((1, 1, 1, 1), bool)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interprets kernels, and reads their place in the grid before any branch, as that needs."""
    call, program_id = pl.pallas_call, pl.program_id

    def pallas_call(kernel: Any, *args: Any, grid_spec: Any, **kwargs: Any) -> Any:
        def read_first(*refs: Any) -> None:
            places = [program_id(axis) for axis in range(len(grid_spec.grid))]

            def known(axis: int) -> Any:
                if axis >= len(places):
                    raise ValueError(axis)
                return places[axis]

            with mock.patch.object(pl, "program_id", known):
                kernel(*refs)

        del kwargs["compiler_params"]
        return call(read_first, *args, grid_spec=grid_spec, interpret=True, **kwargs)

    monkeypatch.setattr(pl, "pallas_call", pallas_call)


def _gradients(
    residuals: Any, out: Any, dout: Any, q: Any, k: Any, v: Any, *, mask: Any, **options: Any
) -> dict[str, jax.Array]:
    """What Mosaic computes, in float32, from the maximum and total of each query."""
    highest, total = residuals
    group = q.shape[2] // k.shape[2]
    q, out, dout = (x.astype(float) for x in (q, out, dout))
    k, v = (jnp.repeat(x.astype(float), group, axis=2) for x in (k, v))
    scores = options["logits_scale"] * jnp.einsum("bshd,bthd->bhst", q, k)
    pairs = mask.as_array(q.shape[1], k.shape[1])
    scores = scores if pairs is None else jnp.where(pairs, scores, jnp.finfo(float).min)
    weights = jnp.exp(scores - highest[..., None]) / total[..., None]
    delta = jnp.einsum("bshd,bshd->bhs", out, dout)[..., None]
    dscores = weights * (jnp.einsum("bshd,bthd->bhst", dout, v) - delta) * options["logits_scale"]
    dq = jnp.einsum("bhst,bthd->bshd", dscores, k)
    dk = jnp.einsum("bhst,bshd->bthd", dscores, q)
    dv = jnp.einsum("bhst,bshd->bthd", weights, dout)
    dk, dv = (x.reshape(*x.shape[:2], -1, group, x.shape[3]).sum(3) for x in (dk, dv))
    return {name: x.astype("bfloat16") for name, x in (("q", dq), ("k", dk), ("v", dv))}


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = base.DotProductAttention(vjp=_gradients)
    monkeypatch.setattr(tokamax, "compute_capability", lambda: 9.0)
    monkeypatch.setattr(tokamax._Kernel, "_op", lambda kernel: reference)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("sizes", "causal"),
    [
        ((2, 71, 71, 2, 1, 16), True),
        ((1, 71, 37, 2, 2, 8), False),
        ((1, 37, 71, 2, 1, 24), True),
        ((1, 71, 37, 2, 1, 8), True),
    ],
)
def test_triton_equals_the_definition_for_prime_lengths(
    differentiated: Callable[..., Run],
    definition: Run,
    assert_equal: Check,
    cases: dict[str, Any],
    sizes: tuple[int, ...],
    causal: bool,
) -> None:
    spec = AttentionSpec(causal=causal)
    arrays = cases["causal"]._replace(sizes=sizes, spec=spec).arrays()
    compute = jax.jit(differentiated(tokamax.attend))
    assert_equal(compute(arrays, spec), definition(arrays, spec), 1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("interpreted")
def test_triton_equals_the_definition_or_refuses_what_is_not_causality(
    differentiated: Callable[..., Run], definition: Run, assert_equal: Check, case: Any
) -> None:
    arrays, spec = case._replace(sizes=(*case.sizes[:5], 8)).arrays(), case.spec
    compute = jax.jit(differentiated(tokamax.attend))
    if case.features() - {"cross", "grouped"}:
        with pytest.raises(NotImplementedError):
            compute(arrays, spec)
    else:
        assert_equal(compute(arrays, spec), definition(arrays, spec), 1e-5)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("kv_len", "spec"),
    [
        (71, AttentionSpec()),
        (71, AttentionSpec(causal=True)),
        (71, AttentionSpec(causal=True, q_segment_ids=IDS, contiguous_segments=True)),
        (71, AttentionSpec(q_segment_ids=IDS, contiguous_segments=True, window=(9, 4))),
        (71, AttentionSpec(causal=True, kv_lengths=LENGTHS)),
        (71, AttentionSpec(causal=True, window=(5, None))),
        (37, AttentionSpec(causal=True)),
        (37, AttentionSpec(window=(3, 0))),
        (
            37,
            AttentionSpec(
                causal=True,
                q_segment_ids=IDS,
                kv_segment_ids=IDS[:, 20:57],
                contiguous_segments=True,
            ),
        ),
    ],
    ids=[
        "all",
        "causal",
        "causal segments",
        "segments in a window",
        "causal lengths",
        "causal window",
        "causal, fewer keys",
        "window, fewer keys",
        "causal segments, fewer keys",
    ],
)
def test_mosaic_gets_ranges_that_say_what_the_spec_says(
    differentiated: Callable[..., Run],
    definition: Run,
    assert_equal: Check,
    cases: dict[str, Any],
    kv_len: int,
    spec: AttentionSpec,
) -> None:
    arrays = cases["causal"]._replace(sizes=(2, 71, kv_len, 2, 1, 8), spec=spec).arrays()
    rounded = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), arrays)
    arrays = rounded._replace(dlse=rounded.dlse.astype(jnp.float32))
    actual = jax.jit(differentiated(tokamax.attend))(arrays, spec)
    expected = definition(arrays, spec)
    assert_equal({"lse": actual.pop("lse")}, {"lse": expected.pop("lse")}, 1e-5)
    assert_equal(actual, expected, 3 * float(jnp.finfo(jnp.bfloat16).eps))


def _attend(spec: AttentionSpec, dim: int = 16, dtype: str = "bfloat16") -> None:
    q = jnp.zeros((2, 71, 2, dim), dtype)
    jax.eval_shape(lambda q: tokamax.attend(q, q, q, spec, 1.0), q)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (AttentionSpec(q_segment_ids=IDS), "promise contiguous_segments=True"),
        (
            AttentionSpec(q_segment_ids=IDS, contiguous_segments=True),
            "a Hopper GPU and 16 bits, not compute capability None and bfloat16",
        ),
        (AttentionSpec(window=(2, 2)), "would build an S x S mask"),
        (AttentionSpec(kv_lengths=LENGTHS), "would build an S x S mask"),
        (AttentionSpec(mask=MASK), "cannot apply AttentionSpec.mask"),
    ],
)
def test_what_tokamax_cannot_do_is_refused_with_the_reason(
    spec: AttentionSpec, message: str
) -> None:
    with pytest.raises(NotImplementedError, match=message):
        _attend(spec)


def test_head_dims_and_dtypes_that_tokamax_cannot_take_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="multiple of 8 up to 128, not 12"):
        _attend(AttentionSpec(), dim=12)
    with pytest.raises(NotImplementedError, match="not float8_e5m2"):
        _attend(AttentionSpec(), dtype="float8_e5m2")


@pytest.mark.usefixtures("hopper")
def test_ranges_in_float32_are_refused_on_hopper_too() -> None:
    with pytest.raises(NotImplementedError, match=r"compute capability 9\.0 and float32"):
        _attend(AttentionSpec(window=(2, 2)), dtype="float32")


def test_tokamax_does_not_parse_our_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--train.steps", "3"])
    flags.FLAGS.unparse_flags()
    _attend(AttentionSpec(causal=True))
