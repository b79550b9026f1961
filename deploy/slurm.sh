#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#SBATCH --job-name=tensorlane
#SBATCH --ntasks-per-node=1
#
# A cluster from a Slurm allocation: writes the cluster.json of the nodes, starts one worker per task, waits until all
# workers are healthy, runs a command beside them and stops them when it ends.
#
#   sbatch --nodes=5 slurm.sh ./train --config {}       {} is replaced by the path of cluster.json, which is also in
#                                                        TENSORLANE_CONFIG
#   sbatch --nodes=5 slurm.sh                            no command: the workers run until the allocation ends
#   ./slurm.sh --print                                   only prints cluster.json (inside an allocation)
#   ./slurm.sh --help                                    prints this text
#
# The first TENSORLANE_PS nodes (1) are the job ps, the others the job worker; when none is left, worker is on all nodes
# too. With TENSORLANE_PS=0 all are workers. `tensorlane config from-slurm` writes the file; where each process of the
# job opens a worker of its own, it does without this script.
#
# TENSORLANE_SETTINGS   a cluster.json whose settings are kept, only its "cluster" is replaced; relative paths in
#                       "publish", "local.socket_folder" and "security.tls" start in the folder of this file; default:
#                       no settings
# TENSORLANE_PORT       port of the first worker on a node, a second one has the next; default 4000
# TENSORLANE_PROGRAM    default tensorlane
# TENSORLANE_WAIT       seconds until all must be healthy; default 120
# TENSORLANE_DIR        where cluster.json is written, seen by all nodes; default: where sbatch was called
#
# With certificates: a certificate names a task and no host, so that those of all tasks can be made before there is an
# allocation: "tensorlane cert init", "tensorlane cert issue --name ps:0 --name worker:0 ... --name client", in a folder
# that all nodes see. With {name} in "security.tls" of TENSORLANE_SETTINGS each task takes its own. client.pem is for
# this script and the command beside the workers.
#
# Failure modes: when a worker ends early, also while the command runs, the command is stopped and the job ends with the
# status of srun, after the log of the worker and the table of `tensorlane health`. When not all workers become healthy
# in time, the job ends with 1 after the table. A signal stops the command and the workers.
set -euo pipefail

die() {
    printf 'slurm.sh: %s\n' "$*" >&2
    exit 1
}

# Prints the whole cluster.json of this allocation.
cluster_json() {
    local port=${TENSORLANE_PORT:-4000} ps_count=${TENSORLANE_PS:-1} nodes=${SLURM_JOB_NUM_NODES:-1} per_host=1
    local jobs=(--tasks worker)
    [[ $ps_count =~ ^[0-9]{1,5}$ ]] || die "TENSORLANE_PS=$ps_count is no number of nodes"
    ps_count=$((10#$ps_count)) # 08 is no octal number
    ((ps_count <= nodes)) || die "TENSORLANE_PS=$ps_count, but the allocation has only $nodes nodes"
    ((ps_count == 0)) || jobs=(--tasks "ps=$ps_count" "${jobs[@]}")
    # With two tasks on each node the first ones of all nodes are counted first.
    ((ps_count < nodes)) || per_host=2
    env -u SLURM_HET_SIZE -u SLURM_STEP_ID -u SLURM_STEPID SLURM_DISTRIBUTION=cyclic \
        "${TENSORLANE_PROGRAM:-tensorlane}" config from-slurm --per-host "$per_host" "${jobs[@]}" --port "$port" \
        ${TENSORLANE_SETTINGS:+--settings "$TENSORLANE_SETTINGS"}
}

# Ends the job, because the workers have ended with this status. 0 would claim that the command has run.
end_with_workers() {
    local status=$1 program=$2
    printf 'slurm.sh: the workers have ended with status %s, see above\n' "$status" >&2
    "$program" health --config "$TENSORLANE_CONFIG" >&2 || true
    exit "$((status ? status : 1))"
}

# Waits until every worker is healthy; ends the job when they have ended or the time is over.
wait_until_healthy() {
    local program=$1 status=0 deadline=$((SECONDS + 10#${TENSORLANE_WAIT:-120}))
    until "$program" health --config "$TENSORLANE_CONFIG" > /dev/null 2>&1; do
        if ! kill -0 "$workers_pid" 2> /dev/null; then
            wait "$workers_pid" || status=$?
            end_with_workers "$status" "$program"
        fi
        if ((SECONDS >= deadline)); then
            "$program" health --config "$TENSORLANE_CONFIG" >&2 || true
            die "not all workers are healthy after ${TENSORLANE_WAIT:-120} s"
        fi
        sleep 1 & # not in the foreground: a trap would have to wait for it
        wait $!
    done
}

# Stops what still runs of the command and the workers.
stop() {
    local pid
    trap '' TERM INT
    for pid in "${running[@]}"; do
        kill -TERM "$pid" 2> /dev/null || true
    done
    wait "${running[@]}" || true
}

main() {
    case ${1:-} in
    --help | -h)
        sed -n '/^# A cluster/,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
        return
        ;;
    --print)
        cluster_json
        return
        ;;
    --*) die "unknown option $1; there are --print and --help" ;;
    esac
    local wait=${TENSORLANE_WAIT:-120}
    [[ $wait =~ ^[0-9]{1,7}$ ]] || die "TENSORLANE_WAIT=$wait is no number of seconds"
    local program=${TENSORLANE_PROGRAM:-tensorlane} folder=${TENSORLANE_DIR:-$PWD} status=0
    export TENSORLANE_CONFIG=$folder/tensorlane-${SLURM_JOB_ID:-0}.json
    cluster_json > "$TENSORLANE_CONFIG"
    "$program" config check "$TENSORLANE_CONFIG"

    # `up` starts those tasks whose host is the machine that it runs on, so one on every node starts them all.
    srun --overlap --ntasks="${SLURM_JOB_NUM_NODES:-1}" --ntasks-per-node=1 --kill-on-bad-exit=1 \
        "$program" up --config "$TENSORLANE_CONFIG" &
    workers_pid=$!
    running=("$workers_pid")
    trap stop EXIT
    trap 'exit 143' TERM INT

    wait_until_healthy "$program"
    if (($# == 0)); then
        wait "$workers_pid" || status=$?
        exit "$status"
    fi
    # In the background, because a trap waits for what runs in the foreground.
    "${@//\{\}/"$TENSORLANE_CONFIG"}" <&0 &
    local command_pid=$!
    running+=("$command_pid")
    wait -n "$command_pid" "$workers_pid" || status=$?
    if kill -0 "$command_pid" 2> /dev/null; then
        end_with_workers "$status" "$program"
    fi
    running=("$workers_pid")
    exit "$status"
}

# When this file is sourced, it only defines the functions.
if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
    main "$@"
fi
