"""Memory of configs on a GPU cluster, by XLA's own count, compiled without any GPU; prints JSON.

    pip install --no-deps jax-cuda12-plugin==<jax's version> jax-cuda12-pjrt==<jax's version>
    JAX_PLATFORMS=cpu python benchmarks/gpu_memory.py configs/gpt_7b_128k_32gpu.yaml [--key value …]

The step is the one that `train.py` runs, for A100-SXM4-80GB in nodes of eight. Sizes are bytes per
device. NCCL's buffers, the CUDA context and autotuning's choices are not in them.
"""

import json
import sys

from jax.experimental.topologies import get_topology_desc

from ulysses_jax.parallel.mesh import make_mesh
from ulysses_jax.train.command_line import parse, run_command_line
from ulysses_jax.train.config import Config
from ulysses_jax.train.trainer import Trainer

# A GpuTargetConfigProto, from NVIDIA's data sheet and CUDA's occupancy tables.
A100 = """
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 28 patch: 0 }
runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA A100-SXM4-80GB"
gpu_device_info {
  name: "NVIDIA A100-SXM4-80GB"
  cuda_compute_capability { major: 8 minor: 0 }
  core_count: 108  fpus_per_core: 64  clock_rate_ghz: 1.41
  threads_per_warp: 32  threads_per_block_limit: 1024  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  shared_memory_per_block: 49152  shared_memory_per_core: 167936
  shared_memory_per_block_optin: 166912
  device_memory_size: 85100068864  memory_bandwidth: 2039040000000  l2_cache_size: 41943040
  device_interconnect_info { active_links: 12 }
  driver_version: "13.0.0"  runtime_version: "12.9.0"  compile_time_toolkit_version: "12.9.0"
  dnn_version: "9.28.0"
}
"""
GPUS_PER_NODE = 8


def measure(config: Config) -> dict[str, int]:
    """Compiles the step of `config`, whose mesh.data is not −1; returns its sizes in bytes."""
    count = config.mesh.data * config.mesh.seq
    nodes = max(count // GPUS_PER_NODE, 1)
    topology = get_topology_desc(
        platform="cuda",
        target_config=A100,
        topology=f"{nodes}x1x{min(count, GPUS_PER_NODE)}",
    )
    mesh = make_mesh(config.mesh.data, config.mesh.seq, topology.devices)
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
