"""The mesh: its order, and the sizes it refuses."""

from types import SimpleNamespace

import jax
import pytest

from ulysses_jax.parallel.mesh import AXES, in_mesh_order, make_mesh


@pytest.mark.parametrize(
    ("data", "seq", "shape"), [(-1, 4, (2, 4)), (-1, 1, (8, 1)), (3, 2, (3, 2)), (1, 5, (1, 5))]
)
def test_sizes_come_out_as_asked_and_minus_one_takes_the_rest(data, seq, shape):
    mesh = make_mesh(data, seq)
    assert mesh.axis_names == AXES
    assert mesh.devices.shape == shape


def test_a_sequence_group_stays_inside_a_process_when_it_fits():
    devices = [
        SimpleNamespace(process_index=process, id=process + 2 * local)
        for local in range(2)
        for process in range(2)
    ]
    assert [d.process_index for d in in_mesh_order(devices)] == [0, 0, 1, 1]
    ordered = make_mesh(4, 2, jax.devices()[::-1]).devices
    assert [d.id for d in ordered.flat] == [d.id for d in jax.devices()]


@pytest.mark.parametrize(
    ("data", "seq", "devices", "words"),
    [
        (4, 4, 8, "4 × 4 = 16 devices, but there are 8"),
        (1, 4, 1, "1 × 4 = 4 devices, but there is 1"),
        (-1, 3, 8, "mesh.seq = 3 does not divide the 8 devices"),
        (-1, 16, 8, "1 × 16 = 16 devices"),
    ],
)
def test_impossible_meshes_are_refused_with_both_numbers(data, seq, devices, words):
    with pytest.raises(ValueError, match=words):
        make_mesh(data, seq, jax.devices()[:devices])


def test_a_mesh_that_leaves_a_whole_process_idle_is_refused():
    devices = [SimpleNamespace(process_index=process, id=process) for process in range(2)]
    with pytest.raises(ValueError, match="1 × 1 = 1 leaves whole processes of the 2 devices idle"):
        make_mesh(1, 1, devices)
