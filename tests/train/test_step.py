"""The whole update: equal to one device under SGD, never applied without cause, any schedule."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ulysses_jax.parallel.mesh import make_mesh
from ulysses_jax.train.config import OptimizerConfig
from ulysses_jax.train.optimizer import (
    is_weight_matrix,
    learning_rate_schedule,
    make_optimizer,
    warmup_used,
)
from ulysses_jax.train.state import make_init, sharding_policy, state_shardings
from ulysses_jax.train.step import Program, make_train_step

STEPS = 5
SGD = OptimizerConfig(name="sgd", learning_rate=0.5, warmup_steps=2, clip_norm=0.3)
ADAMW = OptimizerConfig(learning_rate=0.01, warmup_steps=2, clip_norm=0.5)


class Run:
    """One compiled update, with the first state on its mesh."""

    def __init__(self, arch, mesh_shape, stage, config, accumulate=1):
        self.policy = sharding_policy(arch, make_mesh(*mesh_shape), stage)
        optimizer = make_optimizer(config, STEPS)
        program = Program(arch, self.policy, "exchange", 16)
        self.init = make_init(arch, self.policy, optimizer)
        self.accumulate = accumulate
        self.step = jax.jit(
            make_train_step(program, optimizer, learning_rate_schedule(config, STEPS)),
            out_shardings=(state_shardings(self.policy, optimizer), self.policy.whole),
        )

    def start(self):
        return self.init(jax.random.key(0))

    def __call__(self, state, batch):
        split = jax.tree.map(lambda x: x.reshape(self.accumulate, -1, x.shape[-1]), batch)
        return self.step(
            state, jax.device_put(split, self.policy.batch(leading=1)), jax.random.key(7)
        )

    def logical_params(self, state):
        return jax.tree.map(
            lambda w, p: np.asarray(w)[tuple(slice(n) for n in p.logical)],
            state.params,
            self.policy.placements,
        )


def _train(run, batches):
    state, metrics = run.start(), []
    for batch in batches:
        state, step_metrics = run(state, batch)
        metrics.append(jax.device_get(step_metrics))
    return run.logical_params(state), metrics


@pytest.fixture(scope="module")
def batches(packed_batch):
    return [packed_batch((1, 8, 24), seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def alone(tiny_architecture, batches):
    """Parameters and metrics of the single-device run, by optimizer."""

    @functools.cache
    def make(config):
        return _train(Run(tiny_architecture(attention="reference"), (1, 1), 0, config), batches)

    return make


@pytest.mark.parametrize(
    ("mesh_shape", "stage", "accumulate"),
    [((2, 2), 0, 1), ((2, 2), 1, 1), ((2, 2), 2, 1), ((2, 2), 3, 2), ((1, 4), 3, 1)],
)
def test_parameters_after_sgd_steps_equal_the_single_device_run(
    alone, tiny_architecture, batches, mesh_shape, stage, accumulate
):
    expected, expected_metrics = alone(SGD)
    # The default attention at the default stage; what the others change is the weights' place.
    arch = tiny_architecture(attention="blockwise" if stage == 3 else "reference")
    run = Run(arch, mesh_shape, stage, SGD, accumulate)
    params, metrics = _train(run, batches)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max()),
        params,
        expected,
    )
    for found, wanted in zip(metrics, expected_metrics, strict=True):
        assert float(found.loss) == pytest.approx(float(wanted.loss), rel=1e-5)
        assert float(found.grad_norm) == pytest.approx(float(wanted.grad_norm), rel=1e-5)
        assert float(found.grad_norm) > SGD.clip_norm, "nothing was clipped, so nothing was tested"


@pytest.fixture(scope="module")
def padded_run(tiny_architecture):
    """AdamW on six devices, which divide none of the model's widths."""
    return Run(tiny_architecture(), (3, 2), 3, ADAMW)


@pytest.fixture(scope="module")
def wide_batches(packed_batch):
    return [packed_batch((1, 24, 24), seed=seed) for seed in range(3)]


def test_losses_under_adamw_equal_the_single_device_run(
    padded_run, tiny_architecture, wide_batches
):
    arch = tiny_architecture(attention="reference")
    _, expected = _train(Run(arch, (1, 1), 0, ADAMW), wide_batches)
    _, metrics = _train(padded_run, wide_batches)
    for found, wanted in zip(metrics, expected, strict=True):
        assert float(found.loss) == pytest.approx(float(wanted.loss), rel=1e-5)
        assert float(found.learning_rate) == float(wanted.learning_rate)


