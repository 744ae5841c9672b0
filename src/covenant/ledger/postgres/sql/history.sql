-- Reads of tasks, live and ended. `live` and `tasks` share their column names; a task is in one of them.

-- :entry
SELECT l.*, e.body AS ended_body, f.body AS task_body
FROM ids AS i JOIN live AS l ON l.no = i.no
JOIN events AS f ON f.no = l.no AND f.n = 1
LEFT JOIN events AS e ON e.no = l.no AND e.n = l.ended_n
WHERE i.task_id = :task_id

-- :parties
SELECT e.body FROM ids AS i JOIN events AS e ON e.no = i.no AND e.n = 1 WHERE i.task_id = :task_id

-- :tenants_of
SELECT i.task_id, coalesce(l.tenant, t.tenant) AS tenant FROM ids AS i
LEFT JOIN live AS l ON l.no = i.no LEFT JOIN tasks AS t ON t.no = i.no
WHERE i.task_id = ANY(:task_ids::text[]) AND (l.no IS NOT NULL OR t.no IS NOT NULL)

-- :finished
SELECT NOT EXISTS (
    SELECT FROM ids AS i JOIN live AS l ON l.no = i.no WHERE i.task_id = :task_id AND l.state <> 'settled'
)

-- :next_due
SELECT min(due_at_ms) FROM live

-- :orphaned
SELECT EXISTS (
    SELECT FROM live AS l
    WHERE
        l.origin = 'delegation' AND l.state <> 'settled'
        AND NOT EXISTS (
            SELECT FROM ids AS i JOIN live AS p ON p.no = i.no WHERE i.task_id = l.parent AND p.state <> 'settled'
        )
)

-- :generation
SELECT coalesce(l.generation, t.generation) FROM ids AS i
LEFT JOIN live AS l ON l.no = i.no LEFT JOIN tasks AS t ON t.no = i.no
WHERE i.task_id = :task_id

-- :steps
SELECT e.ts_ms, e.body
FROM ids AS i
LEFT JOIN live AS l ON l.no = i.no
LEFT JOIN tasks AS t ON t.no = i.no
JOIN events AS e ON e.no = i.no
WHERE
    i.task_id = :task_id AND e.n > :after AND e.generation > :after
    AND (:recipient::text IS NULL OR coalesce(l.recipient, t.recipient) = :recipient)
    AND (:sender::text IS NULL OR coalesce(l.sender, t.sender) = :sender)
    AND (:tenant::text IS NULL OR coalesce(l.tenant, t.tenant) = :tenant)
ORDER BY e.n
LIMIT :count

-- :task
SELECT
    x.*, f.body AS task_body, e.body AS ended_body,
    /* holder_lost x */ AS holder_lost
FROM ids AS i
CROSS JOIN LATERAL (
    SELECT
        no, task_id, state, a2a_state, sender, recipient, lessee, attempt, turn, generation, created_at_ms, updated_at_ms,
        ended_n, rest, parent, origin, interrupted, node, boot
    FROM live WHERE no = i.no
    UNION ALL
    SELECT
        no, task_id, 'drained', a2a_state, sender, recipient, lessee, attempt, turn, generation, created_at_ms,
        updated_at_ms, ended_n, rest, parent, origin, false, NULL, NULL
    FROM tasks WHERE no = i.no
) AS x
JOIN events AS f ON f.no = x.no AND f.n = 1
LEFT JOIN events AS e ON e.no = x.no AND e.n = x.ended_n
WHERE
    i.task_id = :task_id
    AND (:viewer::text IS NULL OR :viewer IN (x.sender, x.recipient, x.lessee))

-- :updates
SELECT generation, ts_ms, body FROM events
WHERE no = :no AND generation > :after AND generation <= :until
ORDER BY n DESC
LIMIT :count

-- :handovers
SELECT ts_ms, kind, body FROM events
WHERE no = :no AND kind NOT IN ('task_sent', 'task_followed', 'task_updated', 'artifact', 'message_kept')
ORDER BY n

-- :children
SELECT
    x.*, f.body AS task_body, e.body AS ended_body,
    /* holder_lost x */ AS holder_lost
