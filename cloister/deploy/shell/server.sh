#!/bin/sh
# Start the server of federation @NAME@: all parts, or one in a container.
set -eu
umask 077
kit=$(cd "$(dirname "$0")" && pwd)
host=@HOST@ port=@PORT@ parts=@PARTS@
state=${CLOISTER_STATE:-"$kit/state"}
mkdir -p "$state"
export FLWR_HOME="$state/flwr" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
cd "$state"
superlink() {
    exec cloister superlink --operators "$kit/operators.sha256" \
        --ssl-ca-certfile "$kit/ca.crt" --ssl-certfile "$kit/server.crt" --ssl-keyfile "$kit/server.key" \
        --enable-supernode-auth --isolation process --superexec-auth-secret-file "$kit/superexec.secret" \
        --database "$state/superlink.db" --disable-runtime-dependency-installation \
        --host "${CLOISTER_BIND:-$host}" --port "$port" "$@"
}
# What the proxy reads when it starts and when it is told to: the list of keys, the certificate, the SuperLink's address.
proxied() { cksum "$kit/nodes.conf" "$kit/server.crt"; getent ahosts "$host"; }
proxy() {
    asked=
    trap 'asked=yes' INT TERM HUP
    PATH=$PATH:/usr/sbin
    command -v nginx >/dev/null || { echo "nginx is missing: install it (Debian: apt-get install nginx)" >&2; exit 2; }
    mkdir -p "$state/proxy"
    read=$(proxied) refused=$state/proxy/refused.log
    : >>"$refused"
    nginx -p "$state/proxy/" -c "$kit/nginx.conf" -g 'daemon off;' & front=$!
    while [ -z "$asked" ] && alive $front; do
        sleep 1
        now=$(proxied)
        if [ "$now" != "$read" ]; then kill -HUP $front; read=$now; fi
        [ "$(wc -c <"$refused")" -lt 10000000 ] || { cp "$refused" "$refused.1" && : >"$refused"; }
    done
    [ -n "$asked" ] || exit 1
    end $front
    exit 0
}
# The server's apps that are running: those that are dead and not yet buried have no command line.
apps() {
    # shellcheck disable=SC2013 # names in /proc have no blanks
    for status in $(grep -ls "^PPid:[[:space:]]*$executor\$" /proc/[0-9]*/status); do
        process=${status%/status}
        if tr '\0' '\n' 2>/dev/null <"$process/cmdline" | grep -q serverapp; then echo "${process#/proc/}"; fi
    done
}
# A process that is dead and not yet buried is not alive; one that is about to become its program is.
alive() { grep -qs '^State:[[:space:]]*[DIKPRSTWt]' "/proc/$1/status"; }
# End a process of this script; asked again after 10 s, for a signal between its fork and its start is lost.
end() {
    tries=0
    while alive "$1"; do
        [ $((tries % 50)) -ne 0 ] || kill "$1" 2>/dev/null || true
        kill -CONT "$1" 2>/dev/null || true
        tries=$((tries + 1))
        sleep 0.2
    done
}
# The executor would cut its apps off: asked to end, each app ends in order first, and the executor, held still, starts
# no other one meanwhile.
# shellcheck disable=SC2119,SC2120 # options come where it is the one part that is asked for
superexec() {
    asked=
    trap 'asked=yes' INT TERM HUP
    cloister superexec --runtime-api-address "${CLOISTER_SUPERLINK:-$host:$port}" \
        --root-certificates "$kit/ca.crt" --superexec-auth-secret-file "$kit/superexec.secret" \
        --resume "${CLOISTER_RESUME:-0}" --tasks "$state/tasks" --parent-pid $$ "$@" & executor=$!
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
all() {
    asked=
    trap 'asked=yes' INT TERM HUP
    superlink "$@" & link=$!
    # shellcheck disable=SC2119 # options are for the SuperLink
    superexec & executor=$!
    front=
    if [ "$parts" != "${parts#proxy}" ]; then proxy & front=$!; fi
    # Whichever ends first ends the others; whoever supervises this script then starts all again.
    # shellcheck disable=SC2086 # there may be no proxy
    while [ -z "$asked" ] && running $link $executor $front; do sleep 1; done
    # Apps tell the SuperLink how they ended: it goes last. Those that are to be resumed are not asked to end: the
    # executor, which ends with this script, takes them with it, and the next one resumes their runs.
    if [ -n "$asked" ] || [ "${CLOISTER_RESUME:-0}" -eq 0 ]; then end $executor; fi
    [ -z "$front" ] || end $front
    end $link
    [ -n "$asked" ] || exit 1
    exit 0
}
running() { for process in "$@"; do kill -0 "$process" 2>/dev/null || return 1; done; }
part=${1:-all}
[ $# -eq 0 ] || shift
case " all $parts " in
    *" $part "*) "$part" "$@" ;;
    *) echo "usage: $0 [all ${parts}] [options]" >&2; exit 2 ;;
esac
