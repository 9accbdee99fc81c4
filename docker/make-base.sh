#!/usr/bin/env bash
# Make a base image with Debian's Python 3.11 and nginx, and no image registry: docker/make-base.sh [NAME [MIRROR]], as root.
# Nothing of this machine's configuration gets into it: a mirror is used while it is made, and pip's configuration and
# certificates stay outside (docker/wheels.sh).
set -euo pipefail
name=${1:-cloister-base}
mirror=${2:-}
root=$(mktemp -d)
# debootstrap mounts /proc and more there.
trap 'rm -rf --one-file-system "$root"' EXIT
# Bookworm is the Debian release whose Python is 3.11.
debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates,nginx bookworm "$root" ${mirror:+"$mirror"} >"$root.log" 2>&1 ||
    { tail -n 20 "$root.log" >&2; exit 1; }
rm -rf "$root.log" "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/log/* "$root"/usr/share/doc/* "$root"/usr/share/man/*
printf 'deb http://deb.debian.org/debian bookworm main\n' >"$root/etc/apt/sources.list"
tar -C "$root" -c . | docker import - "$name"
