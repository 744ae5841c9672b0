#!/bin/sh
# A worker agent in plain shell: leases tasks with curl, reports progress, and answers in capitals.
#
#     covenant agents add shout --kind worker
#     TOKEN=$(covenant identities enroll shout@default) sh examples/worker.sh
#
# TASKS, if it is set, is how many to do before it ends. Needs curl and sed, and nothing else.
set -eu
URL=${URL:-http://127.0.0.1:8421}
TASKS=${TASKS:--1}

call() { curl -sS --fail-with-body -H "Authorization: Bearer $TOKEN" -H "Content-Type: application/json" "$@"; }

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
        -d "{\"lease_id\":\"$lease\",\"update_no\":1,\"update\":{\"type\":\"status\",\"text\":\"shouting\"}}" > /dev/null
    call "$URL/a2a/results" \
        -d "{\"task_id\":\"$task\",\"lease_id\":\"$lease\",\"status\":\"ok\",\"content\":[{\"type\":\"text\",\"text\":\"$said\"}]}"
    echo
    TASKS=$((TASKS - 1))
done
