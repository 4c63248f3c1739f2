"""Memory of configs on a GPU cluster, by XLA's own count, compiled without any GPU; prints JSON.

    pip install --no-deps jax-cuda12-plugin==<jax's version> jax-cuda12-pjrt==<jax's version> \\
        nvidia-cudnn-cu12 nvidia-cuda-nvcc-cu12
    JAX_PLATFORMS=cpu python benchmarks/gpu_memory.py configs/gpt_7b_128k_32gpu.yaml [--key value …]

The step is the one that `train.py` runs, for A100-SXM4-80GB in nodes of eight. Sizes are bytes per
device. NCCL's buffers, the CUDA context and autotuning's choices are not in them.
"""

import json
import sys

from gpu_targets import A100, gpu_cluster

from ulysses_jax.parallel.mesh import make_mesh
from ulysses_jax.train.command_line import parse, run_command_line
from ulysses_jax.train.config import Config
from ulysses_jax.train.trainer import Trainer


def measure(config: Config) -> dict[str, int]:
    """Compiles the step of `config`, whose mesh.data is not −1; returns its sizes in bytes."""
    count = config.mesh.data * config.mesh.seq
    mesh = make_mesh(config.mesh.data, config.mesh.seq, gpu_cluster(A100, count).devices)
    memory = Trainer.of(config, mesh).compile().memory_analysis()
    return {
        "devices": count,
        "arguments": memory.argument_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "peak": memory.peak_memory_in_bytes,
    }


def main() -> int:
    """Measures the config that the arguments of `train.py` describe."""
    config = parse(["--config", *sys.argv[1:]], prog="gpu_memory.py")
    print(json.dumps({"config": sys.argv[1], **measure(config)}))
    return 0


if __name__ == "__main__":
    sys.exit(run_command_line(main))
