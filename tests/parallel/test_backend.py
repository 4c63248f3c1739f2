"""Starting the backend: options that this XLA knows, and launchers that are not ignored."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from ulysses_jax.parallel.backend import compiler_options, require_joined


@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_every_option_is_known_to_the_installed_xla(platform):
    options = compiler_options(SimpleNamespace(platform=platform))
    assert options
    # XLA checks the names whatever the backend that compiles.
    assert float(jax.jit(lambda x: x + 1, compiler_options=options)(jnp.float32(1))) == 2.0


def test_other_platforms_get_no_options():
    assert compiler_options(SimpleNamespace(platform="tpu")) == {}


@pytest.mark.parametrize(
    ("variable", "launcher"), [("SLURM_NTASKS", "Slurm"), ("OMPI_COMM_WORLD_SIZE", "Open MPI")]
)
def test_tasks_that_would_train_alone_are_refused(monkeypatch, variable, launcher):
    monkeypatch.setenv(variable, "1")
    require_joined()
    monkeypatch.setenv(variable, "4")
    with pytest.raises(ValueError, match=f"{launcher} started 4 tasks.*distributed.detect = true"):
        require_joined()
