#!/usr/bin/env bash
# Stage 5 on two nodes of a Slurm cluster, requeued until it is complete. Stages 1 to 4 come before.
#
#     sbatch pipelines/slurm.sh --run-dir RUN FLAGS    # in the repository; FLAGS as of 05_prune_train.py
#
# RUN is on a disk that all nodes share. Ten minutes before the time limit Slurm sends this script USR1, srun
# passes it on to torchrun on each node, and torchrun to its ranks: they finish the step and save. Then the
# job is requeued, and the same command goes on. A job that ends by itself, or fails, is not requeued.
#
#   NPROC   processes on each node (8)       PORT  of the first node (29500)
#   PYTHON  interpreter (python)             resources: as options of sbatch, before the script's name
#
#SBATCH --job-name=prune-train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
requeue() { trap '' USR1; exec scontrol requeue "$SLURM_JOB_ID"; }
trap requeue USR1  # before the step there is nothing to save
cd "${SLURM_SUBMIT_DIR:-.}"
for word; do
  [ "$word" != --force ] ||
    { echo "error: --force: expected none, as each requeue would start over, found it" >&2; exit 2; }
done
NODES=$(scontrol show hostnames "$SLURM_JOB_NODELIST")  # a line each; the first is the head
# Slurm 22.05 to 23.02: srun gives a task one CPU unless it is told itself how many sbatch was asked for.
# 540 of the 600 seconds are for the step and the checkpoint, which all ranks complete before one exits.
PYTHON=${PYTHON:-python} srun ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
  --kill-on-bad-exit=1 bash -c 'exec "$PYTHON" -m torch.distributed.run \
  --node-rank "$SLURM_NODEID" "$@"' torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "${NPROC:-8}" \
  --master-addr "${NODES%%$'\n'*}" --master-port "${PORT:-29500}" --shutdown-timeout 540 \
  --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGUSR1 05_prune_train.py "$@" &
STEP=$! STOPPED= CODE=0
trap '[ -n "$STOPPED" ] || kill -USR1 "$STEP" || :; STOPPED=1' USR1  # at a second one torchrun would not wait
while kill -0 "$STEP" 2> /dev/null; do wait "$STEP" || :; done  # a signal ends wait, not the step
wait "$STEP" || CODE=$?
[ -z "$STOPPED" ] || [ "$CODE" = 0 ] || requeue
exit "$CODE"