def test_padding_stays_zero_in_parameters_and_moments(padded_run, wide_batches):
    state, _ = padded_run(padded_run.start(), wide_batches[0])
    placements = jax.tree.leaves(padded_run.policy.placements)
    assert any(p.stored != p.logical for p in placements)
    for tree in (state.params, optax.tree.get(state.moments, "mu")):
        for leaf, placement in zip(jax.tree.leaves(tree), placements, strict=True):
            inside = np.zeros(placement.stored, bool)
            inside[tuple(slice(n) for n in placement.logical)] = True
            assert not np.any(np.asarray(leaf)[~inside])


def test_every_device_holds_only_its_share_of_the_state(padded_run):
    state = padded_run.start()
    for leaf in jax.tree.leaves((state.params, optax.tree.get(state.moments, "mu"))):
        for shard in leaf.addressable_shards:
            assert shard.data.size == leaf.size // 6


def _assert_unchanged(state, before):
    jax.tree.map(np.testing.assert_array_equal, state.params, before.params)
    jax.tree.map(np.testing.assert_array_equal, state.moments, before.moments)


def test_a_batch_without_labels_has_a_finite_loss_and_changes_nothing(padded_run, wide_batches):
    before, _ = padded_run(padded_run.start(), wide_batches[0])
    empty = dataclasses.replace(
        wide_batches[1], labels_BS=np.full_like(wide_batches[1].labels_BS, -100)
    )
    state, metrics = padded_run(before, empty)
    _assert_unchanged(state, before)
    assert float(metrics.loss) == 0.0
    assert not metrics.applied
    assert int(metrics.labels) == 0
    assert int(state.step) == int(before.step) + 1, "the next batch must be another one"


def test_a_gradient_that_is_not_finite_changes_nothing(padded_run, wide_batches):
    before, _ = padded_run(padded_run.start(), wide_batches[0])
    scale = before.params["head"]["norm"]["scale"]
    before.params["head"]["norm"]["scale"] = scale.at[0].set(jnp.inf)
    state, metrics = padded_run(before, wide_batches[1])
    _assert_unchanged(state, before)
    assert not metrics.applied
    assert int(metrics.labels) > 0


def test_an_update_that_is_not_finite_is_not_applied(tiny_architecture, batches):
    # The gradient is finite; only its product with the rate overflows.
    arch = tiny_architecture(attention="reference")
    run = Run(arch, (1, 1), 0, dataclasses.replace(SGD, learning_rate=1e38))
    before = run.start()
    state, metrics = run(before, batches[0])
    _assert_unchanged(state, before)
    assert np.isfinite(metrics.grad_norm)
    assert not metrics.applied


def test_the_mean_is_over_valid_labels_of_the_whole_batch(padded_run, wide_batches):
    # One label in all, held by the last device of the mesh: a mean of means would divide by six.
    labels = np.full_like(wide_batches[0].labels_BS, -100)
    labels[0, -1, -1] = 3
    single = dataclasses.replace(wide_batches[0], labels_BS=labels)
    _, metrics = padded_run(padded_run.start(), single)
    assert int(metrics.labels) == 1
    assert float(metrics.loss) == pytest.approx(np.log(37), rel=0.05)


def test_dropout_depends_neither_on_the_mesh_nor_on_accumulation(alone, tiny_architecture, batches):
    arch = tiny_architecture(dropout_rate=0.3, attention="reference")
    losses = []
    for mesh_shape, accumulate in [((1, 1), 1), ((2, 2), 2)]:
        run = Run(arch, mesh_shape, 3, SGD, accumulate)
        losses.append(float(run(run.start(), batches[0])[1].loss))
    _, without = alone(SGD)
    assert abs(losses[0] - float(without[0].loss)) > 1e-3
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_weight_decay_is_for_matrices_and_not_for_stacked_norm_scales(tiny_architecture):
    policy = sharding_policy(tiny_architecture(biases=True, norm="layernorm"), make_mesh(1, 1), 0)
    decayed = {
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, yes in jax.tree_util.tree_leaves_with_path(
            is_weight_matrix(policy.stored_params())
        )
        if yes
    }
    matrices = {f"blocks.{name}.kernel" for name in ("query", "key", "value", "output")}
    matrices |= {f"blocks.{name}.kernel" for name in ("gate", "up", "down")}
    assert decayed == matrices | {"embedding.tokens", "head.table"}


@pytest.mark.parametrize(("steps", "warmup", "used"), [(10, 3, 3), (3, 30, 2), (1, 1, 0)])
def test_a_warmup_longer_than_the_run_is_shortened(steps, warmup, used):
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=warmup)
    assert warmup_used(config, steps) == used
    rates = [float(learning_rate_schedule(config, steps)(step)) for step in range(steps)]
    assert max(rates) == pytest.approx(1.0)
    assert rates[used] == pytest.approx(1.0)
    assert min(rates) > 0
