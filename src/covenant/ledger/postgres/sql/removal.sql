-- Reads and deletions of a tenant's removal. By then `live` has none of its tasks.

-- :ids
SELECT task_id FROM tasks
WHERE {condition} AND no > :after
ORDER BY no
LIMIT :count

-- :ids_gone
DELETE FROM ids WHERE task_id = ANY(:task_ids::text[])

-- :requests_gone
WITH gone AS (
    DELETE FROM requests WHERE holder = ANY(:parties::text[]) RETURNING 1
)
INSERT INTO lane_counts AS c (kind, lane, writer, n)
SELECT 'requests', '', 0, -count(*) FROM gone HAVING count(*) > 0
ON CONFLICT (kind, lane, writer) DO UPDATE SET n = c.n + excluded.n

-- :notes_gone
DELETE FROM notes WHERE tenant = :tenant

-- :counts_added
WITH over AS (
    DELETE FROM counted AS c WHERE EXISTS (
        SELECT FROM unnest(c.lanes) AS l (lane)
        WHERE
            l.lane = :tenant
            OR split_part(l.lane, ' ', 1) = :tenant
            OR EXISTS (SELECT FROM unnest(:parties::text[]) AS k (key) WHERE strpos(l.lane, k.key) > 0)
    )
    RETURNING c.kinds, c.lanes, c.ns
)

INSERT INTO lane_counts AS c (kind, lane, writer, n)
SELECT u.kind, u.lane, -1, sum(u.n) FROM over CROSS JOIN LATERAL unnest(over.kinds, over.lanes, over.ns) AS u (kind, lane, n)
GROUP BY u.kind, u.lane
ORDER BY u.kind, u.lane
ON CONFLICT (kind, lane, writer) DO UPDATE SET n = c.n + excluded.n

-- :counts_gone
DELETE FROM lane_counts AS c USING (
    SELECT kind, lane FROM lane_counts
    WHERE
        lane = :tenant
        OR split_part(lane, ' ', 1) = :tenant
        OR EXISTS (SELECT FROM unnest(:parties::text[]) AS k (key) WHERE strpos(lane, k.key) > 0)
    GROUP BY kind, lane
    HAVING sum(n) = 0
) AS z
WHERE c.kind = z.kind AND c.lane = z.lane

-- :cached
SELECT name FROM shared WHERE cached IS NOT NULL

-- :tables
SELECT
    t.table_name AS name,
    EXISTS (
        SELECT FROM information_schema.columns AS c
        WHERE c.table_schema = t.table_schema AND c.table_name = t.table_name AND c.column_name = 'tenant'
    ) AS has_tenant
FROM information_schema.tables AS t
WHERE t.table_schema = current_schema() AND t.table_type = 'BASE TABLE'
    -- Bytes of files: a tenant's are counted by its space.
    AND t.table_name <> 'blob_chunk'
ORDER BY t.table_name

-- :search
SELECT count(*) AS found, count(*) FILTER (WHERE {kept}) AS kept
FROM {table} AS x
WHERE {own} OR EXISTS (SELECT FROM unnest(:markers::text[]) AS m (marker) WHERE strpos(x::text, m.marker) > 0)

-- :removed
-- A removed item leaves a row without a body.
SELECT r.version, ARRAY(
    SELECT t.name FROM register_rows AS t WHERE t.kind = 'tenant' AND t.body IS NULL AND t.version > :after::bigint
) AS names
FROM registers AS r
