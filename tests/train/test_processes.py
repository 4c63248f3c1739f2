"""Two processes of two devices each train as one process of four does, and stop together."""

import json
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest

from ulysses_jax.train.checkpoint import latest_step

PATIENCE_S = 90


@pytest.fixture
def joined():
    """The arguments that join two processes over a free port of this machine, for each rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    words = f"--distributed.coordinator {address} --distributed.num_processes 2"
    return [[*words.split(), "--distributed.process_id", str(rank)] for rank in range(2)]


@pytest.fixture
def start_two(start, in_own_process, joined):
    """Starts the training command as two processes."""

    def begin(*argv):
        words = [*argv, *in_own_process, "--mesh.simulated_devices", "2"]
        return [start("train.py", *words, *own) for own in joined]

    return begin


def said_by_us(printed):
    # Gloo's threads write into each other's lines, so one may begin in the middle.
    return [x for x in printed.splitlines() if "[Gloo]" not in x and "peer ranks" not in x]


def wait_for_lines(folder, lines, is_running):
    deadline = time.monotonic() + PATIENCE_S
    path = folder / "metrics.jsonl"
    while not path.exists() or path.read_bytes().count(b"\n") < lines:
        assert is_running(), "the run ended too early"
        assert time.monotonic() < deadline, "the run hangs"
        time.sleep(0.002)


def assert_same(found, expected):
    """The same steps; losses and norms as equal as sums in another order are."""
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def open_files(process):
    return [path.readlink().name for path in Path(f"/proc/{process.pid}/fd").iterdir()]


def test_two_processes_and_one_continue_each_others_run_to_the_same_losses(
    tiny_run, fork_run, start_two, ended, whole_run, losses, records, tmp_path
):
    folder = tmp_path / "run"
    argv = tiny_run(folder, "--checkpoint.resume", "auto")

    # A sequence over four devices lies in both processes.
    across = ["--mesh.data", "1", "--mesh.seq", "4"]
    two = start_two(*argv, *across)
    wait_for_lines(folder, 5, lambda: two[0].poll() is None)
    assert "metrics.jsonl" in open_files(two[0])
    assert not [name for name in open_files(two[1]) if "metrics" in name or "events" in name]
    two[1].send_signal(signal.SIGTERM)
    (first, second) = ended(*two)
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    reached = latest_step(folder / "checkpoints")
    assert_same(losses(folder), losses(whole_run[0])[:reached])
    assert f"stopped after step {reached}, which is saved" in first[1]
    table = [line.split() for line in said_by_us(first[1])][3:7]
    assert [row[1:-1:2] for row in table[1:3]] == [["0", "2", "cpu"], ["1", "2", "cpu"]]
    assert said_by_us(second[1]) == []

    one = fork_run(argv)
    wait_for_lines(folder, reached + 4, one.is_alive)
    one.terminate()
    one.join(PATIENCE_S)
    assert one.exitcode == 0
    assert latest_step(folder / "checkpoints") >= reached + 4
    reached = latest_step(folder / "checkpoints")
    assert_same(losses(folder), losses(whole_run[0])[:reached])

    (first, second) = ended(*start_two(*argv, *across, "--train.sample_tokens", "4"))
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert f"resumed from the checkpoint of step {reached}" in first[1]
    assert_same(losses(folder), losses(whole_run[0]))
    (evaluation,), (expected,) = records(folder)[1], records(whole_run[0])[1]
    assert evaluation == pytest.approx(expected, rel=1e-5)
    assert (folder / "loss.png").exists()
    assert (folder / "sample.txt").exists()


def test_two_processes_end_at_once_when_their_run_cannot_start(
    tiny_run, start_two, ended, tmp_path
):
    argv = tiny_run(tmp_path / "run", "--checkpoint.resume", "true")
    for code, printed, errors in ended(*start_two(*argv)):
        assert code == 2, errors
        assert "error: checkpoint.resume is true, but" in errors
        assert "Traceback" not in errors
        assert "no checkpoint" not in printed


def test_a_process_that_fails_alone_does_not_leave_the_other_waiting(
    tiny_run, start, in_own_process, joined, ended, tmp_path
):
    argv = tiny_run(tmp_path / "run")
    missing = ["--data.source", str(tmp_path / "missing.txt")]
    ranks = [
        start("train.py", *argv, *in_own_process, "--mesh.simulated_devices", "2", *words, *more)
        for words, more in zip(joined, ([], missing), strict=True)
    ]
    (waiting, failing) = ended(*ranks)
    assert failing[0] == 2
    assert "error: data.source" in failing[2]
    assert waiting[0] != 0


READS_AN_EPOCH = """
import json, sys
import jax, numpy as np
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from jax.sharding import NamedSharding, PartitionSpec
from ulysses_jax.data.batches import TrainBatches
from ulysses_jax.data.feed import device_batches
from ulysses_jax.data.store import TokenStore
from ulysses_jax.parallel.mesh import make_mesh

batches = TrainBatches(TokenStore(np.arange(12 * 8 + 1), np.zeros(1, np.int64)), 8, 4, 0, False, 97)
held = []
for mesh in (make_mesh(2, 2), make_mesh(1, 4)):
    sharding = NamedSharding(mesh, PartitionSpec("data", "seq"))
    for step, batch in enumerate(device_batches(batches.read, (4, 8), sharding, 0, 3)):
        for shard in batch.tokens_BS.addressable_shards:
            rows, columns = shard.index
            place = [mesh.shape["data"], step, rows.start or 0, columns.start or 0]
            held.append([place, np.asarray(shard.data).tolist()])
print(json.dumps(held))
"""


def test_two_processes_hold_each_sequence_of_an_epoch_once(start, ended, joined):
    ranks = [start("-c", READS_AN_EPOCH, words[1], rank) for rank, words in enumerate(joined)]
    epochs = {mesh: np.full((3, 4, 8), -1) for mesh in (2, 1)}
    for rank, (code, printed, errors) in enumerate(ended(*ranks)):
        assert code == 0, errors
        for (mesh, step, row, column), tokens in json.loads(said_by_us(printed)[-1]):
            piece = epochs[mesh][step, row : row + len(tokens), column : column + len(tokens[0])]
            assert (piece == -1).all(), "two devices hold the same piece"
            piece[:] = tokens
            assert rank == (row // 2 if mesh == 2 else column // 4)
    for tokens in epochs.values():
        rows = tokens.reshape(12, 8)
        np.testing.assert_array_equal(rows, rows[:, :1] + np.arange(8))
        assert sorted(rows[:, 0]) == list(range(0, 96, 8))
    np.testing.assert_array_equal(epochs[1], epochs[2])
