#!/bin/bash
# train-a run, written by `mcore-rl submit`
#SBATCH '--job-name=train-a run'
#SBATCH '--output=/shared/runs/a run/launch/slurm_%j.log'
#SBATCH --open-mode=append
#SBATCH --chdir=/
#SBATCH --signal=B:USR1@300
#SBATCH --no-requeue
#SBATCH --time=4:00:00
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
set -u
export NCCL_IB_HCA=mlx5
export GREETING='it'"'"'s on'
module load cuda

# Names and addresses of the nodes, in one order.
nodes=$(scontrol show node "$SLURM_JOB_NODELIST" --oneliner)
names=$(sed -n 's/^NodeName=\([^ ]*\) .*/\1/p' <<< "$nodes" | paste -sd,)
addresses=$(sed -n 's/.* NodeAddr=\([^ ]*\) .*/\1/p' <<< "$nodes" | paste -sd,)
attempt='/shared/runs/a run/launch'/job_${SLURM_JOB_ID}_${SLURM_RESTART_COUNT:-0}
mkdir -p "$attempt"

# An agent on each node brings it into Ray; the first one runs the command. A signal to this script
# becomes a file: SLURM would send it to Ray's processes as well.
trap 'touch "$attempt/stop"' USR1
srun --kill-on-bad-exit=1 --ntasks-per-node=1 --container-image=/images/mcore_rl.sqsh --container-mounts='/shared/runs/a run:/shared/runs/a run,/data:/data' \
    bash -c 'exec python -P -m mcore_rl.cluster.node_agent --name "$SLURMD_NODENAME" --topology "${SLURM_TOPOLOGY_ADDR:-}" --num-cpus "$SLURM_CPUS_ON_NODE" "$@"' agent \
    --names "$names" --addresses "$addresses" --folder "$attempt" \
    --trainer-nodes 0 --num-gpus 8 --object-store-mib 8192 --timeout-s 600 --interface bond0 \
    -- train recipe=qwen3_235b_a22b_grpo_64_64 'eval.data=[a.parquet]' 'run.dir=/shared/runs/a run' &
while wait $!; status=$?; kill -0 $! 2> /dev/null; do :; done
# The run's own status: srun tells the highest of all tasks, also of those that it ended itself.
[ ! -e "$attempt/done.json" ] || status=$(tr -dc 0-9 < "$attempt/done.json")
exit "$status"
