"""What is saved comes back bit for bit, on any mesh, or is refused: also after damage."""

import os
import shutil
import time
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ulysses_jax.train import manifest
from ulysses_jax.train.checkpoint import DAMAGED_FOLDER, Checkpoints
from ulysses_jax.train.manifest import MANIFEST_NAME

IDENTITY = {"model": {"num_layers": 4, "norm": "rmsnorm"}, "shapes": {"embed": [7, 3]}}
LENGTH, WIDTH = 7, 3


@jax.tree_util.register_dataclass
@dataclass
class Params:
    embed: jax.Array
    half: jax.Array
    scale: jax.Array


class State(NamedTuple):
    params: Params
    opt_state: tuple
    count: jax.Array


def padded(length, mesh):
    return -(-length // mesh.size) * mesh.size


def make_mesh(data, seq):
    return Mesh(np.array(jax.devices()[: data * seq]).reshape(data, seq), ("data", "seq"))


def make_state(mesh, value):
    """Arrays whose first dimension is padded with zeros up to a multiple of the devices."""
    rows = NamedSharding(mesh, P(("data", "seq")))
    whole = NamedSharding(mesh, P())

    def sharded(dtype):
        array = np.zeros((padded(LENGTH, mesh), WIDTH), dtype)
        array[:LENGTH] = np.arange(LENGTH * WIDTH).reshape(LENGTH, WIDTH) / 3 + value
        return jax.device_put(array, rows)

    scale = jax.device_put(np.full((5,), np.pi * value, np.float32), whole)
    params = Params(sharded(np.float32), sharded(jnp.bfloat16), scale)
    opt_state = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)).init(params)
    opt_state = jax.tree.map(
        lambda x: (
            jax.device_put(np.asarray(x) + np.asarray(value, x.dtype), whole) if x.ndim == 0 else x
        ),
        opt_state,
    )
    return State(params, opt_state, jax.device_put(np.int32(value), whole))


