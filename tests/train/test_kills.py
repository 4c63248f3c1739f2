"""A run that is killed, stopped, damaged or moved to another mesh ends with the same losses."""

import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from ulysses_jax.train.checkpoint import latest_step
from ulysses_jax.train.command_line import parse, run_command_line
from ulysses_jax.train.run import run
from ulysses_jax.train.stopping import StopRequest

PATIENCE_S = 90


def wait_until(happened, is_running):
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert is_running(), "the run ended too early"
        assert time.monotonic() < deadline, "the run hangs"
        time.sleep(0.001)


def catches(process, number):
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16)
    return caught >> (number - 1) & 1


class Watch:
    """What a run started now in `folder` has done so far, seen from outside."""

    def __init__(self, folder):
        self._metrics, self._checkpoints = folder / "metrics.jsonl", folder / "checkpoints"
        # A resumed run first replaces the file by one without the steps it will do again.
        self._before = self._metrics.stat().st_ino if self._metrics.exists() else None
        self._start = latest_step(self._checkpoints) or 0

    def has_done(self, steps):
        if not self._metrics.exists() or self._metrics.stat().st_ino == self._before:
            return False
        return self._metrics.read_bytes().count(b"\n") >= self._start + steps

    def is_writing(self):
        return any(self._checkpoints.glob("step_*.orbax-checkpoint-tmp"))

    def is_unsealed(self):
        """Whether a checkpoint is committed but not verified."""
        steps = [p for p in self._checkpoints.glob("step_*") if re.fullmatch(r"step_\d+", p.name)]
        return any(not (path / "manifest.json").exists() for path in steps)


def kill_while(process, condition, delay_s):
    """Kills the process some time after `condition` began to hold, and while it still does."""
    while True:
        wait_until(condition, process.is_alive)
        time.sleep(delay_s)
        os.kill(process.pid, signal.SIGSTOP)
        if condition():
            return process.kill()
        os.kill(process.pid, signal.SIGCONT)
        delay_s /= 2


def kill_at(moment, process, watch, draw):
    steps = draw.randint(4, 8)
    if moment == "start":
        time.sleep(draw.uniform(0.2, 2.0))
        process.kill()
    elif moment == "step":
        wait_until(lambda: watch.has_done(steps), process.is_alive)
        time.sleep(draw.uniform(0, 0.03))
        process.kill()
    else:
        state = {"write": watch.is_writing, "seal": watch.is_unsealed}[moment]
        kill_while(process, lambda: watch.has_done(steps) and state(), draw.uniform(0, 0.01))
    process.join()
    assert process.exitcode == -signal.SIGKILL


def test_run_killed_at_ten_random_moments_ends_with_the_losses_of_one_that_was_not(
    tiny_run, fork_run, whole_run, losses, records, tmp_path
):
    folder = tmp_path / "run"
    argv = tiny_run(folder, "--checkpoint.resume", "auto")
    draw = random.Random(34)
    moments = ["start"] * 2 + ["step"] * 4 + ["write"] * 2 + ["seal"] * 2
    draw.shuffle(moments)
    writing = unsealed = 0
    for moment in moments:
        watch = Watch(folder)
        kill_at(moment, fork_run(argv), watch, draw)
        writing += watch.is_writing()
        unsealed += watch.is_unsealed()
    assert writing >= 2
    assert unsealed >= 2
    assert 0 < latest_step(folder / "checkpoints") < 48
    last = fork_run(argv)
    last.join(PATIENCE_S)
    assert last.exitcode == 0
    assert losses(folder) == losses(whole_run[0])
    assert records(folder)[1] == records(whole_run[0])[1]
    assert latest_step(folder / "checkpoints") == len(losses(folder))


def test_signalled_run_saves_and_ends_and_a_second_signal_ends_it_at_once(
    tiny_run, in_own_process, start, ended, fork_run, whole_run, losses, tmp_path
):
    folder = tmp_path / "run"
    argv = tiny_run(folder, "--checkpoint.resume", "auto")

    def saved_step():
        done = losses(folder)[-1][0]
        assert latest_step(folder / "checkpoints") == done
        return done

    watch = Watch(folder)
    process = start("train.py", *argv, *in_own_process)
    wait_until(lambda: watch.has_done(4), lambda: process.poll() is None)
    process.terminate()
    ((code, printed, errors),) = ended(process)
    assert (code, errors) == (0, "")
    reached = saved_step()
    assert (
        f"stopped after step {reached}, which is saved; continue with\n"
        f"python train.py --config {folder / 'config.yaml'} --checkpoint.resume true\n" in printed
    )

    watch = Watch(folder)
    process = fork_run(argv)
    wait_until(lambda: watch.has_done(4), process.is_alive)
    os.kill(process.pid, signal.SIGINT)
    process.join(PATIENCE_S)
    assert process.exitcode == 0
    assert saved_step() >= reached + 4
    assert losses(folder) == losses(whole_run[0])[: saved_step()]

    watch = Watch(folder)
    process = fork_run(argv)
    wait_until(lambda: watch.has_done(4), process.is_alive)
    process.terminate()
    # The second one need not be the same.
    wait_until(lambda: not catches(process, signal.SIGINT), process.is_alive)
    os.kill(process.pid, signal.SIGINT)
    process.join(PATIENCE_S)
    assert process.exitcode == -signal.SIGINT
    assert latest_step(folder / "checkpoints") < losses(folder)[-1][0]

    last = fork_run(argv)
    last.join(PATIENCE_S)
    assert last.exitcode == 0
    assert losses(folder) == losses(whole_run[0])


