-- For finding tasks: by when they came and when they last moved, and what is asked for most. Tasks are counted by lane.

CREATE INDEX tasks_created ON tasks (created_at_ms, no);
CREATE INDEX tasks_moved ON tasks (updated_at_ms, no);
CREATE INDEX tasks_of_agent ON tasks (agent_id, created_at_ms, no);
CREATE INDEX tasks_of_sender ON tasks (sender, created_at_ms, no);
CREATE INDEX tasks_tenant_created ON tasks (tenant, created_at_ms, no) WHERE tenant IS NOT NULL;
CREATE INDEX tasks_unsuccessful ON tasks (a2a_state, created_at_ms, no) WHERE a2a_state <> 'completed';
CREATE INDEX tasks_in_context ON tasks (context_id, created_at_ms, no) WHERE context_id <> '';
CREATE INDEX tasks_retried ON tasks (created_at_ms, no) WHERE attempt > 1;
CREATE INDEX ids_by_prefix ON ids (task_id text_pattern_ops);

-- A task or event as JSON that can be looked into: PostgreSQL's texts have no NUL, which is therefore escaped as in `column`.
CREATE OR REPLACE FUNCTION readable(body text) RETURNS json IMMUTABLE STRICT PARALLEL SAFE LANGUAGE sql AS $$
    SELECT replace(
        replace(
            replace(replace(body, '\\', chr(2)), '\u0001', '\u0001\u0001'), '\u0000', '\u0001\u0002'
        ), chr(2), '\\'
    )::json
$$;

INSERT INTO lane_counts (kind, lane, writer, n)
SELECT 'lane', x.lane, 0, count(*) FROM (
    SELECT
        coalesce(l.tenant, '') || ' ' || (readable(l.head) -> 'recipient' ->> 'display') || ' ' || l.recipient || ' '
        || CASE l.state WHEN 'leased' THEN 'in_flight' WHEN 'settled' THEN 'result_pending' ELSE l.state END AS lane
    FROM live AS l
    UNION ALL
    SELECT
        coalesce(t.tenant, '') || ' ' || (readable(e.body) -> 'task' -> 'recipient' ->> 'display') || ' ' || t.recipient || ' '
        || CASE t.a2a_state WHEN 'failed' THEN 'failed' ELSE 'done' END
    FROM tasks AS t JOIN events AS e ON e.no = t.no AND e.n = 1
) AS x
GROUP BY x.lane;
