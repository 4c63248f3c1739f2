"""What a trained run is used for: generating text, and evaluating on any data and mesh."""

from typing import Any

from ulysses_jax.model.config import Architecture
from ulysses_jax.parallel.backend import Processes, start_backend
from ulysses_jax.parallel.mesh import DATA, make_mesh
from ulysses_jax.parallel.sharding import ShardingPolicy
from ulysses_jax.train.checkpoint import Checkpoints
from ulysses_jax.train.command_line import load
from ulysses_jax.train.config import Config, EvaluateConfig, GenerateConfig, MeshConfig
from ulysses_jax.train.corpus import is_text, open_corpus
from ulysses_jax.train.evaluation import Evaluator
from ulysses_jax.train.identity import model_identity
from ulysses_jax.train.run_folder import RunFolder
from ulysses_jax.train.sampling import decode, encode, printable, sample_text
from ulysses_jax.train.state import sharding_policy
from ulysses_jax.train.step import Program
from ulysses_jax.train.terminal import make_console


def generate_text(config: GenerateConfig) -> int:
    """Prints the prompt and its continuation by the newest checkpoint of a run, on one device.

    Raises:
      ValueError: the folder holds no usable run, or the prompt does not fit the model.
    """
    folder, run = _open_run(config.run_dir)
    start_backend(int(run.mesh.simulated_devices > 0), Processes())
    arch, policy, params = _restored(folder, run, MeshConfig(data=1, seq=1), stage=0)
    text = is_text(run.data.source)
    prompt = encode(config.prompt, text)
    sampled = sample_text(
        arch, policy, params, prompt, config.tokens, config.temperature, config.seed
    )
    whole = printable(decode(prompt, text) + decode(sampled, text))
    make_console().print(whole, highlight=False, markup=False, soft_wrap=True)
    return 0


def evaluate_run(config: EvaluateConfig) -> int:
    """Prints the held-out loss of a run's newest checkpoint on `data.*` and `mesh.*`.

    Raises:
      ValueError: the folder holds no usable run, or data or mesh do not fit it.
    """
    folder, run = _open_run(config.run_dir)
    if is_text(config.data.source) != is_text(run.data.source):
        raise ValueError(
            f"data.source is {config.data.source}, but the run was trained on {run.data.source}; "
            "a text is bytes and a .bin a tokenizer's tokens, so give data of the run's own kind"
        )
    start_backend(config.mesh.simulated_devices, Processes())
    arch, policy, params = _restored(folder, run, config.mesh, stage=3)
    corpus = open_corpus(config.data)
    data = policy.mesh.shape[DATA]
    rows = data * max(run.train.global_batch // data, 1)
    program = Program(arch, policy, run.train.remat, run.train.loss_chunk)
    result = Evaluator.of(program, corpus.heldout, rows, config.data.document_mask)(params)
    console = make_console()
    console.print(f"data: {corpus.description}", highlight=False, markup=False)
    console.print(
        f"held-out loss {result.loss:.6f}, {result.bits_per_token:.4f} bits per token over "
        f"{result.tokens:,} tokens",
        highlight=False,
    )
    return 0


def _open_run(run_dir: str) -> tuple[RunFolder, Config]:
    folder = RunFolder(run_dir)
    return folder, load(folder.config)


def _restored(
    folder: RunFolder, run: Config, mesh: MeshConfig, stage: int
) -> tuple[Architecture, ShardingPolicy, dict[str, Any]]:
    """The run's newest parameters on another mesh, read without disturbing a run in progress."""
    arch = run.model.architecture(run.train.seq_len)
    policy = sharding_policy(arch, make_mesh(mesh.data, mesh.seq), stage)
    identity = model_identity(arch, policy)
    checkpoints = Checkpoints(folder.checkpoints, keep=1, identity=identity, read_only=True)
    try:
        _, restored = checkpoints.restore({"params": policy.stored_params()})
    finally:
        checkpoints.close()
    return arch, policy, restored["params"]
