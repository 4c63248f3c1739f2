"""The environment of the benchmark's own in which the peers live: made, filled, and listed."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = REPOSITORY / ".bench-venv"

# Each installed by itself, so that one that cannot be had leaves the others.
_PEERS = (
    ["torch==2.13.0"],
    ["deepspeed==0.19.8"],
    ["ringattention==0.1.2"],
    ["tokamax==0.0.12"],
    # The exchange, for the peers that stand inside it.
    ["jaxtyping", "--no-deps", "--editable", str(REPOSITORY)],
)


def install() -> int:
    """Makes the environment and installs every peer into it; returns how many could not be had."""
    if not (ENVIRONMENT / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
        # It ignores itself, so the repository need not know of it.
        (ENVIRONMENT / ".gitignore").write_text("*\n")
    failed = 0
    for requirement in _PEERS:
        print("installing", " ".join(requirement), flush=True)
        command = [
            *[str(ENVIRONMENT / "bin" / "python"), "-m", "pip", "install", "--quiet"],
            *["--disable-pip-version-check", "--constraint", str(REPOSITORY / "constraints.txt")],
            *requirement,
        ]
        # DeepSpeed compiles nothing ahead and looks for no GPU.
        environment = os.environ | {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
        if subprocess.run(command, env=environment).returncode:
            print("could not install", " ".join(requirement), flush=True)
            failed += 1
    return failed
