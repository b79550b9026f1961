#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The demonstration: a parameter server hands a VGG16 checkpoint of 553 MB to every worker that asks for it.
#
#   examples/demo.sh [--divide N] [--tls] [CONFIG]
#
# CONFIG names a cluster with /job:ps/task:0 and /job:worker/task:0 on this machine. --divide 2, 4 or 8 makes every
# dimension of the tensors that much smaller. --tls makes certificates first, and a configuration that uses them.
#
# Writes the checkpoint into a temporary folder, starts both workers, pulls all tensors twice over the fastest transport
# there is and, unless CONFIG forbids that, twice over gRPC, compares each with the checkpoint, shows the health of the
# cluster and all rates, and stops the workers. However it ends, also by Ctrl-C, it stops the workers and removes the
# folder.
#
# Environment: TENSORLANE, the program; TENSORLANE_BUILD, the build folder; TMPDIR, where 1.2 GB must be free.
set -euo pipefail

root=$(dirname "$(dirname "$(readlink -f "$0")")")
build=${TENSORLANE_BUILD:-$root/build/release}
tensorlane=${TENSORLANE:-$build/bin/tensorlane}
divisor=1
if [[ ${1:-} == --divide ]]; then
    divisor=${2:?--divide needs a number}
    shift 2
fi
[[ $divisor == [1248] ]] || { printf 'demo: --divide takes 2, 4 or 8, not %s\n' "$divisor" >&2; exit 2; }
has_tls=false
if [[ ${1:-} == --tls ]]; then
    has_tls=true
    shift
fi
config=${1:-config/examples/demo.json} # as seen from the project's folder when none is given
needed_kib=$((1200000 / (divisor * divisor)))
ready_tenths=150
workers=()
(($#)) || cd "$root"

die() {
    printf 'demo: %s\n' "$*" >&2
    exit 1
}

# Shows a command as a user would type it, and runs it.
run() {
    printf '\n$ tensorlane %s\n' "$*"
    "$tensorlane" "$@"
}

clean_up() {
    local pid
    trap '' INT TERM HUP
    for pid in "${workers[@]}"; do
        kill -TERM "$pid" 2> /dev/null || true
    done
    for pid in "${workers[@]}"; do
        wait "$pid" 2> /dev/null || true
    done
    rm -rf "$folder"
}

# start JOB [ARG...]: starts task 0 of the job in the background; its log goes to a file.
start() {
    local job=$1
    shift
    printf '\n$ tensorlane serve --config %s --job %s --task 0%s &\n' "$config" "$job" "${*:+ $*}"
    "$tensorlane" serve --config "$config" --job "$job" --task 0 --parent $$ "$@" 2> "$folder/$job.log" &
    workers+=($!)
}

# Waits until the worker that was started last is ready.
await() {
    local job=$1 pid=${workers[-1]} tenths
    for ((tenths = 0; tenths < ready_tenths; tenths++)); do
        if grep -qs "worker ready" "$folder/$job.log"; then
            cat "$folder/$job.log"
            return
        fi
        if ! kill -0 "$pid" 2> /dev/null; then
            cat "$folder/$job.log" >&2
            die "/job:$job/task:0 did not start; when its address is in use, stop what uses it or give another" \
                "configuration: examples/demo.sh CONFIG"
        fi
        sleep 0.1
    done
    cat "$folder/$job.log" >&2
    die "/job:$job/task:0 is not ready after $((ready_tenths / 10)) s"
}

[[ -x $tensorlane && -x $build/examples/make_vgg16 ]] || die "nothing is built in $build; run ./dev build"
[[ -r $config ]] || die "cannot read $config"

folder=$(mktemp -d "${TMPDIR:-/tmp}/tensorlane-demo.XXXXXX")
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
free_kib=$(df --output=avail -k "$folder" | tail -n 1)
((free_kib >= needed_kib)) ||
    die "$folder has $((free_kib / 1000)) MB free, $((needed_kib / 1000)) are needed; set TMPDIR"

printf '== a checkpoint: the tensors of VGG16, random values\n'
checkpoint=("$folder/vgg16.safetensors")
((divisor == 1)) || checkpoint=(--divide "$divisor" "${checkpoint[@]}")
printf '\n$ make_vgg16 %s\n' "${checkpoint[*]}"
made=$("$build/examples/make_vgg16" "${checkpoint[@]}")
printf '%s\n' "$made"
made=${made#"$folder/vgg16.safetensors: "} # 32 tensors, ... parameters, ... bytes

if $has_tls; then
    printf '\n== an authority, and a certificate for each task and for the tools\n'
    tls='"security": {"tls": {"ca": "certs/ca.pem", "certificate": "certs/{name}.pem", "key": "certs/{name}.key"},
  "allow": [{"who": ["any"], "what": ["read", "list", "peers"]}]}'
    { printf '{%s,\n' "$tls"; sed '0,/{/s///' "$config"; } > "$folder/cluster.json"
    config=$folder/cluster.json
    cat "$config"
    run cert init --folder "$folder/certs"
    run cert issue --config "$config" --folder "$folder/certs"
fi

printf '\n== two workers: a parameter server that publishes it, and another\n'
start ps --publish "$folder/vgg16.safetensors"
await ps
start worker
await worker

rates=()
pulls=0
# pull TRANSPORT WHICH [ARG...]: pulls everything. The tensors are compared byte by byte afterwards, so they need no
# checksum, and the rate does not include the comparison.
pull() {
    local name=$1 which=$2
    shift 2
    run pull --config "$config" --from /job:ps/task:0 -o "$folder/copy.safetensors" --no-checksum \
        --verify-against "$folder/vgg16.safetensors" "$@" | tee "$folder/said"
    rates+=("$(printf '%-6s %-7s %s' "$name" "$which" \
        "$(sed -n 's/^pulled .* (\(.*\)) from .*; paths: \(.*\)$/\1, \2/p' "$folder/said")")")
    rm "$folder/copy.safetensors"
    pulls=$((pulls + 1))
}

printf '\n== the first pull, compared with the checkpoint tensor by tensor\n'
pull auto first --table

printf '\n== the second pull\n'
pull auto second

if ! grep -q '"require"' "$config"; then
    printf '\n== the same over gRPC\n'
    pull grpc first --protocol grpc
    pull grpc second --protocol grpc
fi

printf '\n== the health of the cluster\n'
run health --config "$config"

printf '\n== the rates: protocol, pull, rate, and on which paths how many tensors came\n'
printf '%s\n' "${rates[@]}"
# Only soft-RoCE's devices name their parent.
if grep -q verbs "$config" && compgen -G '/sys/class/infiniband/*/parent' > /dev/null; then
    printf 'The RDMA card is emulated (soft-RoCE): the processor does its work, so these rates say nothing of a %s\n' \
        'real card.'
fi

printf '\n== stopping the workers\n'
for index in "${!workers[@]}"; do
    kill -TERM "${workers[index]}"
    wait "${workers[index]}" || die "a worker did not stop well: exit status $?"
done
workers=()
printf 'done: %s, pulled %d times and equal\n' "${made%, *}" "$pulls"
