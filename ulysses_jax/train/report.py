"""What a finished run shows: its loss beside a bigram model's, the plot, and a sampled text."""

from typing import Any

import jax
from rich.console import Console
from rich.text import Text

from ulysses_jax.data.bigram import bigram_entropy
from ulysses_jax.data.store import Corpus
from ulysses_jax.train.config import Config
from ulysses_jax.train.corpus import is_text
from ulysses_jax.train.loss_plot import plot_losses
from ulysses_jax.train.metrics import read_lines
from ulysses_jax.train.run_folder import RunFolder, replace_text
from ulysses_jax.train.sampling import decode, printable, sample_text
from ulysses_jax.train.step import Program

# How much of the held-out part the sampled text continues, and how boldly.
_PROMPT_TOKENS = 64
_TEMPERATURE = 0.8


def finish(
    config: Config,
    program: Program,
    corpus: Corpus,
    folder: RunFolder,
    params: dict[str, Any],
    console: Console,
) -> None:
    """Samples a text, writes `loss.png` and `sample.txt`, and prints where all is.

    Every process takes part in the sampling; the first one writes.
    """
    text = is_text(config.data.source)
    length = program.arch.max_seq_len
    prompt = corpus.heldout.tokens[: min(_PROMPT_TOKENS, length // 2)].tolist()
    tokens = min(config.train.sample_tokens, length - len(prompt))
    sampled: list[int] = []
    if prompt and tokens > 0:
        with console.status("sampling a text"):
            sampled = sample_text(
                program.arch, program.policy, params, prompt, tokens, _TEMPERATURE, config.seed
            )
    if jax.process_index() > 0:
        return
    records = read_lines(folder.metrics)
    references = {}
    if text:
        bigram = references["bigram model"] = bigram_entropy(corpus.train, corpus.heldout)
        last = next(r for r in reversed(records) if "bits_per_token" in r)["bits_per_token"]
        console.print(
            f"held out: [bold]{last:.3f} bits per byte[/bold]; a bigram model of the same files: "
            f"{bigram:.3f}",
            highlight=False,
        )
    plot_losses(records, references, folder.loss_plot)
    if sampled:
        start, continued = decode(prompt, text), decode(sampled, text)
        replace_text(folder.sample, start + continued)
        console.rule("sampled continuation", align="left")
        console.print(Text.assemble((printable(start), "dim"), printable(continued)))
        console.rule()
    example = "--prompt 'def ' --tokens 100" if text else "--prompt 'ID ID …' --tokens 100"
    for line in (
        f"run folder: {folder.path}  (loss plot: {folder.loss_plot})",
        f"try: python -m ulysses_jax generate --run_dir {folder.path} {example}",
    ):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
