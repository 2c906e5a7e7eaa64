#!/bin/bash
# train-a run, written by `mcore-rl submit`
#SBATCH '--job-name=train-a run'
#SBATCH '--output=/shared/runs/a run/launch/slurm_%j.log'
#SBATCH --open-mode=append
#SBATCH --chdir=/
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --mem=1800G
#SBATCH --gpus-per-node=8
#SBATCH --partition=h100
#SBATCH --constraint=ib
#SBATCH --mail-type=END
#SBATCH hetjob
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --mem=1800G
#SBATCH --gpus-per-node=8
#SBATCH --mail-type=END
#SBATCH --partition=l40s
set -u

# Names and addresses of the nodes, in one order.
nodes=$(scontrol show node "$SLURM_JOB_NODELIST_HET_GROUP_0" --oneliner; scontrol show node "$SLURM_JOB_NODELIST_HET_GROUP_1" --oneliner)
names=$(sed -n 's/^NodeName=\([^ ]*\) .*/\1/p' <<< "$nodes" | paste -sd,)
addresses=$(sed -n 's/.* NodeAddr=\([^ ]*\) .*/\1/p' <<< "$nodes" | paste -sd,)
attempt='/shared/runs/a run/launch'/job_${SLURM_JOB_ID}_${SLURM_RESTART_COUNT:-0}
mkdir -p "$attempt"

# An agent on each node brings it into Ray; the first one runs the command. A signal to this script
# becomes a file: SLURM would send it to Ray's processes as well.
trap 'touch "$attempt/stop"' USR1
srun --het-group=0,1 --kill-on-bad-exit=1 --ntasks-per-node=1 \
    bash -c 'exec python3 -P -m mcore_rl.cluster.node_agent --name "$SLURMD_NODENAME" --topology "${SLURM_TOPOLOGY_ADDR:-}" --num-cpus "$SLURM_CPUS_ON_NODE" "$@"' agent \
    --names "$names" --addresses "$addresses" --folder "$attempt" \
    --trainer-nodes 8 --num-gpus 8 --object-store-mib 8192 --timeout-s 600 \
    -- train recipe=qwen3_235b_a22b_grpo_64_64 'eval.data=[a.parquet]' 'run.dir=/shared/runs/a run' &
while wait $!; status=$?; kill -0 $! 2> /dev/null; do :; done
# The run's own status: srun tells the highest of all tasks, also of those that it ended itself.
[ ! -e "$attempt/done.json" ] || status=$(tr -dc 0-9 < "$attempt/done.json")

# The job is queued again and goes on if the run saved because its time was over, or failed. Status
# 2: wrong settings; 130 and 143: somebody ended the run.
failures='/shared/runs/a run/launch'/failures_$SLURM_JOB_ID
again=no
case $status in
    0 | 2 | 130 | 143) ;;
    75) again=yes ;;
    *) echo "$status" >> "$failures"; [ "$(wc -l < "$failures")" -le 3 ] && again=yes ;;
esac
if [ $again = yes ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 10 ]; then
    echo "mcore-rl: status $status; the job is queued again and goes on after its last checkpoint"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
