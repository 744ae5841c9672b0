-- Finding tasks, live and ended, in an order. Every filter but that of the text is a condition on a row's columns.

-- :page
SELECT x.no, x.moment, x.size FROM (
    {walks}
) AS x
ORDER BY x.moment {direction}, x.no {direction}
LIMIT :count

-- :walk
(
    SELECT no, {moment} AS moment, size FROM {table}
    WHERE {conditions}
    ORDER BY {moment} {direction}, no {direction} LIMIT :count
)

-- :total
SELECT count(*) FROM (
    {walks}
) AS x

-- :counted
(SELECT no FROM {table} WHERE {conditions} LIMIT :count)

-- :with_text
SELECT e.no FROM events AS e
WHERE
    e.no = ANY(:nos::bigint[]) AND e.n = 1
    AND strpos(translate(readable(e.body) #>> '{task,intent_text}', :upper, :lower), :folded) > 0

-- :with_prefix
SELECT i.no FROM ids AS i WHERE i.task_id ~>=~ :id_from AND i.task_id ~<~ :id_to LIMIT :count

-- :rows
SELECT
    x.*,
    /* holder_lost x */ AS holder_lost,
    -- A column has at most 63 bits: only the task itself has a later deadline.
    CASE
        WHEN x.deadline_ms = 9223372036854775807
            THEN (SELECT readable(e.body) #>> '{task,deadline_ms}' FROM events AS e WHERE e.no = x.no AND e.n = 1)
    END AS late_deadline_ms
FROM (
    SELECT
        no, task_id, parent, left(context_id, 1000) AS context_id, tenant, recipient_display, sender_display,
        left(task_kind, 1000) AS task_kind, left(idempotency_key, 1000) AS idempotency_key, origin,
        state, a2a_state, attempt, created_at_ms, updated_at_ms, deadline_ms, cause, intent, remote, rest, interrupted,
        node, boot, left(error_message, 200) AS error_message
    FROM live WHERE no = ANY(:nos::bigint[])
    UNION ALL
    SELECT
        no, task_id, parent, left(context_id, 1000) AS context_id, tenant, recipient_display, sender_display,
        left(task_kind, 1000) AS task_kind, left(idempotency_key, 1000) AS idempotency_key, origin,
        'drained', a2a_state, attempt, created_at_ms, updated_at_ms, deadline_ms, cause, intent, remote, rest, false, NULL,
        NULL, left(error_message, 200)
    FROM tasks WHERE no = ANY(:nos::bigint[])
) AS x
