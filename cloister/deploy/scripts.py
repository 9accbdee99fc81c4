"""The scripts in the kits. They work on a plain machine and in a container, and wherever a kit is copied to."""

import json
import shlex

from cloister.deploy.federation import Federation, Site

_HEAD = """\
#!/bin/sh
# {purpose}
set -eu
umask 077
kit=$(cd "$(dirname "$0")" && pwd)
"""
_STATE = """\
state=${CLOISTER_STATE:-"$kit/state"}
mkdir -p "$state"
export FLWR_HOME="$state/flwr" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
cd "$state"
"""

_SERVER = """\
superlink() {
    exec cloister superlink --operators "$kit/operators.sha256" \\
        --ssl-ca-certfile "$kit/ca.crt" --ssl-certfile "$kit/server.crt" --ssl-keyfile "$kit/server.key" \\
        --enable-supernode-auth --isolation process --superexec-auth-secret-file "$kit/superexec.secret" \\
        --database "$state/superlink.db" --disable-runtime-dependency-installation \\
        --host "${CLOISTER_BIND:-0.0.0.0}" --port @PORT@ "$@"
}
# The server's apps that are running: those that are dead and not yet buried have no command line.
apps() {
    for status in $(grep -ls "^PPid:[[:space:]]*$executor\$" /proc/[0-9]*/status); do
        process=${status%/status}
        if tr '\\0' '\\n' 2>/dev/null <"$process/cmdline" | grep -q serverapp; then echo "${process#/proc/}"; fi
    done
}
alive() { tr '\\0' x 2>/dev/null <"/proc/$1/cmdline" | grep -q .; }
# End a process of this script; asked again after 10 s, for a signal between its fork and its start is lost.
end() {
    tries=0
    while alive "$1" 2>/dev/null; do
        [ $((tries % 50)) -ne 0 ] || kill "$1" 2>/dev/null || true
        kill -CONT "$1" 2>/dev/null || true
        tries=$((tries + 1))
        sleep 0.2
    done
}
# The executor would cut its apps off: asked to end, each app ends in order first, and the executor, held still, starts
# no other one meanwhile.
superexec() {
    asked=
    trap 'asked=yes' INT TERM HUP
    cloister superexec --runtime-api-address "${CLOISTER_SUPERLINK:-127.0.0.1:@PORT@}" \
        --root-certificates "$kit/ca.crt" --superexec-auth-secret-file "$kit/superexec.secret" "$@" & executor=$!
    status=0
    [ -n "$asked" ] || wait $executor || status=$?
    [ -n "$asked" ] || exit $status
    kill -STOP $executor 2>/dev/null || true
    # Each is asked once, also one that was just being started: asked twice it would end at once.
    told=" "
    while running=$(apps); [ -n "$running" ]; do
        for app in $running; do
            case "$told" in *" $app "*) ;; *) kill "$app" 2>/dev/null || true; told="$told$app " ;; esac
        done
        sleep 0.2
    done
    end $executor
    exit 0
}
both() {
    asked=
    trap 'asked=yes' INT TERM HUP
    superlink "$@" & link=$!
    superexec & executor=$!
    # Whichever ends first ends the other; whoever supervises this script then starts both again.
    while [ -z "$asked" ] && kill -0 $link 2>/dev/null && kill -0 $executor 2>/dev/null; do sleep 1; done
    # Apps tell the SuperLink how they ended: it goes last.
    end $executor
    end $link
    [ -n "$asked" ] || exit 1
    exit 0
}
part=${1:-both}
[ $# -eq 0 ] || shift
case "$part" in
    both | superlink | superexec) "$part" "$@" ;;
    *) echo "usage: $0 [both|superlink|superexec] [options]" >&2; exit 2 ;;
esac
"""

_SITE = """\
# The site's own key, if it was not made here, is put in the same place.
[ -f "$kit/node.key" ] || { echo "$kit/node.key is missing: put the site's private node key there" >&2; exit 2; }
set -- --superlink "${CLOISTER_SUPERLINK:-@ADDRESS@}" --root-certificates "$kit/ca.crt" \\
    --auth-supernode-private-key "$kit/node.key" --superexec-auth-secret-file "$kit/superexec.secret" \\
    --port "${CLOISTER_PORT:-9094}" \\
    --node-config "policy=\\"$kit/policy.toml\\" ledger-dir=\\"$state/ledgers\\" "@CONFIG@ "$@"
# Bundles signed by these people only, if the site says so.
if [ -e "$kit/trusted-entities.yaml" ]; then
    # Flower takes an empty list for none, and lets every bundle run.
    grep -q '^[^#]*:' "$kit/trusted-entities.yaml" ||
        { echo "$kit/trusted-entities.yaml names nobody: remove it, or say whose bundles may run" >&2; exit 2; }
    set -- "$@" --trusted-entities "$kit/trusted-entities.yaml"
fi
# CLOISTER_NODE=flower-supernode starts every client anew; slower, and allowed-fabs of the policy is not enforced.
exec ${CLOISTER_NODE:-cloister warm-node} "$@"
"""

_REGISTER = """\
# A configuration for this call alone: the kit may lie anywhere, and be read-only.
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT
trap 'exit 143' INT TERM HUP
# Wide enough for an answer not to be broken in the middle of what is looked for.
export FLWR_HOME="$home" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 COLUMNS=400
cp "$kit/credentials.yaml" "$home/"
printf '[superlink.@NAME@]\\naddress = "@ADDRESS@"\\nroot-certificates = "%s"\\n' "$kit/ca.crt" >"$home/config.toml"
failed=0
for key in "$kit"/nodes/*.pub; do
    site=$(basename "$key" .pub)
    if answer=$(flwr supernode register "$key" @NAME@ --name "$site" 2>&1); then
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
"""

_CONNECTION = """\
# Flower's connection to this federation: export FLWR_HOME to this folder, then `flwr run . {name} --stream`.
# The path below is where the kit was made; change it when the kit moves.
[superlink]
default = "{name}"

[superlink.{name}]
address = "{address}"
root-certificates = {certificate}
"""


def server_script(federation: Federation) -> str:
    """Starts the SuperLink and the executor of its apps, or one of them."""
    head = _HEAD.format(purpose=f"Start the server of federation {federation.name}: both parts, or one in a container.")
    return head + _STATE + _SERVER.replace("@PORT@", str(federation.server.port))


def site_script(federation: Federation, site: Site) -> str:
    """Starts the site's SuperNode."""
    config = " ".join(f"{key}={json.dumps(value)}" for key, value in site.node_config().items())
    head = _HEAD.format(purpose=f"Start the node of site {site.name} in federation {federation.name}.")
    body = _SITE.replace("@ADDRESS@", federation.address).replace("@CONFIG@", shlex.quote(config))
    return head + _STATE + body


def register_script(federation: Federation) -> str:
    """Tells the SuperLink the public keys of all sites; those it knows are left as they are."""
    head = _HEAD.format(purpose=f"Register the nodes of federation {federation.name}. Run it again for a new site.")
    return head + _REGISTER.replace("@NAME@", federation.name).replace("@ADDRESS@", federation.address)


def connection(federation: Federation, certificate: str) -> str:
    """What the `flwr` command needs to know, with the path of the authority's certificate."""
    return _CONNECTION.format(name=federation.name, address=federation.address, certificate=json.dumps(certificate))