FROM (
    SELECT
        no, task_id, state, a2a_state, sender, recipient, lessee, attempt, turn, generation, created_at_ms, updated_at_ms,
        ended_n, rest, parent, origin, interrupted, node, boot
    FROM live WHERE parent = ANY(:parents::text[])
    UNION ALL
    SELECT
        no, task_id, 'drained', a2a_state, sender, recipient, lessee, attempt, turn, generation, created_at_ms,
        updated_at_ms, ended_n, rest, parent, origin, false, NULL, NULL
    FROM tasks WHERE parent = ANY(:parents::text[])
) AS x
JOIN events AS f ON f.no = x.no AND f.n = 1
LEFT JOIN events AS e ON e.no = x.no AND e.n = x.ended_n
WHERE :viewer::text IS NULL OR :viewer IN (x.sender, x.recipient, x.lessee)
ORDER BY x.no
LIMIT :count

-- :remote_notes
SELECT no, body FROM events
WHERE no = ANY(:nos::bigint[]) AND kind = 'task_updated' AND body LIKE '%covenant.remote%'
ORDER BY no, n

-- :queue
SELECT w.*, f.body AS task_body, NULL AS ended_body FROM (
    SELECT x.*, sum(octet_length(f.body)) OVER (
        ORDER BY x.rank, CASE WHEN x.state = 'leased' THEN x.touched_at_ms ELSE x.place END, x.no
    ) - octet_length(f.body) AS before
    FROM (
        SELECT l.*,
            CASE
                WHEN /* holder_lost l */ THEN 0
                WHEN l.state = 'leased' THEN 1
                WHEN l.state = 'queued' THEN 2
                ELSE 3
            END AS rank
        FROM live AS l
        WHERE
            l.state <> 'settled'
            AND (:viewer::text IS NULL OR :viewer IN (l.sender, l.recipient, l.lessee))
            AND (:state::text IS NULL OR l.state = :state)
            AND (:touched_by::bigint IS NULL OR l.state <> 'leased' OR l.touched_at_ms <= :touched_by)
            AND (:due_by::bigint IS NULL OR l.deadline_ms <= :due_by)
        ORDER BY rank, CASE WHEN l.state = 'leased' THEN l.touched_at_ms ELSE l.place END, l.no
        LIMIT :count
    ) AS x JOIN events AS f ON f.no = x.no AND f.n = 1
) AS w JOIN events AS f ON f.no = w.no AND f.n = 1
WHERE w.before < :bytes_max
ORDER BY w.rank, CASE WHEN w.state = 'leased' THEN w.touched_at_ms ELSE w.place END, w.no

-- :waiting_results
SELECT e.body FROM (
    SELECT *, sum(size) OVER (ORDER BY place) - size AS before FROM (
        SELECT r.place, l.no, l.ended_n, octet_length(e.body) AS size
        FROM results AS r JOIN live AS l ON l.no = r.no JOIN events AS e ON e.no = l.no AND e.n = l.ended_n
        WHERE :viewer::text IS NULL OR r.sender = :viewer
        ORDER BY r.place
        LIMIT :count
    ) AS c
) AS w JOIN events AS e ON e.no = w.no AND e.n = w.ended_n
WHERE w.before < :bytes_max
ORDER BY w.place

-- :recent_results
SELECT e.body FROM (
    SELECT *, sum(size) OVER (ORDER BY place DESC) - size AS before FROM (
        SELECT r.place, l.no, l.ended_n, octet_length(e.body) AS size
        FROM results AS r JOIN live AS l ON l.no = r.no JOIN events AS e ON e.no = l.no AND e.n = l.ended_n
        WHERE :viewer::text IS NULL OR r.sender = :viewer
        ORDER BY r.place DESC
        LIMIT :count
    ) AS c
) AS w JOIN events AS e ON e.no = w.no AND e.n = w.ended_n
WHERE w.before < :bytes_max
ORDER BY w.place DESC

-- :recent_tasks
SELECT e.body FROM (
    SELECT *, sum(size) OVER (ORDER BY place DESC) - size AS before FROM (
        SELECT l.place, l.no, octet_length(e.body) AS size
        FROM live AS l JOIN events AS e ON e.no = l.no AND e.n = 1
        WHERE l.state = 'queued' AND (:viewer::text IS NULL OR :viewer IN (l.sender, l.recipient, l.lessee))
        ORDER BY l.place DESC
        LIMIT :count
    ) AS c
) AS w JOIN events AS e ON e.no = w.no AND e.n = 1
WHERE w.before < :bytes_max
ORDER BY w.place DESC

