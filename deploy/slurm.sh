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
# too. With TENSORLANE_PS=0 all are workers.
#
# TENSORLANE_SETTINGS   a cluster.json whose settings are kept, only its "cluster" is replaced; relative paths in
#                       "publish", "local.socket_folder" and "security.tls" start in the folder of this file; default:
#                       no settings
# TENSORLANE_PORT       port of ps, worker has the next one; default 4000
# TENSORLANE_PROGRAM    default tensorlane
# TENSORLANE_WAIT       seconds until all must be healthy; default 120
# TENSORLANE_DIR        where cluster.json is written, seen by all nodes; default: where sbatch was called
#
# With certificates: a certificate names a task and no host, so that those of all tasks can be made before there is an
# allocation: "tensorlane cert init", "tensorlane cert issue --name ps:0 --name worker:0 ... --name client", in a folder
# that all nodes see. With {name} in "security.tls" of TENSORLANE_SETTINGS each task takes its own. client.pem is for
# this script and the command beside the workers.
#
# Failure modes: a worker that does not become healthy or ends early ends the job with its status, after its log and the
# table of `tensorlane health`; a signal stops the workers first.
set -euo pipefail

die() {
    printf 'slurm.sh: %s\n' "$*" >&2
    exit 1
}

# json_list PORT HOST...: prints ["host:port", ...].
json_list() {
    local port=$1 host separator=''
    shift
    printf '['
    for host; do
        printf '%s"%s:%s"' "$separator" "$host" "$port"
        separator=', '
    done
    printf ']'
}

# Prints the "cluster" object of the given nodes.
cluster_of() {
    local port=${TENSORLANE_PORT:-4000} ps_count=${TENSORLANE_PS:-1} host separator=''
    (($# > 0)) || die "the allocation has no nodes"
    [[ $ps_count =~ ^[0-9]{1,5}$ ]] || die "TENSORLANE_PS=$ps_count is no number of nodes"
    [[ $port =~ ^[0-9]{1,5}$ ]] && ((port > 0 && port < 65535)) || die "TENSORLANE_PORT=$port: must be 1 to 65534"
    ((ps_count <= $#)) || die "TENSORLANE_PS=$ps_count, but the allocation has only $# nodes"
    for host; do
        [[ $host =~ ^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$ ]] || die "'$host' is no host name"
    done
    local workers=("${@:ps_count + 1}")
    ((${#workers[@]})) || workers=("$@")
    printf '{'
    if ((ps_count)); then
        printf '"ps": %s' "$(json_list "$port" "${@:1:ps_count}")"
        separator=', '
    fi
    printf '%s"worker": %s}\n' "$separator" "$(json_list $((port + 1)) "${workers[@]}")"
}

# Prints the whole cluster.json of this allocation.
cluster_json() {
    local hosts cluster
    [[ -n ${SLURM_JOB_NODELIST:-} ]] || die "SLURM_JOB_NODELIST is not set: this runs inside an allocation"
    hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST") || die "scontrol does not know $SLURM_JOB_NODELIST"
    mapfile -t hosts <<< "$hosts"
    cluster=$(cluster_of "${hosts[@]}")
    if [[ -z ${TENSORLANE_SETTINGS:-} ]]; then
        printf '{"cluster": %s}\n' "$cluster"
        return
    fi
    python3 -c '
import json, os, sys
path = sys.argv[1]
folder = os.path.dirname(os.path.abspath(path))
try:
    with open(path, encoding="utf-8") as file:
        settings = json.load(file)
except (OSError, ValueError) as error:
    sys.exit(f"slurm.sh: TENSORLANE_SETTINGS={path}: " + str(getattr(error, "strerror", None) or error))

# Relative paths start where the settings file is; cluster.json may be written elsewhere.
def resolve(value):
    if not isinstance(value, dict):
        return
    if isinstance(value.get("publish"), str):
        value["publish"] = os.path.join(folder, value["publish"])
    elif isinstance(value.get("publish"), list):
        value["publish"] = [os.path.join(folder, each) if isinstance(each, str) else each for each in value["publish"]]
    # An empty name means that there is no folder.
    if isinstance(value.get("socket_folder"), str) and value["socket_folder"]:
        value["socket_folder"] = os.path.join(folder, value["socket_folder"])
    if isinstance(value.get("tls"), dict):
        value["tls"].update({name: os.path.join(folder, file) for name, file in value["tls"].items()
                             if name in ("ca", "certificate", "key", "crl") and isinstance(file, str) and file})
    for each in value.values():
        resolve(each)

if not isinstance(settings, dict):
    sys.exit(f"slurm.sh: TENSORLANE_SETTINGS={path}: not an object")
resolve(settings)
print(json.dumps({**settings, "cluster": json.loads(sys.argv[2])}, indent=2))' "$TENSORLANE_SETTINGS" "$cluster"
}

# Waits until every worker is healthy; fails when they have ended or the time is over.
wait_until_healthy() {
    local config=$1 workers_pid=$2 program=$3 deadline=$((SECONDS + 10#${TENSORLANE_WAIT:-120}))
    until "$program" health --config "$config" > /dev/null 2>&1; do
        kill -0 "$workers_pid" 2> /dev/null || die "the workers have ended, see above"
        if ((SECONDS >= deadline)); then
            "$program" health --config "$config" >&2 || true
            die "not all workers are healthy after ${TENSORLANE_WAIT:-120} s"
        fi
        sleep 1
    done
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
    trap 'kill -TERM "$workers_pid" 2> /dev/null || true; wait "$workers_pid" || true' EXIT
    trap 'exit 143' TERM INT

    wait_until_healthy "$TENSORLANE_CONFIG" "$workers_pid" "$program"
    if (($#)); then
        "${@//\{\}/$TENSORLANE_CONFIG}" || status=$?
    else
        wait "$workers_pid" || status=$?
    fi
    exit "$status"
}

# When this file is sourced, it only defines the functions.
if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
    main "$@"
fi
