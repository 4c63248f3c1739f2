"""Real training processes on a tiny model, and one whole run that others are compared with."""

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ulysses_jax.train.command_line import parse
from ulysses_jax.train.run import run

REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 90
TINY = """
    --mesh.data 2 --mesh.seq 2
    --model.num_layers 1 --model.embed_dim 16 --model.num_heads 4 --model.num_kv_heads 4
    --model.mlp_dim 32 --model.attention reference --data.heldout_tokens 200
    --train.seq_len 16 --train.global_batch 4 --train.steps 48 --train.sample_tokens 0
    --checkpoint.every 3
"""


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """Makes the arguments of a run in `run_dir` on a 2 × 2 mesh; later ones win."""
    folder = tmp_path_factory.mktemp("data")
    source = folder / "corpus.txt"
    source.write_text("".join(f"def f{n}(x):\n    return {n} * x\n\n" for n in range(200)))

    def make(run_dir, *more):
        places = {
            "--data.source": source,
            "--data.cache_dir": folder / "tokens",
            "--run_dir": run_dir,
        }
        return [*TINY.split(), *(str(word) for pair in places.items() for word in pair), *more]

    return make


@pytest.fixture(scope="session")
def in_own_process(tmp_path_factory):
    """Arguments that give a run in its own process devices, and the programs of earlier runs."""
    with pytest.MonkeyPatch.context() as patch:
        # Inherited by the processes; JAX keeps only what took a second to compile otherwise.
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        yield [
            *["--mesh.simulated_devices", "4", "--train.compilation_cache"],
            str(tmp_path_factory.mktemp("programs")),
        ]


@pytest.fixture(scope="session")
def start(in_own_process):
    """Starts a Python process of the repository; none outlives the tests."""
    started = []

    def begin(*words):
        process = subprocess.Popen(
            [sys.executable, *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY), "COLUMNS": "200"},
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def fork_run(in_own_process):
    """Starts a run in a process forked from one that has imported everything and done nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ulysses_jax.train.run"])
    started = []

    def begin(argv):
        process = context.Process(target=run, args=(parse([*argv, *in_own_process]),), daemon=True)
        process.start()
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.join()


@pytest.fixture(scope="session")
def ended(start):
    """Waits for processes: (exit code, stdout, stderr) of each; one that hangs fails the test."""

    def wait(*processes):
        try:
            printed = [process.communicate(timeout=PATIENCE_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
        return [(p.returncode, *text) for p, text in zip(processes, printed, strict=True)]

    return wait


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory, tiny_run, in_own_process, start, ended):
    """(run folder, stdout) of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    argv = tiny_run(folder, *in_own_process, "--train.sample_tokens", "4")
    ((code, printed, errors),) = ended(start("train.py", *argv))
    assert (code, errors) == (0, "")
    return folder, printed


@pytest.fixture
def copied_run(whole_run, tmp_path):
    """A copy of the whole run that a test may change."""
    return shutil.copytree(whole_run[0], tmp_path / "run")


@pytest.fixture(scope="session")
def records():
    """Reads a metrics.jsonl: its train lines and its evaluation lines."""

    def read(folder):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [r for r in lines if "loss" in r], [r for r in lines if "eval_loss" in r]

    return read


@pytest.fixture(scope="session")
def losses(records):
    """The (step, loss, gradient norm) of every train line of a run folder, in the file's order."""

    def read(folder):
        return [(r["step"], r["loss"], r["grad_norm"]) for r in records(folder)[0]]

    return read
