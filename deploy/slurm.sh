#!/bin/bash
# Trains on 4 nodes of 8 GPUs in the image of deploy/cuda.Dockerfile: sbatch deploy/slurm.sh gpt-7b --plan auto
# Containers are started by the pyxis plugin; without it, drop the three lines with --container and install startrail.
#SBATCH --job-name=startrail
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --signal=TERM@120
set -euo pipefail

IMAGE=${IMAGE:-startrail:cuda}
RUNS=${RUNS:-/shared/runs}
mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

# startrail train saves a checkpoint on SIGTERM, and the same command resumes from it.
srun \
  --container-image "$IMAGE" \
  --container-mounts "$RUNS:$RUNS" \
  --no-container-entrypoint \
  torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 --max-restarts 3 \
  --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "${NODES[0]}:29500" \
  -m startrail.cli train "${@:-gpt-7b}" --out "$RUNS/$SLURM_JOB_NAME"
