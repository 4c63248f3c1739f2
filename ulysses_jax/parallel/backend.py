"""Starting JAX's backend: simulated devices, `jax.distributed`, and the XLA options for GPUs."""

import os
import sys
import time
from dataclasses import dataclass

import jax

# Environment variables that say how many tasks a launcher started, and the only ones read. On
# Kubernetes nothing says it.
_TASK_COUNTS = {"SLURM_NTASKS": "Slurm", "OMPI_COMM_WORLD_SIZE": "Open MPI"}

# What overlaps the exchanges and weight gathers with computation. Checked by XLA when it compiles:
# an option that a later release drops is an error, not a silent loss.
_GPU_OPTIONS: dict[str, bool | int] = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_highest_priority_async_stream": True,
    # Starts the next layer's gather during this layer's computation, across loop iterations.
    "xla_gpu_enable_pipelined_all_gather": True,
    "xla_gpu_enable_pipelined_reduce_scatter": True,
    "xla_gpu_enable_pipelined_all_reduce": True,
    # Gathers of one layer's weights are joined up to this size, in bytes.
    "xla_gpu_all_gather_combine_threshold_bytes": 128 * 2**20,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 128 * 2**20,
}

# Simulated devices share a few cores, so one may wait long for another at a collective. XLA would
# abort the process after 40 s.
_CPU_OPTIONS: dict[str, bool | int] = {
    "xla_cpu_collective_call_terminate_timeout_seconds": 3600,
    "xla_cpu_collective_timeout_seconds": 3600,
}

_COORDINATOR_STAYS_S = 10


@dataclass(frozen=True)
class Processes:
    """The processes of a run; a None is found out from the launcher.

    Attributes:
      coordinator: host:port of process 0.
      count: how many processes there are.
      index: which of them this is.
      detect: whether to join the processes that Slurm, Open MPI or Kubernetes started.
    """

    coordinator: str | None = None
    count: int | None = None
    index: int | None = None
    detect: bool = False


def start_backend(simulated_devices: int, processes: Processes) -> None:
    """Prepares JAX before its first use; nothing may have touched a device yet.

    Args:
      simulated_devices: CPU devices to simulate in each process; 0: use the real devices.
      processes: joins them with `jax.distributed.initialize` if there is more than one.

    Raises:
      ValueError: the processes cannot be found or joined.
    """
    if simulated_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", simulated_devices)
    if processes.coordinator is not None or processes.detect:
        print(f"joining the run at {processes.coordinator or 'the launcher'}", file=sys.stderr)
        try:
            jax.distributed.initialize(
                coordinator_address=processes.coordinator,
                num_processes=processes.count,
                process_id=processes.index,
            )
        except (ValueError, RuntimeError) as error:
            raise ValueError(
                f"could not join the run's processes at {processes.coordinator or 'the launcher'}: "
                f"{error}; check distributed.coordinator, distributed.num_processes and "
                "distributed.process_id"
            ) from error


def require_joined() -> None:
    """Refuses to train alone where a launcher started several tasks.

    Raises:
      ValueError: a launcher started several tasks, and this process has not joined the others.
    """
    if jax.distributed.is_initialized():
        return
    for variable, launcher in _TASK_COUNTS.items():
        started = os.environ.get(variable, "1")
        if started.isdecimal() and int(started) > 1:
            raise ValueError(
                f"{launcher} started {started} tasks ({variable}), but nothing joins them, so each "
                "would train alone; set distributed.detect = true, or start a single task"
            )


def leave_at_once(code: int) -> None:
    """Ends this process now if it is one of several; otherwise does nothing.

    A process that failed alone would wait at its exit for the others, and they for it. The first
    one leaves last: it holds the coordinator, without which JAX aborts the others before they can
    say what they failed with.
    """
    if jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        if jax.process_index() == 0:
            time.sleep(_COORDINATOR_STAYS_S)
        os._exit(code)


def compiler_options(device: jax.Device) -> dict[str, bool | int]:
    """XLA options for `jax.jit` of programs that run on devices like `device`."""
    if device.platform in ("gpu", "cuda"):
        return dict(_GPU_OPTIONS)
    return dict(_CPU_OPTIONS) if device.platform == "cpu" else {}


def process_table() -> list[tuple[int, str, int]]:
    """(process index, kind of its devices, their number) of every process, in order."""
    rows = []
    for process in range(jax.process_count()):
        own = [d for d in jax.devices() if d.process_index == process]
        rows.append((process, own[0].device_kind, len(own)))
    return rows
