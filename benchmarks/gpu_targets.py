"""Descriptions of NVIDIA GPUs, for compiling programs for them without having one."""

from jax.experimental.topologies import TopologyDescription, get_topology_desc

# GpuTargetConfigProtos, from NVIDIA's data sheets and CUDA's occupancy tables.
_COMMON = """
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 28 patch: 0 }
runtime_version { major: 12 minor: 9 patch: 0 }
gpu_device_info {
  threads_per_warp: 32  threads_per_block_limit: 1024  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  driver_version: "13.0.0"  runtime_version: "12.9.0"  compile_time_toolkit_version: "12.9.0"
  dnn_version: "9.28.0"
"""

A100 = f"""{_COMMON}
  name: "NVIDIA A100-SXM4-80GB"
  cuda_compute_capability {{ major: 8 minor: 0 }}
  core_count: 108  fpus_per_core: 64  clock_rate_ghz: 1.41
  shared_memory_per_core: 167936  shared_memory_per_block_optin: 166912
  device_memory_size: 85100068864  memory_bandwidth: 2039040000000  l2_cache_size: 41943040
  device_interconnect_info {{ active_links: 12 }}
}}
device_description_str: "NVIDIA A100-SXM4-80GB"
"""

H100 = f"""{_COMMON}
  name: "NVIDIA H100 80GB HBM3"
  cuda_compute_capability {{ major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }}
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98
  shared_memory_per_core: 233472  shared_memory_per_block_optin: 232448
  device_memory_size: 84942979072  memory_bandwidth: 3352320000000  l2_cache_size: 52428800
  device_interconnect_info {{ active_links: 18 }}
}}
device_description_str: "NVIDIA H100 80GB HBM3"
"""

GPUS_PER_NODE = 8


def gpu_cluster(target: str, count: int) -> TopologyDescription:
    """The topology of `count` GPUs of the kind `target` (`A100` or `H100`), eight to a node.

    Needs `jax-cuda12-plugin` and `jax-cuda12-pjrt` of jax's version, and JAX_PLATFORMS=cpu.
    """
    nodes = max(count // GPUS_PER_NODE, 1)
    return get_topology_desc(
        platform="cuda",
        target_config=target,
        topology=f"{nodes}x1x{min(count, GPUS_PER_NODE)}",
    )
