"""A small model as a user might write it, right or with one mistake planted in it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from ulysses_jax import AttentionSpec, attention_function, exchanged_attention, make_mesh
from ulysses_jax.model.rotary import rotate
from ulysses_jax.verification.case import Case
from ulysses_jax.verification.runs import sharded_run, single_device_run
from ulysses_jax.verification.verify import verify_runs

ROWS, LENGTH, VOCAB, HEADS, HEAD_DIM = 4, 16, 11, 4, 2
SPLIT = PartitionSpec("data", "seq")
LOCAL = attention_function("reference")
SCALE = HEAD_DIM**-0.5


@jax.custom_vjp
def summed_again(w):
    """A weight whose gradient is summed here, although leaving the region sums it already."""
    return w


summed_again.defvjp(lambda w: (w, None), lambda _, g: (jax.lax.psum(g, "seq"),))


def _spec(inputs, dropped):
    return AttentionSpec(
        causal="causal" not in dropped,
        q_segment_ids=None if "segments" in dropped else inputs["segments"],
        kv_lengths=None if "lengths" in dropped else inputs["lengths"],
    )


def _rope(q, k, positions):
    return (rotate(x, jnp.broadcast_to(positions, x.shape[:2]), 10.0) for x in (q, k))


def _attention(q, k, v, spec, mesh, bug):
    if mesh is None or bug == "replicated":
        if mesh is not None:
            whole = jax.NamedSharding(mesh, PartitionSpec("data"))
            q, k, v = (jax.lax.with_sharding_constraint(x, whole) for x in (q, k, v))
        q, k = _rope(q, k, jnp.arange(q.shape[1]))
        return LOCAL(q, k, v, spec, SCALE)[0]

    def region(q, k, v, spec, segments):
        part = q.shape[1]
        first = 0 if bug == "local positions" else jax.lax.axis_index("seq") * part
        q, k = _rope(q, k, first + jnp.arange(part))
        if bug == "local attention":
            spec = AttentionSpec(causal=True, q_segment_ids=segments)
            return LOCAL(q, k, v, spec, SCALE)[0]
        return exchanged_attention(q, k, v, spec, local=LOCAL, axis="seq", scale=SCALE)

    specs = SPLIT, SPLIT, SPLIT, PartitionSpec("data"), SPLIT
    mapped = jax.shard_map(region, mesh=mesh, in_specs=specs, out_specs=SPLIT)
    return mapped(q, k, v, spec, spec.q_segment_ids)


def _project(x, w, mesh, bug):
    if mesh is None or bug != "summed twice":
        return x @ w
    return jax.shard_map(
        lambda x, w: x @ summed_again(w),
        mesh=mesh,
        in_specs=(SPLIT, PartitionSpec()),
        out_specs=SPLIT,
        check_vma=False,
    )(x, w)


def _model_fn(bug, dropped, dropped_on_mesh):
    def model_fn(params, inputs, mesh):
        x = params["embedding"][inputs["tokens"]]
        q, k, v = (
            (x @ params["attention"][name]).reshape(*x.shape[:2], HEADS, HEAD_DIM)
            for name in ("query", "key", "value")
        )
        spec = _spec(inputs, dropped if mesh is None else dropped_on_mesh)
        attended = _attention(q, k, v, spec, mesh, bug).reshape(x.shape)
        x = x + _project(attended, params["attention"]["out"], mesh, bug)
        logits = x @ params["embedding"].T
        valid = jnp.arange(LENGTH) < inputs["lengths"][:, None]
        nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), inputs["labels"][..., None], -1)
        return jnp.sum(nll[..., 0] * valid) / jnp.sum(valid), logits

    return model_fn


@pytest.fixture(scope="session")
def user_case():
    """Makes a packed, padded, causal case; masks are dropped in both runs or on the mesh only."""

    def make(bug=None, dropped=(), dropped_on_mesh=None, **declared):
        draw = np.random.default_rng(1)
        width = HEADS * HEAD_DIM
        weights = {
            name: draw.normal(size=(width, width)).astype(np.float32) / 2
            for name in ("query", "key", "value", "out")
        }
        embedding = draw.normal(size=(VOCAB, width)).astype(np.float32)
        position = np.arange(LENGTH)
        inputs = {
            "tokens": draw.integers(0, VOCAB, (ROWS, LENGTH)),
            "labels": draw.integers(0, VOCAB, (ROWS, LENGTH)),
            "segments": (position >= [[5], [9], [6], [3]]).astype(np.int32),
            "lengths": np.array([16, 13, 16, 11], np.int32),
        }
        on_mesh = dropped if dropped_on_mesh is None else dropped_on_mesh
        declared = {"causal": True, "segments": "segments", "lengths": "lengths"} | declared
        params = {"attention": weights, "embedding": embedding}
        return Case(_model_fn(bug, dropped, on_mesh), inputs, params, **declared)

    return make


@pytest.fixture(scope="session")
def verified(user_case):
    """Verifies a case on a mesh: the report, and its failed checks by name."""

    @functools.cache  # The run on one device is the same for every mistake of the sharded one.
    def single(dropped):
        return single_device_run(user_case(dropped=dropped), make_mesh(1, 1))

    def run(*bug, mesh=(1, 4), dropped=(), **mistakes):
        case, mesh = user_case(*bug, dropped=dropped, **mistakes), make_mesh(*mesh)
        case.check(mesh)
        report = verify_runs(case, mesh, (sharded_run(case, mesh), single(dropped)))
        return report, {check.name: check for check in report.failed}

    return run