def abstract(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def assert_bitwise_equal(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for left, right in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert left.sharding.is_equivalent_to(right.sharding, right.ndim)
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()


@pytest.fixture
def opened(tmp_path):
    """Opens Checkpoints on one folder; the messages they report are in `opened.said`."""
    everything = []

    def open_checkpoints(keep=3, identity=IDENTITY, **options):
        checkpoints = Checkpoints(
            tmp_path / "checkpoints", keep, identity, open_checkpoints.said.append, **options
        )
        everything.append(checkpoints)
        return checkpoints

    open_checkpoints.said = []
    open_checkpoints.folder = tmp_path / "checkpoints"
    yield open_checkpoints
    for checkpoints in everything:
        checkpoints.close()


def saved(opened, steps, mesh=None, **options):
    checkpoints = opened(**options)
    mesh = mesh or make_mesh(2, 4)
    for step in steps:
        checkpoints.save(step, make_state(mesh, step))
    checkpoints.wait()
    return checkpoints


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip_middle_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_same_mesh_restores_bit_for_bit(opened):
    saved(opened, [1, 2])
    state = make_state(make_mesh(2, 4), 2)
    step, restored = opened().restore(abstract(state))
    assert step == 2
    assert_bitwise_equal(restored, state)
    assert opened.said == []


@pytest.mark.parametrize(
    ("old", "new"),
    [((2, 4), (3, 1)), ((3, 1), (2, 4)), ((1, 1), (8, 1)), ((2, 3), (1, 1)), ((1, 5), (2, 2))],
)
def test_other_mesh_restores_the_same_values_with_its_own_padding(opened, old, new):
    saved(opened, [3], make_mesh(*old))
    state = make_state(make_mesh(*new), 3)
    _, restored = opened().restore(abstract(state))
    assert_bitwise_equal(restored, state)


def test_arrays_may_be_donated_as_soon_as_save_returns(opened):
    mesh = make_mesh(2, 4)
    checkpoints = opened()
    size = 2**18
    state = {"x": jax.device_put(np.arange(size, dtype=np.float32), NamedSharding(mesh, P("seq")))}
    target = abstract(state)
    overwrite = jax.jit(lambda state: jax.tree.map(lambda x: -x, state), donate_argnums=0)
    checkpoints.save(1, state)
    for _ in range(3):
        state = overwrite(state)
    jax.block_until_ready(state)
    _, restored = checkpoints.restore(target)
    np.testing.assert_array_equal(restored["x"], np.arange(size, dtype=np.float32))


def test_error_of_a_save_surfaces_at_the_next_call_and_only_once(opened, monkeypatch):
    def fail(*arguments):
        raise OSError("disk full")

    state = make_state(make_mesh(1, 1), 1)
    for call in ("save", "wait", "check", "close"):
        checkpoints = opened()
        with monkeypatch.context() as patch:
            patch.setattr(manifest, "write", fail)
            checkpoints.save(10, state)
            while not checkpoints._pending.done():
                time.sleep(0.001)
        arguments = (11, state) if call == "save" else ()
        with pytest.raises(OSError, match="disk full"):
            getattr(checkpoints, call)(*arguments)
        checkpoints.check()


def test_folder_that_cannot_be_made_raises_in_save_itself(opened):
    checkpoints = opened()
    opened.folder.write_text("a file where the folder should be")
    with pytest.raises(OSError, match="checkpoints"):
        checkpoints.save(1, make_state(make_mesh(1, 1), 1))


def test_saving_a_verified_step_again_does_nothing(opened):
    saved(opened, [1])
    before = {path: path.stat().st_mtime_ns for path in files_of(opened.folder)}
    saved(opened, [1])
    assert {path: path.stat().st_mtime_ns for path in files_of(opened.folder)} == before


def test_saving_a_damaged_step_again_replaces_it(opened):
    saved(opened, [1])
    state = make_state(make_mesh(2, 4), 1)
    for times in (1, 2):
        flip_middle_byte(opened.folder / "step_00000001" / "_METADATA")
        checkpoints = saved(opened, [1])
        assert_bitwise_equal(checkpoints.restore(abstract(state))[1], state)
        assert len(os.listdir(opened.folder / DAMAGED_FOLDER)) == times == len(opened.said)


def test_only_the_newest_are_kept(opened):
    checkpoints = saved(opened, [1, 2, 3, 4, 5], keep=2)
    assert sorted(os.listdir(opened.folder)) == ["step_00000004", "step_00000005"]
    assert checkpoints.latest_step() == 5


def test_pruning_counts_only_verified_checkpoints_and_spares_the_one_just_saved(opened):
    saved(opened, [5, 6, 7], keep=3)
    for step in (6, 7):
        (opened.folder / f"step_0000000{step}" / MANIFEST_NAME).unlink()
    checkpoints = saved(opened, [2], keep=1)
    assert checkpoints.latest_step() == 5
    assert {"step_00000002", "step_00000005"} <= set(os.listdir(opened.folder))


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_none_is_refused(opened, keep):
    with pytest.raises(ValueError, match=f"checkpoint.keep is {keep}"):
        opened(keep=keep)


def test_identity_that_is_not_json_is_refused(opened):
    with pytest.raises(ValueError, match="JSON"):
        opened(identity={"model": object()})
    with pytest.raises(ValueError, match="JSON"):
        opened(identity={"rate": float("nan")})


def test_other_identity_is_refused_before_files_are_read_naming_each_field(opened):
    saved(opened, [1, 2])
    flip_middle_byte(opened.folder / "step_00000002" / "_METADATA")
    changed = {"model": {"num_layers": 6, "norm": "rmsnorm"}, "shapes": {"embed": [8, 3]}}
    checkpoints = opened(identity=changed)
    with pytest.raises(ValueError, match="step 2") as error:
        checkpoints.restore(abstract(make_state(make_mesh(2, 4), 2)))
    assert "model.num_layers is 4 in the checkpoint, 6 in the config" in str(error.value)
    assert "shapes.embed is [7, 3] in the checkpoint, [8, 3] in the config" in str(error.value)
    assert "norm" not in str(error.value)
    assert opened.said == []
    with pytest.raises(ValueError, match=r"model\.num_layers"):
        checkpoints.save(2, make_state(make_mesh(2, 4), 2))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state._replace(count=None), "count is .* in the checkpoint, not in"),
        (lambda state: state._replace(opt_state=(state.params,)), r"opt_state.1.0.mu.embed is"),
        (
            lambda state: state._replace(
                count=jax.ShapeDtypeStruct((), np.float32, sharding=state.count.sharding)
            ),
            'count.dtype is "int32" in the checkpoint, "float32" in the config',
        ),
        (
            lambda state: state._replace(
                count=jax.ShapeDtypeStruct((1,), np.int32, sharding=state.count.sharding)
            ),
            "count.dimensions is 0 in the checkpoint, 1 in the config",
        ),
    ],
)
def test_other_arrays_are_refused_and_never_cast(opened, change, said):
    saved(opened, [1])
    with pytest.raises(ValueError, match=said):
        opened().restore(change(abstract(make_state(make_mesh(2, 4), 1))))


