#!/bin/sh
# A worker agent in plain shell: leases tasks with curl, reports progress, and answers in capitals.
#
#     covenant agents add shout --kind worker
#     TOKEN=$(covenant identities enroll shout@default) sh examples/worker.sh
#
# TASKS, if it is set, is how many to do before it ends. Needs curl and sed, and nothing else. A daemon that is being restarted
# is asked again, for as long as it takes: leases survive, and each call may be repeated.
set -eu
URL=${URL:-http://127.0.0.1:8421}
TASKS=${TASKS:--1}

call() {
    while :; do
        answer=$(curl -sS -w ' %{http_code}' -H "Authorization: Bearer $TOKEN" -H "Content-Type: application/json" "$@") || answer=" 000"
        case ${answer##* } in
            200) printf '%s' "${answer% *}"; return ;;
            000 | 429 | 503) sleep 1 ;;
            *) printf '%s\n' "${answer% *}" >&2; return 1 ;;
        esac
    done
}

# The first string of this name in a line of JSON. For names and values that we know; a real worker has a JSON parser.
first() { sed -n "s/[^\\n]*\"$1\":\"\\([^\"]*\\)\".*/\\1/p" | head -n 1; }

while [ "$TASKS" -ne 0 ]; do
    # A lost reply costs nothing: asking again under the same request id gives the same lease.
    leased=$(call "$URL/a2a/tasks/next?wait_ms=30000&request_id=$$-$TASKS-$(date +%s)")
    task=$(printf '%s' "$leased" | sed -n 's/^{"kind":"a2a_task_opt","task":{"id":"\([^"]*\)".*/\1/p')
    [ -n "$task" ] || continue
    lease=$(printf '%s' "$leased" | first lease_id)
    said=$(printf '%s' "$leased" | sed -n 's/^{"kind":"a2a_task_opt",.*"intent_text":"\([^"]*\)".*"tasks":.*/\1/p' | tr '[:lower:]' '[:upper:]')

    call "$URL/a2a/tasks/$task/updates" \
        -d "{\"lease_id\":\"$lease\",\"update_no\":1,\"update\":{\"type\":\"status\",\"text\":\"shouting\"}}" > /dev/null || continue
    call "$URL/a2a/results" \
        -d "{\"task_id\":\"$task\",\"lease_id\":\"$lease\",\"status\":\"ok\",\"content\":[{\"type\":\"text\",\"text\":\"$said\"}]}" || continue
    echo
    TASKS=$((TASKS - 1))
done
