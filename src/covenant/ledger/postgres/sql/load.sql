-- Rows for decisions. A row on which a decision depends stays locked until its batch is committed.
--
-- Rows of hot tables are looked up one by one (LATERAL), whatever number of rows the planner expects: see write.sql.

-- :begin
SELECT w.seq, w.audit_index, w.audit_hash, nextval('places') AS place, (SELECT version FROM registers) AS version
FROM writers AS w
WHERE w.writer = :writer AND w.boot = :boot AND w.lost_at_ms IS NULL
FOR UPDATE OF w

-- :place
SELECT nextval('places')

-- :numbers
SELECT nextval('task_numbers')

-- :live
SELECT l.*, e.body AS ended_body
FROM (SELECT no FROM ids WHERE task_id = ANY(:task_ids::text[]) ORDER BY no OFFSET 0) AS i
CROSS JOIN LATERAL (SELECT x.* FROM live AS x WHERE x.no = i.no FOR UPDATE) AS l
LEFT JOIN LATERAL (SELECT x.body FROM events AS x WHERE x.no = l.no AND x.n = l.ended_n OFFSET 0) AS e ON true

-- :ended
SELECT i.task_id AS id, t.*, f.body AS task_body, e.body AS ended_body
FROM ids AS i
LEFT JOIN tasks AS t ON t.no = i.no
LEFT JOIN events AS f ON f.no = t.no AND f.n = 1
LEFT JOIN events AS e ON e.no = t.no AND e.n = t.ended_n
WHERE i.task_id = ANY(:task_ids::text[])

-- :bodies
SELECT i.task_id, e.body FROM ids AS i JOIN events AS e ON e.no = i.no AND e.n = 1
WHERE i.task_id = ANY(:task_ids::text[])

-- :queue
SELECT q.place AS queue_place, l.*, NULL AS ended_body, e.body AS task_body
FROM queue AS q
CROSS JOIN LATERAL (SELECT x.* FROM live AS x WHERE x.no = q.no FOR UPDATE SKIP LOCKED) AS l
CROSS JOIN LATERAL (SELECT x.body FROM events AS x WHERE x.no = q.no AND x.n = 1 OFFSET 0) AS e
WHERE q.recipient = :owner AND q.place >= :floor
ORDER BY q.place
LIMIT :count
FOR UPDATE OF q SKIP LOCKED

-- :recipients
WITH RECURSIVE waiting AS (
    (SELECT recipient, place FROM queue ORDER BY recipient, place LIMIT 1)
    UNION ALL
    SELECT n.recipient, n.place FROM waiting AS w CROSS JOIN LATERAL (
        SELECT q.recipient, q.place FROM queue AS q WHERE q.recipient > w.recipient ORDER BY q.recipient, q.place LIMIT 1
    ) AS n
)
SELECT recipient, place FROM waiting

-- :results
SELECT r.place AS queue_place, l.*, e.body AS ended_body
FROM results AS r
CROSS JOIN LATERAL (SELECT x.* FROM live AS x WHERE x.no = r.no FOR UPDATE SKIP LOCKED) AS l
LEFT JOIN LATERAL (SELECT x.body FROM events AS x WHERE x.no = l.no AND x.n = l.ended_n OFFSET 0) AS e ON true
WHERE r.sender = :owner AND r.place >= :floor
ORDER BY r.sender, r.place
LIMIT :count
FOR UPDATE OF r SKIP LOCKED

-- :all_results
SELECT r.place AS queue_place, l.*, e.body AS ended_body
FROM results AS r
CROSS JOIN LATERAL (SELECT x.* FROM live AS x WHERE x.no = r.no FOR UPDATE SKIP LOCKED) AS l
LEFT JOIN LATERAL (SELECT x.body FROM events AS x WHERE x.no = l.no AND x.n = l.ended_n OFFSET 0) AS e ON true
ORDER BY r.place
LIMIT :count
FOR UPDATE OF r SKIP LOCKED

-- :leases
SELECT l.*, NULL AS ended_body FROM live AS l
WHERE l.state = 'leased'
ORDER BY l.touched
LIMIT :count
FOR UPDATE OF l SKIP LOCKED

-- :due
SELECT l.*, NULL AS ended_body FROM live AS l
WHERE l.due_at_ms <= :by_ms
ORDER BY l.due_at_ms, l.task_id
LIMIT :count
FOR UPDATE OF l SKIP LOCKED

-- :orphans
SELECT l.*, NULL AS ended_body FROM live AS l
WHERE
    l.origin = 'delegation' AND l.state <> 'settled'
    AND NOT EXISTS (
        SELECT FROM ids AS i JOIN live AS p ON p.no = i.no WHERE i.task_id = l.parent AND p.state <> 'settled'
    )
ORDER BY l.no
LIMIT :count
FOR UPDATE OF l SKIP LOCKED

-- :shared
SELECT * FROM shared WHERE key = ANY(:keys::text[]) ORDER BY key FOR UPDATE

-- :followers
SELECT l.*, NULL AS ended_body FROM live AS l
WHERE l.shared = ANY(:keys::text[]) AND l.state = 'following'
ORDER BY l.place, l.no
FOR UPDATE OF l

-- :cached
SELECT name, cached_at_ms, cached_bytes FROM shared
WHERE cached IS NOT NULL
ORDER BY cached_place
LIMIT :count
FOR UPDATE SKIP LOCKED

-- :requests
SELECT r.*
FROM unnest(:verbs::text[], :holders::text[], :request_ids::text[]) AS u (verb, holder, request_id)
CROSS JOIN LATERAL (
    SELECT x.* FROM requests AS x
    WHERE x.verb = u.verb AND x.holder = u.holder AND x.request_id = u.request_id
    FOR UPDATE
) AS r

-- :uses
SELECT signature, used FROM grant_uses WHERE signature = ANY(:signatures::text[]) ORDER BY signature FOR UPDATE

-- :new_uses
INSERT INTO grant_uses (signature, used) SELECT u.*, 0 FROM unnest(:signatures::text[]) AS u ON CONFLICT DO NOTHING

-- :pushes
SELECT task_id, body FROM pushes WHERE task_id = ANY(:task_ids::text[]) ORDER BY task_id, made FOR UPDATE

-- :pushes_idle
SELECT body FROM pushes WHERE idle_at_ms <= :by_ms ORDER BY idle_at_ms LIMIT :count FOR UPDATE SKIP LOCKED

-- :delegation
SELECT body FROM delegations WHERE role = :role AND peer = :peer AND offer_id = :offer_id FOR UPDATE

-- :delegations_of_peer
SELECT body FROM delegations WHERE peer = :peer ORDER BY moved FOR UPDATE

-- :delegations_live
SELECT count(*) FROM delegations WHERE peer = :peer AND NOT ended

-- :delegation_ended_first
SELECT body FROM delegations WHERE ended ORDER BY moved LIMIT 1

-- :parcels
SELECT body FROM parcels WHERE peer = :peer AND role = :role AND offer_id = :offer_id ORDER BY seq FOR UPDATE

-- :parcels_of_peer
SELECT body FROM parcels WHERE peer = :peer ORDER BY made, seq FOR UPDATE

-- :envelope
SELECT EXISTS (SELECT FROM envelopes WHERE sender = :sender AND jti = :jti AND until_ms >= :now_ms)

-- :envelope_count
SELECT count(*) FROM envelopes WHERE sender = :sender AND until_ms >= :now_ms