-- :of_tenant
SELECT x.*, e.body AS ended_body
FROM (
    SELECT * FROM (
        SELECT no, task_id, agent_id, context_id, origin, a2a_state, created_at_ms, updated_at_ms, generation, ended_n
        FROM live WHERE tenant = :tenant AND (NOT :simple::boolean OR origin = 'simple')
        ORDER BY no DESC LIMIT :count
    ) AS l
    UNION ALL
    SELECT * FROM (
        SELECT no, task_id, agent_id, context_id, origin, a2a_state, created_at_ms, updated_at_ms, generation, ended_n
        FROM tasks WHERE tenant = :tenant AND (NOT :simple::boolean OR origin = 'simple')
        ORDER BY no DESC LIMIT :count
    ) AS t
) AS x LEFT JOIN events AS e ON e.no = x.no AND e.n = x.ended_n
ORDER BY x.no DESC
LIMIT :count

-- :page
SELECT * FROM (
    {walks}
) AS x
ORDER BY updated_at_ms DESC, no DESC
LIMIT :count

-- :page_walk
(
    SELECT no, updated_at_ms FROM {table}
    WHERE tenant IS NOT NULL AND recipient = :recipient AND (updated_at_ms, no) < (:updated_at_ms, :no) {filters}
    ORDER BY updated_at_ms DESC, no DESC LIMIT :count
)

-- :page_total
SELECT sum(x.n)::bigint FROM (
    {walks}
) AS x

-- :page_total_walk
(SELECT count(*) AS n FROM {table} WHERE tenant IS NOT NULL AND recipient = :recipient {filters})

-- :page_sizes
SELECT no, sum(length(body)) AS size FROM events
WHERE no = ANY(:nos::bigint[]) AND generation > 0 AND (:artifacts::boolean OR kind <> 'artifact')
GROUP BY no

-- :page_steps
SELECT no, ts_ms, body FROM events
WHERE no = ANY(:nos::bigint[]) AND generation > 0 AND (:artifacts::boolean OR kind <> 'artifact')
ORDER BY no, n

-- :listed_total
SELECT coalesce(sum(n), 0)::bigint AS total FROM counts WHERE kind = 'listed' AND lane = ANY(:lanes::text[])

-- :oldest_lease
SELECT rest FROM live WHERE state = 'leased' ORDER BY touched LIMIT 1

-- :holders_lost
SELECT count(*) FROM live AS l
WHERE /* holder_lost l */

-- :lost_heads
SELECT l.head FROM live AS l
WHERE /* holder_lost l */
LIMIT 10000

-- :lanes
SELECT lane, sum(n)::bigint AS n FROM counts WHERE kind = 'lane' GROUP BY lane HAVING sum(n) <> 0

-- :queue_depths
SELECT x.depth, x.oldest_at_ms, l.head
FROM (
    SELECT recipient, count(*) AS depth, min(created_at_ms) AS oldest_at_ms, min(no) AS no FROM live
    WHERE state = 'queued'
    GROUP BY recipient
    ORDER BY depth DESC, recipient
    LIMIT :count
) AS x JOIN live AS l ON l.no = x.no
ORDER BY x.depth DESC, x.recipient

-- :grants
SELECT r.body, coalesce(u.used, 0) AS used FROM register_rows AS r LEFT JOIN grant_uses AS u ON u.signature = r.name
WHERE r.kind = 'grant' AND r.body IS NOT NULL
ORDER BY r.made

-- :registered
SELECT body FROM register_rows WHERE kind = :kind AND body IS NOT NULL ORDER BY made

-- :pushes
SELECT body FROM pushes WHERE task_id = :task_id ORDER BY made

-- :outbox
SELECT body FROM pushes ORDER BY made

-- :delegation
SELECT body FROM delegations WHERE role = :role AND peer = :peer AND offer_id = :offer_id

-- :delegation_of
SELECT body FROM delegations WHERE task_id = :task_id ORDER BY moved DESC LIMIT 1

-- :delegations
SELECT body FROM delegations ORDER BY moved DESC

-- :delegations_live
SELECT body FROM delegations WHERE NOT ended AND role = :role AND (:peer::text IS NULL OR peer = :peer) ORDER BY moved

-- :parcels
SELECT body FROM (
    SELECT p.body, p.seq, min(p.made) OVER (PARTITION BY p.role, p.offer_id) AS begun FROM parcels AS p
    WHERE p.peer = :peer
) AS x ORDER BY begun, seq

-- :addressees
SELECT DISTINCT peer FROM parcels

