-- For finding tasks by every filter, and for what each tenant's finished tasks take. An index has the beginning of what a
-- sender chose, because an entry of an index has a limit and what a sender chooses may have none.

-- A task or event as JSON that can be looked into: PostgreSQL's texts have no NUL, which is therefore escaped as in `column`.
CREATE OR REPLACE FUNCTION readable(body text) RETURNS json IMMUTABLE STRICT PARALLEL SAFE LANGUAGE sql AS $$
    SELECT replace(
        replace(
            replace(replace(body, '\\', chr(2)), '\u0001', '\u0001\u0001'), '\u0000', '\u0001\u0002'
        ), chr(2), '\\'
    )::json
$$;

ALTER TABLE live
    ADD sender_display text,
    ADD recipient_display text,
    ADD task_kind text,
    ADD idempotency_key text,
    ADD remote boolean,
    ADD cause text,
    ADD error_message text,
    ADD intent text, -- its beginning
    ADD size bigint; -- of its events, in bytes
ALTER TABLE tasks
    ADD sender_display text,
    ADD recipient_display text,
    ADD task_kind text,
    ADD idempotency_key text,
    ADD deadline_ms bigint,
    ADD remote boolean,
    ADD cause text,
    ADD intent text,
    ADD size bigint;

UPDATE live AS l SET
    sender_display = t.task #>> '{sender,display}',
    recipient_display = t.task #>> '{recipient,display}',
    task_kind = t.task ->> 'task_kind',
    idempotency_key = t.task #>> '{idempotency,key}',
    remote = t.task -> 'target' IS NOT NULL,
    cause = readable(l.rest) ->> 16,
    error_message = coalesce(
        (SELECT readable(e.body) #>> '{result,error_message}' FROM events AS e WHERE e.no = l.no AND e.n = l.ended_n), ''
    ),
    intent = left(t.task ->> 'intent_text', 200),
    size = (SELECT sum(octet_length(e.body)) FROM events AS e WHERE e.no = l.no)
FROM (SELECT no, readable(body) -> 'task' AS task FROM events WHERE n = 1) AS t
WHERE t.no = l.no;
UPDATE tasks AS l SET
    sender_display = t.task #>> '{sender,display}',
    recipient_display = t.task #>> '{recipient,display}',
    task_kind = t.task ->> 'task_kind',
    idempotency_key = t.task #>> '{idempotency,key}',
    deadline_ms = CASE
        WHEN t.task ->> 'deadline_ms' IS NOT NULL
            THEN least((t.task ->> 'deadline_ms')::numeric, 9223372036854775807)
    END,
    remote = t.task -> 'target' IS NOT NULL,
    cause = readable(l.rest) ->> 16,
    intent = left(t.task ->> 'intent_text', 200),
    size = (SELECT sum(octet_length(e.body)) FROM events AS e WHERE e.no = l.no)
FROM (SELECT no, readable(body) -> 'task' AS task FROM events WHERE n = 1) AS t
WHERE t.no = l.no;

ALTER TABLE live
    ALTER sender_display SET NOT NULL,
    ALTER recipient_display SET NOT NULL,
    ALTER remote SET NOT NULL,
    ALTER error_message SET NOT NULL,
    ALTER intent SET NOT NULL,
    ALTER size SET NOT NULL;
ALTER TABLE tasks
    ALTER sender_display SET NOT NULL,
    ALTER recipient_display SET NOT NULL,
    ALTER remote SET NOT NULL,
    ALTER cause SET NOT NULL,
    ALTER intent SET NOT NULL,
    ALTER size SET NOT NULL;

DROP INDEX tasks_of_agent, tasks_of_sender, tasks_by_context, tasks_in_context;
CREATE INDEX tasks_of_agent ON tasks (recipient_display, created_at_ms, no);
CREATE INDEX tasks_of_sender ON tasks (sender_display, created_at_ms, no);
CREATE INDEX tasks_of_origin ON tasks (origin, created_at_ms, no);
CREATE INDEX tasks_by_context ON tasks (recipient, left(context_id, 200), updated_at_ms, no) WHERE tenant IS NOT NULL;
CREATE INDEX tasks_in_context ON tasks (left(context_id, 200), created_at_ms, no) WHERE context_id <> '';
CREATE INDEX tasks_of_kind ON tasks (left(task_kind, 200), created_at_ms, no) WHERE task_kind IS NOT NULL;
CREATE INDEX tasks_of_key ON tasks (left(idempotency_key, 200), created_at_ms, no) WHERE idempotency_key IS NOT NULL;
CREATE INDEX tasks_of_cause ON tasks (cause, created_at_ms, no) WHERE cause <> 'result';

INSERT INTO lane_counts (kind, lane, writer, n)
SELECT 'kept', coalesce(tenant, ''), 0, sum(size) FROM tasks GROUP BY coalesce(tenant, '');
