#!/usr/bin/env bash
# Starts a config on a Slurm cluster with one process a GPU, from the repository's root:
#
#   sbatch --nodes=4 launch/slurm.sh configs/gpt_7b_128k_32gpu.yaml [--key value …]
#
# Nodes × 8 must be the mesh of the config. Slurm's SIGTERM before the time limit makes the run save
# and end; submitted again, it continues there (the configs set checkpoint.resume: auto).
# The run folder and the data cache must lie on a file system that all nodes share. PYTHON names the
# interpreter, .venv/bin/python if unset.
#SBATCH --job-name=ulysses_jax
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --exclusive
#SBATCH --signal=TERM@300
#SBATCH --output=%x-%j.log
set -euo pipefail

if [[ $# -lt 1 || ! -f $1 ]]; then
  echo "usage: sbatch --nodes=N launch/slurm.sh CONFIG.yaml [--key value …]" >&2
  exit 2
fi

exec srun --kill-on-bad-exit=1 "${PYTHON:-.venv/bin/python}" train.py --config "$1" \
  --distributed.detect true "${@:2}"