-- :envelope
SELECT EXISTS (SELECT FROM envelopes WHERE sender = :sender AND jti = :jti AND until_ms >= :now_ms)

-- :peer_usage
SELECT day, role, peer, profile, offers, accepted, rejected, completed, failed, cancelled, timeout, tokens FROM peer_usage
WHERE day >= :since AND (:peer::text IS NULL OR peer = :peer)
ORDER BY day DESC, role, peer, profile COLLATE "C" LIMIT 50000

-- :messages
SELECT body FROM messages ORDER BY place DESC LIMIT :count

-- :kept_bytes
SELECT lane AS tenant, sum(n)::bigint AS n FROM counts WHERE kind = 'kept' GROUP BY lane

-- :erased
SELECT coalesce(sum(n), 0)::bigint FROM lane_counts WHERE kind = 'kept' AND writer = 0

-- :erase
WITH held AS (
    SELECT greatest(0, coalesce(sum(n), 0) - :bytes_max::bigint) AS excess FROM counts
    WHERE kind = 'kept' AND lane = :tenant AND :bytes_max::bigint > 0
),
looked AS (
    SELECT no, created_at_ms, updated_at_ms, sum(size) OVER (ORDER BY no) AS passed, size FROM (
        SELECT no, created_at_ms, updated_at_ms, size FROM tasks
        WHERE {condition} AND no > :after
        ORDER BY no
        LIMIT :count
    ) AS t
),
gone AS (
    DELETE FROM tasks
    WHERE no IN (
        SELECT l.no FROM looked AS l CROSS JOIN held AS h
        WHERE l.updated_at_ms < :before_ms OR l.passed - l.size < h.excess
    )
    RETURNING no, tenant, recipient, recipient_display, a2a_state, size
),
told AS (
    DELETE FROM events WHERE no IN (SELECT no FROM gone)
),
counted AS (
    INSERT INTO lane_counts AS c (kind, lane, writer, n)
    SELECT x.kind, x.lane, 0, -sum(x.n)
    FROM (
        SELECT 'kept' AS kind, coalesce(tenant, '') AS lane, size AS n FROM gone
        UNION ALL
        SELECT 'listed', recipient || ' ' || a2a_state, 1 FROM gone WHERE tenant IS NOT NULL
        UNION ALL
        SELECT
            'lane',
            coalesce(tenant, '') || ' ' || recipient_display || ' ' || recipient
            || CASE a2a_state WHEN 'failed' THEN ' failed' ELSE ' done' END,
            1
        FROM gone
    ) AS x
    GROUP BY x.kind, x.lane
    ON CONFLICT (kind, lane, writer) DO UPDATE SET n = c.n + excluded.n
    RETURNING 1
)
SELECT
    (SELECT count(*) FROM gone) AS tasks,
    (SELECT coalesce(sum(size), 0)::bigint FROM gone) AS bytes,
    (SELECT count(*) FROM looked) AS looked,
    (SELECT coalesce(max(no), 0) FROM looked) AS last_no,
    (SELECT coalesce(max(created_at_ms), 0) FROM looked) AS last_ms,
    (SELECT h.excess > coalesce((SELECT max(l.passed) FROM looked AS l), 0) FROM held AS h) AS too_large

-- :nodes
SELECT
    n.node, n.boot,
    n.lost_at_ms IS NULL AND n.until_ms >= (extract(epoch FROM clock_timestamp()) * 1000)::bigint AS alive,
    coalesce(n.lost_at_ms <= n.until_ms, false) AS "left",
    n.started_ms AS started_at_ms, n.seen_ms AS seen_at_ms, count(l.no) AS leases
FROM nodes AS n LEFT JOIN live AS l ON l.node = n.node AND l.boot = n.boot AND l.state = 'leased'
GROUP BY n.node
ORDER BY n.node

-- :held_before
SELECT task_id FROM live WHERE node = :node AND boot <> :boot AND state = 'leased'

-- :notes
SELECT version, body FROM notes WHERE tenant = :tenant AND agent_id = :agent_id

-- :keep_notes
INSERT INTO notes AS n (tenant, agent_id, version, body)
SELECT :tenant, :agent_id, :version::bigint + 1, :body
WHERE :version::bigint = 0 OR EXISTS (SELECT FROM notes WHERE tenant = :tenant AND agent_id = :agent_id)
ON CONFLICT (tenant, agent_id) DO UPDATE SET version = excluded.version, body = excluded.body
WHERE n.version = :version::bigint
RETURNING n.version
