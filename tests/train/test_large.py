"""The paper's runs compile on this machine, with nothing of them materialised."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
MILLION = [
    *["--config=configs/gpt_7b_128k_32gpu.yaml", "--train.seq_len=1048576"],
    *["--train.global_batch=8", "--mesh.data=8", "--mesh.seq=32"],
]
# Compiling a step takes seconds whatever its size, so these stand for the others of `configs/`.
CLUSTERS = ["gpt_1.2b_1m_256gpu", "gpt_30b_128k_64gpu"]

# Compiles the steps of all given configs on 256 devices and prints what it found, then the most
# memory that it ever held, in KiB. A process of its own: this one has eight devices.
COMPILES = """
import json, resource, sys
from ulysses_jax.parallel.backend import Processes, start_backend
from ulysses_jax.parallel.collectives import collectives
from ulysses_jax.parallel.mesh import make_mesh
from ulysses_jax.train.command_line import parse
from ulysses_jax.train.run import run
from ulysses_jax.train.trainer import Trainer

start_backend(256, Processes())
config = parse(json.loads(sys.argv[1]))
trainer = Trainer.of(config, make_mesh(config.mesh.data, config.mesh.seq))
compiled = trainer.compile()
found = [(c.kind, c.elements, c.loops, c.runs) for c in collectives(compiled.as_text())]
for argv in json.loads(sys.argv[2]):
    assert run(parse(argv)) == 0
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([found, compiled.memory_analysis().temp_size_in_bytes, peak]))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    dry = [[f"--config=configs/{n}.yaml", "--dry_run", f"--run_dir={folder}"] for n in CLUSTERS]
    result = subprocess.run(
        [sys.executable, "-c", COMPILES, json.dumps(MILLION), json.dumps(dry)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert not folder.exists(), "a dry run made a run folder"
    found, temporary, peak = json.loads(result.stdout.splitlines()[-1])
    return result.stdout, found, temporary, peak


def test_cluster_configs_pass_a_dry_run(compiled):
    printed, *_ = compiled
    assert printed.count("dry run: nothing was trained") == len(CLUSTERS)


def test_seven_billion_at_a_million_tokens_on_256_devices_compiles_without_allocating(compiled):
    _, found, _, peak = compiled
    # The parameters alone would take 25 GiB.
    assert peak < 3 * 2**20
    exchanges = [entry for entry in found if entry[0] == "all-to-all"]
    # q, k and v together, and out, of a device: one row's 32768 tokens × 4096 each.
    sizes = [3 * 32768 * 4096, 32768 * 4096]
    assert sorted(exchanges, reverse=True) == [
        ["all-to-all", size, 1, 32] for size in sizes for _ in ("forward", "backward")
    ]


def test_no_device_of_the_256_ever_holds_the_model_or_the_scores(compiled):
    _, found, temporary, _ = compiled
    largest_gather = max(entry[1] for entry in found if entry[0] == "all-gather")
    # The table, and not the 6.65 billion parameters.
    assert largest_gather == 50257 * 4096
    scores = math.prod((1048576, 1048576)) * 2
    assert temporary < scores / 10
