#!/usr/bin/env bash
# Runs distgpipe under a real Slurm on this machine alone: one node that claims four CPUs, sbatch, srun --mpi=pmix with four ranks. A job is
# killed and requeued in the middle, goes on from its checkpoint, and must have the losses of a job that was left alone.
# Needs root and Debian's slurm-wlm, munge and Open MPI, which it installs with apt, and a binary that `make mpi` has built.
# usage: scripts/slurm-local.sh [BINARY]     target/release/distgpipe by default
set -euo pipefail
cd "$(dirname "$0")/.."

binary=$(realpath "${1:-target/release/distgpipe}")
[ -x "$binary" ] || { echo "slurm-local: no binary at $binary: run \`make mpi\`" >&2; exit 1; }
[ "$(id -u)" = 0 ] || { echo "slurm-local: must be root, to start munged and slurmd" >&2; exit 1; }
for package in slurmctld:slurm-wlm munged:munge mpirun:openmpi-bin; do
    command -v "${package%%:*}" >/dev/null || apt-get install -y -qq "${package##*:}" >/dev/null
done

work=$(mktemp -d)
started=()
end() {
    # What a job leaves behind would meddle with the jobs of the next Slurm here.
    scancel --full --signal=KILL --user=root 2>/dev/null || true
    scancel --user=root 2>/dev/null || true
    for _ in $(seq 100); do
        [ -n "$(squeue -h 2>/dev/null)" ] || break
        sleep 0.1
    done
    for process in "${started[@]}"; do kill "$process" 2>/dev/null || true; done
    wait 2>/dev/null || true
    rm -rf "$work"
}
trap end EXIT

# Waits for a command to succeed, for two minutes.
until_true() {
    local what=$1 tries=0
    shift
    until "$@" >/dev/null 2>&1; do
        tries=$((tries + 1))
        if ((tries > 1200)); then
            echo "slurm-local: waited two minutes for $what" >&2
            tail -n 20 "$work"/*.log >&2 || true
            exit 1
        fi
        sleep 0.1
    done
}

if ! munge -n 2>/dev/null | unmunge >/dev/null 2>&1; then
    install -d -o munge -g munge /run/munge
    runuser -u munge -- munged --foreground >"$work/munged.log" 2>&1 &
    started+=($!)
    until_true "munge" bash -c 'munge -n | unmunge'
fi

host=$(hostname -s)
export SLURM_CONF=$work/slurm.conf
mkdir -p "$work/state" "$work/spool"
cat >"$SLURM_CONF" <<CONF
ClusterName=local
SlurmctldHost=$host
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job may start again after this many seconds.
AuthInfo=cred_expire=5
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool/%n
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd-%n.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=pmix
ReturnToService=2
JobRequeue=1
KillWait=10
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname=$host Port=16818 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
echo 'CgroupPlugin=cgroup/v1' >"$work/cgroup.conf"
slurmctld -D >"$work/slurmctld.out.log" 2>&1 &
started+=($!)
slurmd -D -N n1 >"$work/slurmd.out.log" 2>&1 &
started+=($!)
until_true "the node to be idle" bash -c 'sinfo -h -o %T | grep -q idle'
sinfo

# What docs/clusters.md shows, for four ranks on one node.
cat >"$work/job.sh" <<JOB
#!/usr/bin/env bash
#SBATCH --job-name=distgpipe
#SBATCH --nodes=1
#SBATCH --ntasks=4
#SBATCH --requeue
#SBATCH --open-mode=append
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
echo "job \$SLURM_JOB_ID, start \${SLURM_RESTART_COUNT:-0}"
srun --mpi=pmix --kill-on-bad-exit=1 -n 4 "$binary" train --partitions 2 --replicas 2 --device cpu --threads 1 --epochs 6 --no-evaluate \\
    --checkpoint "\$1/saved" --checkpoint-every 5 --resume=if-any --log "\$1/log" \${2:+--faults \$2}
JOB

state() { scontrol show job "$1" -o | grep -o 'JobState=[A-Z]*' | cut -d= -f2; }
is() { [ "$(state "$1")" = "$2" ]; }
submit() { sbatch --parsable --output="$work/$1.out" "$work/job.sh" "$work/$1" "${@:2}"; }
# Without the lines of single steps and the tables.
show() { sed "s|$work|WORK|g" "$1" | grep -Ev '^saved step|^step |^worker |^link |^w[0-9]/|^$|samples/s \('; }
losses() { python3 -c 'import json, sys; [print(s["step"], s["loss"]) for s in map(json.loads, open(sys.argv[1])) if s["kind"] == "step"]' "$1"; }

# Compares the losses of a job with those of the one that was left alone.
compare() {
    diff <(losses "$work/whole/log/steps.jsonl") <(losses "$work/$1/log/steps.jsonl")
    echo "all $(losses "$work/whole/log/steps.jsonl" | wc -l) losses are those of the job that was left alone"
}

echo; echo "== a job that is left alone"
whole=$(submit whole)
until_true "job $whole to end" is "$whole" COMPLETED
show "$work/whole.out"

echo; echo "== a job that is killed and requeued"
# Slowed down, so that the kill comes in the middle; delays change no result.
requeued=$(submit requeued "w0/0>w1/0:delay=20@0")
until_true "a checkpoint" bash -c "ls -d '$work'/requeued/saved/*/ | grep -q ."
scontrol requeue "$requeued"
echo "requeued with $(losses "$work/requeued/log/steps.jsonl" | wc -l) of $(losses "$work/whole/log/steps.jsonl" | wc -l) steps in its log"
until_true "job $requeued to end" is "$requeued" COMPLETED
show "$work/requeued.out"
grep -q 'resuming after step' "$work/requeued.out" || { echo "slurm-local: expected it to resume" >&2; exit 1; }

compare requeued

echo; echo "== a job with a rank that is killed by SIGKILL; requeued after its end"
victim=$(submit victim "w0/0>w1/0:delay=20@0")
until_true "a checkpoint" bash -c "ls -d '$work'/victim/saved/*/ | grep -q ."
# The process of rank 3.
rank_3() {
    local environment process
    for environment in $(grep -lsz '^PMIX_RANK=3$' /proc/[0-9]*/environ); do
        process=${environment%/environ}
        if [ "$(readlink "$process/exe")" = "$binary" ]; then basename "$process"; fi
    done
}
rank=$(rank_3 || true)
kill -KILL "$rank"
killed=$SECONDS
until_true "job $victim to end" is "$victim" FAILED
echo "the job has failed $((SECONDS - killed)) s after rank 3 was killed"
scontrol requeue "$victim"
until_true "job $victim to end" is "$victim" COMPLETED
show "$work/victim.out"
compare victim
