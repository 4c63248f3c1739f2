"""Checkpoints in real processes: two that save and restore as one, and one that is killed."""

import os
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ulysses_jax.train.checkpoint import Checkpoints

IDENTITY = {"model": {"num_layers": 4}}
VALUES = np.arange(7 * 3, dtype=np.float32).reshape(7, 3)

PROCESS = """
import sys
from pathlib import Path
import jax, numpy as np
folder, process, address = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(address, 2, process)
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from ulysses_jax.train.checkpoint import Checkpoints

mesh = Mesh(np.array(jax.devices()), ("seq",))
values = np.arange(21, dtype=np.float32).reshape(7, 3)

def state(step):
    def array(value, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
    rows = np.pad(values + step, ((0, 1), (0, 0)))
    return {"rows": array(rows, P("seq")), "step": array(np.array(step, np.int32), P())}

def abstract(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)

said = []
def opened(identity):
    return Checkpoints(folder, 2, identity, said.append)

checkpoints = opened({"model": {"num_layers": 4}})
step, restored = checkpoints.restore(abstract(state(0)))
rows = np.pad(values + 1, ((0, 1), (0, 0)))
for shard in restored["rows"].addressable_shards:
    np.testing.assert_array_equal(shard.data, rows[shard.index])
assert step == 1 == int(restored["step"].addressable_data(0))
for step in (2, 3, 4):
    checkpoints.save(step, state(step))
checkpoints.save(4, state(4))
checkpoints.wait()
assert checkpoints.latest_step() == 4
if process == 0:
    (folder / "step_00000004" / "_METADATA").unlink()
assert checkpoints.restore(abstract(state(0)))[0] == 3
assert len(said) == (1 if process == 0 else 0), said
checkpoints.save(4, state(4))
checkpoints.close()
other = opened({"model": {"num_layers": 6}})
try:
    other.restore(abstract(state(0)))
except ValueError as error:
    assert "model.num_layers is 4 in the checkpoint, 6 in the config" in str(error)
    print("done", flush=True)
other.close()
"""


def sharded(devices, step):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("seq",))
    rows = np.zeros((-(-7 // devices) * devices, 3), np.float32)
    rows[:7] = VALUES + step
    return {
        "rows": jax.device_put(rows, NamedSharding(mesh, P("seq"))),
        "step": jax.device_put(np.int32(step), NamedSharding(mesh, P())),
    }


def test_two_processes_and_one_restore_each_others_checkpoints_and_agree_on_damage(tmp_path):
    folder = tmp_path / "checkpoints"
    checkpoints = Checkpoints(folder, 2, IDENTITY)
    checkpoints.save(1, sharded(3, 1))
    checkpoints.close()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(folder), str(process), address],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    try:
        for process in processes:
            printed, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
            assert printed.split()[-1:] == ["done"], printed + errors
    finally:
        for process in processes:
            process.kill()
    expected = sharded(8, 4)
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), expected
    )
    said = []
    checkpoints = Checkpoints(folder, 2, IDENTITY, said.append)
    step, restored = checkpoints.restore(target)
    checkpoints.close()
    assert (step, said) == (4, [])
    for name, array in expected.items():
        np.testing.assert_array_equal(restored[name], array)


SAVES_FOREVER = """
import sys
from pathlib import Path
import jax, numpy as np
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from ulysses_jax.train.checkpoint import Checkpoints

sharding = NamedSharding(Mesh(np.array(jax.devices()), ("seq",)), P("seq"))
filled = lambda step: {"x": jax.device_put(np.full((16, 5), step, np.int32), sharding)}
checkpoints = Checkpoints(Path(sys.argv[1]), 2, {"name": "kill"}, lambda message: None)
step = 0
if checkpoints.latest_step() is not None:
    target = {"x": jax.ShapeDtypeStruct((16, 5), np.int32, sharding=sharding)}
    step, state = checkpoints.restore(target)
    assert (np.asarray(state["x"]) == step).all()
while True:
    step += 1
    checkpoints.save(step, filled(step))
    print(step, flush=True)
"""


def test_killed_at_any_moment_a_verified_checkpoint_is_left_and_nothing_is_printed(tmp_path):
    folder = tmp_path / "checkpoints"
    reached = 0
    for delay_s in (0.07, 0.013, 0.108, 0.041):
        with subprocess.Popen(
            [sys.executable, "-c", SAVES_FOREVER, str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as child:
            # The second save begins once the first is verified: from here on one always is.
            started = [child.stdout.readline(), child.stdout.readline()]
            time.sleep(delay_s)
            child.send_signal(signal.SIGKILL)
            rest, errors = child.communicate()
        assert errors == ""
        begun = [int(line) for line in [*started, *rest.splitlines()]]
        # The last two saves begun may have been cut short; the one before them was verified.
        assert begun[0] > reached
        reached = begun[-1] - 1
    checkpoints = Checkpoints(folder, 2, {"name": "kill"}, lambda message: None)
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("seq",)), P("seq"))
    step, state = checkpoints.restore(
        {"x": jax.ShapeDtypeStruct((16, 5), np.int32, sharding=sharding)}
    )
    checkpoints.close()
    assert step >= reached
    np.testing.assert_array_equal(state["x"], np.full((16, 5), step))
    assert not [name for name in os.listdir(folder) if "." in name]
