"""The largest run compiles here: gpt-7b at a million tokens on 256 simulated devices."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
ARGUMENTS = [
    "--config=configs/gpt_7b_128k_32gpu.yaml",
    "--train.seq_len=1048576",
    "--train.global_batch=8",
    "--mesh.data=8",
    "--mesh.seq=32",
    "--mesh.simulated_devices=256",
    "--dry_run",
]
# Runs train.py with the arguments it gets, then prints the most memory it ever held, in KiB.
MEASURED = """
import resource, runpy, sys
try:
    runpy.run_path("train.py", run_name="__main__")
finally:
    print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_seven_billion_at_a_million_tokens_on_256_devices_compiles(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", MEASURED, *ARGUMENTS, f"--run_dir={tmp_path / 'run'}"],
        cwd=REPOSITORY,
        env=os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "6,650,015,744 parameters" in run.stdout
    assert "data 8 × seq 32 = 256" in run.stdout
    assert "all-to-all in 1 loop(s)" in run.stdout
    # The parameters alone would take 25 GiB.
    assert int(run.stdout.split("peak")[-1]) < 2 * 2**20
    assert not (tmp_path / "run").exists()
