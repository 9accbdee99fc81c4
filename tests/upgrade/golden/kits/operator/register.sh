#!/bin/sh
# Register the nodes of federation hospitals. Run it again for a new site.
set -eu
umask 077
kit=$(cd "$(dirname "$0")" && pwd)
name=hospitals address=localhost:9092
# A configuration for this call alone: the kit may lie anywhere, and be read-only.
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT
trap 'exit 143' INT TERM HUP
# Wide enough for an answer not to be broken in the middle of what is looked for.
export FLWR_HOME="$home" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 COLUMNS=400
cp "$kit/credentials.yaml" "$home/"
printf '[superlink.%s]\naddress = "%s"\nroot-certificates = "%s"\n' "$name" "$address" "$kit/ca.crt" >"$home/config.toml"
failed=0
for key in "$kit"/nodes/*.pub; do
    site=$(basename "$key" .pub)
    if answer=$(flwr supernode register "$key" "$name" --name "$site" 2>&1); then
        echo "$site: registered"
    elif echo "$answer" | grep -q 'its node was unregistered'; then
        echo "$site: revoked. It gets in again with a new key only: cloister provision --remake sites/$site" >&2
        failed=1
    elif echo "$answer" | grep -qi 'already in use'; then
        echo "$site: known"
    else
        echo "$site: $answer" >&2
        failed=1
    fi
done
exit $failed