@pytest.fixture
def run_here(capfd):
    """Runs the training command in this process: (exit code, stdout, stderr)."""

    def command(*argv):
        code = run_command_line(lambda: run(parse([*map(str, argv)])))
        return code, *capfd.readouterr()

    return command


@pytest.mark.parametrize(
    ("data", "seq", "stage", "newest"),
    [
        (2, 2, 3, "damaged"),
        (4, 1, 1, "deleted"),
        (1, 4, 0, "deleted"),
        (1, 1, 2, "deleted"),
        (2, 4, 3, "deleted"),
    ],
)
def test_next_losses_on_another_mesh_and_stage_equal_the_whole_run(
    copied_run, whole_run, tiny_run, run_here, losses, data, seq, stage, newest
):
    checkpoint = copied_run / "checkpoints/step_00000048"
    if newest == "damaged":
        largest = max(checkpoint.rglob("*"), key=lambda path: path.stat().st_size)
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 1
        largest.write_bytes(content)
    else:
        shutil.rmtree(checkpoint)
    mesh = f"--mesh.data {data} --mesh.seq {seq} --train.zero_stage {stage}"
    argv = tiny_run(copied_run, "--checkpoint.resume", "true", *mesh.split())
    code, printed, errors = run_here(*argv)
    assert (code, errors) == (0, "")
    assert ("checkpoint of step 48 is not used" in printed) == (newest == "damaged")
    assert "resumed from the checkpoint of step 45" in printed
    expected = losses(whole_run[0])
    assert losses(copied_run)[:-3] == expected[:-3]
    if (data, seq, stage) == (2, 2, 3):
        assert losses(copied_run) == expected
    np.testing.assert_allclose(losses(copied_run)[-3:], expected[-3:], rtol=1e-5)


def test_signal_at_the_last_step_lets_the_run_end_as_it_would(
    tiny_run, run_here, records, tmp_path, monkeypatch
):
    monkeypatch.setattr(StopRequest, "stops_at", lambda self, step: step == 2)
    mesh = "--mesh.data 1 --mesh.seq 1 --train.steps 2"
    code, printed, errors = run_here(*tiny_run(tmp_path / "run", *mesh.split()))
    assert (code, errors) == (0, "")
    assert "stopped after" not in printed
    assert [r["step"] for r in records(tmp_path / "run")[1]] == [2]
    assert (tmp_path / "run/loss.png").exists()


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_loss_that_is_no_number_ends_the_run_and_leaves_a_good_checkpoint(
    tiny_run, run_here, losses, tmp_path
):
    folder = tmp_path / "run"
    words = "--mesh.data 1 --mesh.seq 1 --optimizer.learning_rate 1e15 --optimizer.warmup_steps 0"
    argv = tiny_run(folder, *words.split(), "--checkpoint.every", "1")
    code, printed, errors = run_here(*argv)
    assert code == 1, printed
    assert re.fullmatch(
        r"error: the update of step 2 was not applied, because it, the loss \(\S+\) or the "
        r"gradient's norm \(\S+\) is not finite\. The last good checkpoint is of step 1; lower "
        r"optimizer\.learning_rate .*\n",
        errors,
    )
    assert [step for step, _, _ in losses(folder)] == [1]
    (checkpoint,) = (folder / "checkpoints").iterdir()
    stored = ocp.PyTreeCheckpointer().restore(checkpoint)
    parameters = {name: array for name, array in stored.items() if name.startswith("params.")}
    assert parameters
    assert all(np.isfinite(array).all() for array in parameters.values())


def test_finished_run_without_its_last_evaluation_makes_it_when_resumed(
    copied_run, whole_run, tiny_run, run_here, records
):
    metrics = copied_run / "metrics.jsonl"
    lines = [line for line in metrics.read_text().splitlines() if "eval_loss" not in line]
    metrics.write_text("\n".join(lines) + "\n")
    argv = tiny_run(copied_run, "--checkpoint.resume", "true")
    for _ in range(2):
        code, printed, errors = run_here(*argv)
        assert (code, errors) == (0, "")
        assert "nothing to train" in printed
        assert records(copied_run)[1] == records(whole_run[0])[1]
