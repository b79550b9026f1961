#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Carries out deploy/Containerfile without a container engine: every stage is a root folder made by debootstrap, and RUN
# and the probe run in it by chroot. Run it as root, with debootstrap, in a folder with 4 GB to spare:
#
#   deploy/check_containerfile.sh [FOLDER]        default: a temporary folder, which is removed afterwards
#
# After the last stage the script starts a worker as the image's user; the HEALTHCHECK command must find it healthy.
# The script understands FROM, COPY, WORKDIR, RUN, USER, ENV and HEALTHCHECK as that file uses them. The environment
# variable MIRROR says where Debian's packages are.
set -euo pipefail

source_folder=$(cd "$(dirname "$0")/.." && pwd)
mirror=${MIRROR:-http://deb.debian.org/debian}
((EUID == 0)) || { echo "check_containerfile.sh: must be root, for chroot" >&2; exit 1; }
command -v debootstrap > /dev/null || { echo "check_containerfile.sh: debootstrap is not installed" >&2; exit 1; }
work=${1:-$(mktemp -d)}
mkdir -p "$work"
mounted=()
worker=''

clean() {
    [[ -z $worker ]] || kill -TERM "$worker" 2> /dev/null || true
    for path in "${mounted[@]}"; do umount "$path"; done
    [[ $work == "${given:-}" ]] || rm -rf --one-file-system "$work"
}
given=${1:-}
trap clean EXIT

stage='' root='' folder=/ user=0:0 probe=''
declare -A stages=()
environment=(PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin)

# inside COMMAND: runs the command as the image would.
inside() {
    env -i "${environment[@]}" chroot --userspec="$user" "$root" /bin/sh -c "cd $folder && $1"
}

from() {
    stage=${3:-final} root=$work/${3:-final} folder=/ user=0:0
    stages[$stage]=$root
    [[ -d $work/base ]] ||
        debootstrap --variant=minbase bookworm "$work/base" "$mirror" > "$work/debootstrap.log" < /dev/null
    rm -rf --one-file-system "$root"
    cp -a "$work/base" "$root"
    cp -L /etc/resolv.conf "$root/etc/resolv.conf"
    mount -t proc proc "$root/proc"
    mounted+=("$root/proc")
}

copy() {
    if [[ $1 == --from=* ]]; then
        cp -a "${stages[${1#--from=}]}$2/." "$root$3/"
    else
        mkdir -p "$root$2"
        tar -C "$source_folder" --exclude-from="$source_folder/.dockerignore" -cf - "$1" | tar -C "$root$2" -xf -
    fi
}

while read -r word rest; do
    [[ -n $word && $word != '#'* ]] || continue
    echo "== $word $rest"
    read -ra words <<< "$rest"
    case $word in
    FROM) from "${words[@]}" ;;
    COPY) copy "${words[@]}" ;;
    WORKDIR) mkdir -p "$root$rest" && folder=$rest ;;
    RUN) inside "$rest" < /dev/null ;;
    USER) user=$rest ;;
    ENV) environment+=("$rest") ;;
    HEALTHCHECK) probe=${rest#*CMD } ;;
    esac
done < <(sed -e ':join' -e '/\\$/{N;s/\\\n *//;bjoin' -e '}' "$source_folder/deploy/Containerfile")

echo "== a worker in the image, and its probe: $probe"
mkdir -p "$root/etc/tensorlane"
echo '{"cluster": {"ps": ["127.0.0.1:4000"]}}' > "$root/etc/tensorlane/cluster.json"
! inside "$probe" || { echo "the probe finds a worker where none is" >&2; exit 1; }
env -i "${environment[@]}" chroot --userspec="$user" "$root" \
    tensorlane serve --config /etc/tensorlane/cluster.json --job ps --task 0 &
worker=$!
for ((i = 0; i < 30; i++)); do
    if inside "$probe"; then
        kill -TERM "$worker"
        wait "$worker"
        worker=''
        echo "the image builds, its worker is healthy and ends with 0"
        exit 0
    fi
    sleep 1
done
echo "the worker is not healthy" >&2
exit 1
