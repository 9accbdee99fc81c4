#!/bin/sh
# Start the node of site north in federation hospitals.
set -eu
umask 077
kit=$(cd "$(dirname "$0")" && pwd)
address=localhost:9092
# The site's own values, as Flower reads them.
config='data-path="/srv/data/north.data" public-size=300'
state=${CLOISTER_STATE:-"$kit/state"}
mkdir -p "$state"
export FLWR_HOME="$state/flwr" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
cd "$state"
# The site's own key, if it was not made here, is put in the same place.
[ -f "$kit/node.key" ] || { echo "$kit/node.key is missing: put the site's private node key there" >&2; exit 2; }
# Who it is in secure aggregations, once it has a key to sign with.
[ ! -f "$kit/signing.key" ] || config="signing-key=\"$kit/signing.key\" roster=\"$kit/roster.signed\" $config"
[ ! -f "$kit/signing.key" ] || [ ! -f "$kit/roster.pub" ] || config="roster-key=\"$kit/roster.pub\" $config"
# What it has to remember between the messages of a secure aggregation: in memory, in a folder of this start alone. The
# number at its end is that of the process, which stays the same; folders of processes that are gone are removed.
if [ -f "$kit/signing.key" ]; then
    secrets=${CLOISTER_SECRETS:-/dev/shm}/cloister-$(id -u)-$(printf %s "$(uname -n) $kit" | cksum | cut -d' ' -f1)
    for old in "$secrets".*; do
        # What another user has put there, who cannot be kept from it, stays and does not hold up the start.
        [ ! -d "$old" ] || kill -0 "${old##*.}" 2>/dev/null || rm -rf "$old" 2>/dev/null || :
    done
    if rm -rf "$secrets.$$" && mkdir -m 700 "$secrets.$$"; then
        config="secure-state=\"$secrets.$$\" $config"
    else
        echo "no folder in memory, and so no secure aggregation: name one by CLOISTER_SECRETS" >&2
    fi
fi
set -- --superlink "${CLOISTER_SUPERLINK:-$address}" --root-certificates "$kit/ca.crt" \
    --auth-supernode-private-key "$kit/node.key" --superexec-auth-secret-file "$kit/superexec.secret" \
    --port "${CLOISTER_PORT:-9094}" \
    --node-config "policy=\"$kit/policy.toml\" ledger-dir=\"$state/ledgers\" $config" "$@"
# Bundles signed by these people only, if the site says so.
if [ -e "$kit/trusted-entities.yaml" ]; then
    # Flower takes an empty list for none, and lets every bundle run.
    grep -q '^[^#]*:' "$kit/trusted-entities.yaml" ||
        { echo "$kit/trusted-entities.yaml names nobody: remove it, or say whose bundles may run" >&2; exit 2; }
    set -- "$@" --trusted-entities "$kit/trusted-entities.yaml"
fi
# CLOISTER_NODE=flower-supernode starts every client anew; slower, and allowed-fabs of the policy is not enforced.
exec ${CLOISTER_NODE:-cloister warm-node} "$@"
