#!/bin/sh
# A command in a fresh clone, on a machine made poorer than this one: `sh tests/machines/poorer.sh make test`.
#
#   CORES=0        the cores it may use, as for taskset; all unless given
#   MEMORY=8G      memory, by a control group
#   PY=python3.13  the interpreter that `make` builds .venv with
#   KEEP=1         leave the clone where it is
#
# Always: a folder with spaces and letters beyond ASCII, a home that is mounted read-only, no C compiler on the path.
# Needs root and Linux (mount namespaces, control groups).
set -eu

here=$(cd "$(dirname "$0")/../.." && pwd)
place=$(mktemp -d)
clone="$place/a clone in Åre — 用户"
git clone -q "$here" "$clone"

# Every program of the path but compilers.
mkdir "$place/bin"
IFS=:
for folder in $PATH; do
    for program in "$folder"/*; do
        name=${program##*/}
        case $name in
            cc | c++ | gcc* | g++* | clang* | c89* | c99* | *-linux-gnu-gcc* | *-linux-gnu-g++*) ;;
            *) [ -e "$place/bin/$name" ] || ln -s "$program" "$place/bin/$name" 2>/dev/null || true ;;
        esac
    done
done
unset IFS

if [ -n "${MEMORY:-}" ]; then
    groups=/sys/fs/cgroup limit=memory.max
    [ -d "$groups/memory" ] && groups=$groups/memory limit=memory.limit_in_bytes # version 1
    group=$groups/podium-poorer-$$
    mkdir "$group"
    echo "$MEMORY" >"$group/$limit"
    echo $$ >"$group/cgroup.procs"
fi

mkdir "$place/home"
status=0
unshare --mount sh -c '
    home=$1 clone=$2
    shift 2
    mount -t tmpfs -o ro tmpfs "$home"
    cd "$clone"
    exec "$@"
' sh "$place/home" "$clone" env HOME="$place/home" PATH="$place/bin" ${PY:+PY="$PY"} \
    ${CORES:+taskset -c "$CORES"} "$@" || status=$?
[ -n "${KEEP:-}" ] && echo "$clone" || rm -rf "$place"
exit $status
