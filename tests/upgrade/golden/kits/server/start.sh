#!/bin/sh
# Start the server of federation hospitals: both parts, or one in a container.
set -eu
umask 077
kit=$(cd "$(dirname "$0")" && pwd)
port=9092
state=${CLOISTER_STATE:-"$kit/state"}
mkdir -p "$state"
export FLWR_HOME="$state/flwr" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
cd "$state"
superlink() {
    exec cloister superlink --operators "$kit/operators.sha256" \
        --ssl-ca-certfile "$kit/ca.crt" --ssl-certfile "$kit/server.crt" --ssl-keyfile "$kit/server.key" \
        --enable-supernode-auth --isolation process --superexec-auth-secret-file "$kit/superexec.secret" \
        --database "$state/superlink.db" --disable-runtime-dependency-installation \
        --host "${CLOISTER_BIND:-0.0.0.0}" --port "$port" "$@"
}
# The server's apps that are running: those that are dead and not yet buried have no command line.
apps() {
    # shellcheck disable=SC2013 # names in /proc have no blanks
    for status in $(grep -ls "^PPid:[[:space:]]*$executor\$" /proc/[0-9]*/status); do
        process=${status%/status}
        if tr '\0' '\n' 2>/dev/null <"$process/cmdline" | grep -q serverapp; then echo "${process#/proc/}"; fi
    done
}
alive() { tr '\0' x 2>/dev/null <"/proc/$1/cmdline" | grep -q .; }
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
# shellcheck disable=SC2119,SC2120 # options come where it is the one part that is asked for
superexec() {
    asked=
    trap 'asked=yes' INT TERM HUP
    cloister superexec --runtime-api-address "${CLOISTER_SUPERLINK:-127.0.0.1:$port}" \
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
both() {
    asked=
    trap 'asked=yes' INT TERM HUP
    superlink "$@" & link=$!
    # shellcheck disable=SC2119 # options are for the SuperLink
    superexec & executor=$!
    # Whichever ends first ends the other; whoever supervises this script then starts both again.
    while [ -z "$asked" ] && kill -0 $link 2>/dev/null && kill -0 $executor 2>/dev/null; do sleep 1; done
    # Apps tell the SuperLink how they ended: it goes last. Those that are to be resumed are not asked to end: the
    # executor, which ends with this script, takes them with it, and the next one resumes their runs.
    if [ -n "$asked" ] || [ "${CLOISTER_RESUME:-0}" -eq 0 ]; then end $executor; fi
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
