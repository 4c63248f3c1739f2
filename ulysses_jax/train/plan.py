"""What a run will put on each device, worked out before anything is allocated."""

import math
from dataclasses import dataclass
from typing import Any

import jax
from rich.table import Table

from ulysses_jax.model.config import Architecture
from ulysses_jax.parallel.collectives import collectives
from ulysses_jax.parallel.heads import HeadPlan
from ulysses_jax.parallel.mesh import DATA, SEQ
from ulysses_jax.parallel.sharding import ShardingPolicy
from ulysses_jax.train.config import Config, OptimizerName

_FLOAT32 = 4
_MOMENTS: dict[OptimizerName, int] = {"adamw": 2, "sgd": 0}


@dataclass(frozen=True)
class StatePlan:
    """Bytes of training state on each device.

    Attributes:
      parameters, gradients, moments: bytes of each.
      even_share: what state split without padding or leftovers would take in all.
      whole: names of the parameters that are left whole on every device, at stages above 0.
    """

    parameters: int
    gradients: int
    moments: int
    even_share: float
    whole: tuple[str, ...]

    @property
    def total(self) -> int:
        """Bytes of all three."""
        return self.parameters + self.gradients + self.moments


def plan_state(policy: ShardingPolicy, optimizer: OptimizerName) -> StatePlan:
    """Counts the state that `policy` puts on each device, exactly."""
    leaves = jax.tree_util.tree_leaves_with_path(policy.placements)
    ways, stage = policy.mesh.size, policy.stage

    def stored_bytes(split: bool) -> int:
        return sum(
            _FLOAT32 * math.prod(p.stored) // (ways if split and p.dim is not None else 1)
            for _, p in leaves
        )

    moments = _MOMENTS[optimizer]
    logical = _FLOAT32 * sum(math.prod(p.logical) for _, p in leaves)
    shares = [1 / ways if stage >= first else 1.0 for first in (3, 2, 1)]
    return StatePlan(
        parameters=stored_bytes(stage >= 3),
        gradients=stored_bytes(stage >= 2),
        moments=moments * stored_bytes(stage >= 1),
        even_share=logical * (shares[0] + shares[1] + moments * shares[2]),
        whole=tuple(
            jax.tree_util.keystr(path, simple=True, separator=".")
            for path, p in leaves
            if p.dim is None and stage > 0 and ways > 1
        ),
    )


def kept_activation_bytes(config: Config, arch: Architecture, policy: ShardingPolicy) -> int | None:
    """Bytes that the forward pass keeps for the backward pass; None for remat `none`.

    Each layer's input, and with `exchange` q, k, v, the output before and after its exchange and
    the log-sum-exp (see `remat.py`).
    """
    tokens = _device_rows(config, policy) * config.train.seq_len // policy.mesh.shape[SEQ]
    size = 2 if arch.dtype == "bfloat16" else 4
    per_token = arch.embed_dim * size
    if config.train.remat == "none":
        return None
    if config.train.remat == "exchange":
        heads = HeadPlan.of(arch.num_heads, arch.num_kv_heads, policy.mesh.shape[SEQ])
        queries = heads.ways * heads.own_heads
        kept = 2 * queries + 2 * queries // heads.sharing
        # On one device nothing is exchanged, so the output is kept once.
        kept += arch.num_heads if heads.ways > 1 else 0
        # Two statistics of the softmax a query and head.
        per_token += kept * arch.head_dim * size + queries * 2 * _FLOAT32
    return arch.num_layers * tokens * per_token


def _device_rows(config: Config, policy: ShardingPolicy) -> int:
    """Sequences of which a device holds its part at a time."""
    return config.train.global_batch // config.train.accumulate // policy.mesh.shape[DATA]


def plan_table(config: Config, arch: Architecture, policy: ShardingPolicy) -> Table:
    """The plan as a table for people."""
    mesh, train = policy.mesh, config.train
    data, seq = mesh.shape[DATA], mesh.shape[SEQ]
    rows = _device_rows(config, policy)
    tokens = rows * train.seq_len // seq
    state = plan_state(policy, config.optimizer.name)
    heads = HeadPlan.of(arch.num_heads, arch.num_kv_heads, seq)
    table = Table(title="plan", show_header=False, title_justify="left")
    device = mesh.devices.flat[0]
    idle = jax.device_count() - mesh.size
    table.add_row(
        "mesh",
        f"data {data} × seq {seq} = {mesh.size} devices ({device.device_kind})"
        + (f"; {idle} more devices stay idle" if idle else ""),
    )
    table.add_row(
        "model",
        f"{config.model.preset}: {arch.num_parameters():,} parameters, {arch.num_layers} layers × "
        f"{arch.embed_dim}, {arch.num_heads} heads, {arch.num_kv_heads} kv heads, {arch.dtype}",
    )
    table.add_row(
        "step",
        f"{train.global_batch} × {train.seq_len:,} tokens"
        + (f" in {train.accumulate} parts" if train.accumulate > 1 else "")
        + f"; a device holds {rows} × {train.seq_len // seq:,} of them at a time",
    )
    table.add_row(
        "attention",
        f"a device attends over {train.seq_len:,} tokens with {heads.own_heads} of "
        f"{heads.heads} heads{_waste(heads)}; its exchanges hold "
        f"{_bytes(_exchange_bytes(heads, tokens, arch))} a layer, forward",
    )
    table.add_row(
        "state",
        f"ZeRO-{policy.stage}, per device: parameters {_bytes(state.parameters)}, gradients "
        f"{_bytes(state.gradients)}, moments {_bytes(state.moments)}; in all "
        f"{_bytes(state.total)}, {state.total / state.even_share - 1:+.1%} against an even split",
    )
    table.add_row("left whole", ", ".join(state.whole) or "no parameter")
    kept = kept_activation_bytes(config, arch, policy)
    table.add_row(
        "activations",
        f"remat {train.remat}: "
        + ("every activation is kept" if kept is None else f"{_bytes(kept)} kept per device"),
    )
    return table


def _waste(heads: HeadPlan) -> str:
    if heads.waste == 1:
        return ""
    return f" ({heads.waste:.2f} × the model's, as {heads.ways} devices do not divide them)"


def _exchange_bytes(heads: HeadPlan, tokens: int, arch: Architecture) -> int:
    if heads.ways == 1:
        return 0
    return heads.elements_moved(tokens, arch.head_dim) * (2 if arch.dtype == "bfloat16" else 4)


def compiled_table(compiled: Any) -> Table:
    """Memory and collectives of a compiled step, as XLA states them for one device."""
    table = Table(title="compiled step, per device", show_header=False, title_justify="left")
    memory = compiled.memory_analysis()
    table.add_row("state and batch", _bytes(memory.argument_size_in_bytes))
    # The CPU compiler widens bfloat16, and schedules otherwise than a GPU's.
    table.add_row("temporary, on this backend", _bytes(memory.temp_size_in_bytes))
    groups: dict[tuple[str, bool], list[int | None]] = {}
    sizes: dict[tuple[str, bool], int] = {}
    for found in collectives(compiled.as_text()):
        key = (found.kind, found.loops > 0)
        groups.setdefault(key, []).append(found.runs)
        sizes[key] = sizes.get(key, 0) + found.elements * (found.runs or 1)
    for (kind, inside), runs in sorted(groups.items()):
        place = "inside the layer loops" if inside else "outside the layer loops"
        times = sum(n or 1 for n in runs)
        table.add_row(
            f"{kind} {place}",
            f"{len(runs)} instructions, run {times} times, {sizes[kind, inside]:,} result elements",
        )
    return table


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