def test_a_flipped_byte_in_any_file_is_seen_and_the_checkpoint_before_it_used(opened):
    saved(opened, [1, 2])
    newest = opened.folder / "step_00000002"
    first = make_state(make_mesh(2, 4), 1)
    checkpoints = opened()
    names = [path.relative_to(newest) for path in files_of(newest) if path.stat().st_size]
    assert len(names) > 5
    for name in names:
        flip_middle_byte(newest / name)
        step, restored = checkpoints.restore(abstract(first))
        assert step == 1
        assert_bitwise_equal(restored, first)
        assert f"step 2 is not used: {name}" in opened.said[-1]
        moved = opened.folder / DAMAGED_FOLDER / newest.name
        assert str(moved) in opened.said[-1]
        flip_middle_byte(moved / name)
        moved.rename(newest)
    assert checkpoints.restore(abstract(first))[0] == 2


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda step: os.truncate(step / "manifest.ocdbt", 11), "manifest.ocdbt has 11 bytes"),
        (lambda step: (step / "_METADATA").unlink(), "_METADATA is missing"),
        (lambda step: (step / MANIFEST_NAME).unlink(), "no manifest"),
        (lambda step: os.truncate(step / MANIFEST_NAME, 50), "not as it was written"),
        (shutil.rmtree, None),
    ],
)
def test_damaged_newest_gives_way_to_the_one_before_and_can_be_saved_again(opened, damage, said):
    saved(opened, [1, 2])
    damage(opened.folder / "step_00000002")
    checkpoints = opened()
    assert checkpoints.restore(abstract(make_state(make_mesh(2, 4), 1)))[0] == 1
    assert len(opened.said) == (said is not None)
    assert said is None or said in opened.said[0]
    state = make_state(make_mesh(2, 4), 2)
    checkpoints.save(2, state)
    step, restored = checkpoints.restore(abstract(state))
    assert step == 2
    assert_bitwise_equal(restored, state)


def test_nothing_left_is_an_error_that_says_so(opened):
    target = abstract(make_state(make_mesh(2, 4), 1))
    with pytest.raises(ValueError, match="there is no checkpoint in"):
        opened().restore(target)
    assert opened().latest_step() is None
    saved(opened, [1, 2])
    for step in (1, 2):
        (opened.folder / f"step_0000000{step}" / "_METADATA").unlink()
    with pytest.raises(ValueError, match=r"none of the 2 checkpoints .* \(steps 2, 1\)"):
        opened().restore(target)
    assert len(opened.said) == 2


def test_what_a_kill_leaves_behind_is_deleted_by_the_owner_only(opened):
    saved(opened, [1])
    leftovers = ["step_00000002.orbax-checkpoint-tmp", "step_00000000.deleting"]
    for name in leftovers:
        shutil.copytree(opened.folder / "step_00000001", opened.folder / name)
    reader = opened(read_only=True)
    assert reader.latest_step() == 1
    assert set(leftovers) <= set(os.listdir(opened.folder))
    opened()
    assert os.listdir(opened.folder) == ["step_00000001"]


def test_reader_moves_nothing_and_may_ask_for_a_part_of_state_and_identity(opened):
    saved(opened, [1, 2])
    (opened.folder / "step_00000002" / MANIFEST_NAME).unlink()
    before = files_of(opened.folder)
    reader = opened(identity={"model": IDENTITY["model"]}, read_only=True)
    params = make_state(make_mesh(3, 1), 1).params
    step, restored = reader.restore({"params": abstract(params)})
    assert step == 1
    assert_bitwise_equal(restored["params"], params)
    assert files_of(opened.folder) == before
    assert "step 2 is not used" in opened.said[0]
