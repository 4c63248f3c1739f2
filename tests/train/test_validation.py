"""A run that cannot work is refused with the value, the limit and the fix."""

import pytest

from ulysses_jax.train.command_line import parse
from ulysses_jax.train.config import ConfigError


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            "--train.seq_len 100 --mesh.seq 8",
            "train.seq_len is 100, which mesh.seq = 8 does not divide; use 96 or 104",
        ),
        (
            "--train.global_batch 6 --train.accumulate 2 --mesh.data 2",
            "train.global_batch is 6, which mesh.data x train.accumulate = 2 x 2 does not divide; "
            "use 4 or 8",
        ),
        (
            "--train.global_batch 6 --mesh.simulated_devices 8 --mesh.seq 2",
            "train.global_batch is 6, which mesh.data x train.accumulate = 4 x 1 does not divide; "
            "use 4 or 8",
        ),
        (
            "--train.global_batch 3 --train.accumulate 2",
            "train.global_batch is 3, which mesh.data x train.accumulate = 1 x 2 does not divide; "
            "use 2 or 4",
        ),
        (
            "--mesh.data 4 --mesh.seq 4 --mesh.simulated_devices 8",
            "mesh.data x mesh.seq is 4 x 4 = 16 devices, but mesh.simulated_devices gives 8; "
            "simulate more, or use a mesh of at most 8",
        ),
        (
            "--mesh.seq 4 --mesh.simulated_devices 6",
            "mesh.seq is 4, which does not divide the 6 simulated devices; use mesh.seq = 3 or 6",
        ),
        ("--mesh.data 0", "mesh.data is 0; use 1 or more, or -1 for all that are left"),
        ("--mesh.seq 0", "mesh.seq is 0; use 1 or more"),
        ("--train.zero_stage 4", "train.zero_stage is 4; use 0, 1, 2 or 3"),
        ("--train.steps -5", "train.steps is -5; use 1 or more"),
        ("--train.eval_every -1", "train.eval_every is -1; use 0 or more"),
        ("--checkpoint.keep 0", "checkpoint.keep is 0; use 1 or more"),
        ("--seed -1", "seed is -1; use a number from 0 to 4294967295"),
        ("--run_dir=", "run_dir is ''; use the path of a folder"),
        ("--data.source=", "data.source is ''; use python-stdlib or the path of a file or folder"),
        (
            "--data.document_end 256",
            "data.document_end is 256; use a token id from 0 to 255 (model.vocab_size = 256)",
        ),
        ("--train.steps 1:30", "train.steps is '1:30', expected an integer"),
        ("--optimizer.learning_rate 1e39", "optimizer.learning_rate is 1e+39; use a finite number"),
        ("--train.seq_len 3000000000", "train.seq_len is 3000000000; use 2147483647 or less"),
        (
            "--model.vocab_size 99999999999",
            "model.vocab_size is 99999999999; use 2147483647 or less",
        ),
        (
            "--data.source . --run_dir runs/x --data.cache_dir ../cache",
            "run_dir runs/x lies in data.source ., so the run would train on its own files; give "
            "run_dir a path outside",
        ),
        ("--run_dir a\0b", "run_dir is 'a\\x00b', which holds a zero byte; use another path"),
        (
            "--data.document_mask --data.source tokens.bin",
            "data.document_mask is true, but nothing says where the documents of tokens.bin end; "
            "set data.document_end to the token that ends each (50256 in GPT-2's vocabulary), or "
            "data.document_mask to false",
        ),
        (
            "--optimizer.learning_rate .nan",
            "optimizer.learning_rate is nan; use a finite number above 0",
        ),
        (
            "--optimizer.learning_rate .inf",
            "optimizer.learning_rate is inf; use a finite number above 0",
        ),
        (
            "--optimizer.learning_rate 1e999",
            "optimizer.learning_rate is inf; use a finite number above 0",
        ),
        ("--optimizer.beta2 1", "optimizer.beta2 is 1.0; use a finite number from 0 to below 1"),
        ("--model.preset gpt3", "model.preset is 'gpt3'; did you mean gpt2?"),
        (
            "--distributed.coordinator localhost",
            "distributed.coordinator is 'localhost'; use host:port, such as 10.0.0.1:7777",
        ),
        (
            "--distributed.coordinator a:1 --distributed.num_processes 2",
            "distributed.coordinator is 'a:1', but distributed.process_id is null; set it, or set "
            "distributed.detect under Slurm, Open MPI or Kubernetes",
        ),
        (
            "--distributed.num_processes 2 --distributed.process_id 2",
            "distributed.process_id is 2; use a number from 0 to 1",
        ),
        (
            "--distributed.num_processes 2",
            "distributed.num_processes is 2 and distributed.process_id None, but nothing says",
        ),
    ],
)
def test_value_that_cannot_work_is_refused_with_limit_and_fix(argv, message):
    with pytest.raises(ConfigError) as caught:
        parse(argv.split())
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "argv",
    [
        "--distributed.detect",
        "--distributed.coordinator 127.0.0.1:7 --distributed.num_processes 2 "
        "--distributed.process_id 1 --mesh.simulated_devices 2 --mesh.data 4",
        "--mesh.simulated_devices 8 --mesh.data 1 --mesh.seq 4",
        "--optimizer.warmup_steps 5000",
    ],
)
def test_unusual_but_possible_run_is_accepted(argv):
    parse(argv.split())
