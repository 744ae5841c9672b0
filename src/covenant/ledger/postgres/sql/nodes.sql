-- Nodes, writers, registers and news.

-- :join
INSERT INTO nodes (node, boot, started_ms, seen_ms, until_ms, level)
SELECT :node, :boot, t.now_ms, t.now_ms, t.now_ms + :lease_ms::bigint, :level
FROM (SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint AS now_ms) AS t
ON CONFLICT (node) DO UPDATE SET
    boot = excluded.boot, started_ms = excluded.started_ms, seen_ms = excluded.seen_ms, until_ms = excluded.until_ms, level = excluded.level,
    lost_at_ms = NULL, registers_seen = 0
RETURNING started_ms, (SELECT restored_at_ms FROM registers) AS restored_at_ms

-- :new_writer
INSERT INTO writers (writer, node, boot, audit_hash) VALUES (nextval('writer_numbers'), :node, :boot, :genesis)
ON CONFLICT (node) DO UPDATE SET boot = excluded.boot, lost_at_ms = NULL
RETURNING writer, seq

-- :beat
UPDATE nodes SET seen_ms = t.now_ms, until_ms = t.now_ms + :lease_ms::bigint, registers_seen = :registers_seen
FROM (SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint AS now_ms) AS t
WHERE node = :node AND boot = :boot AND lost_at_ms IS NULL
RETURNING seen_ms

-- :leave
UPDATE nodes SET lost_at_ms = (extract(epoch FROM clock_timestamp()) * 1000)::bigint
WHERE node = :node AND boot = :boot AND lost_at_ms IS NULL

-- :lapsed
SELECT node, boot FROM nodes
WHERE lost_at_ms IS NULL AND until_ms < (extract(epoch FROM clock_timestamp()) * 1000)::bigint

-- :fence_writer
UPDATE writers SET lost_at_ms = (extract(epoch FROM clock_timestamp()) * 1000)::bigint
WHERE node = :node AND boot = :boot AND lost_at_ms IS NULL

-- :fence_node
UPDATE nodes SET lost_at_ms = (extract(epoch FROM clock_timestamp()) * 1000)::bigint
WHERE
    node = :node AND boot = :boot AND lost_at_ms IS NULL
    AND until_ms < (extract(epoch FROM clock_timestamp()) * 1000)::bigint
RETURNING node

-- :lead
INSERT INTO singletons AS s (name, node, boot) SELECT u, :node, :boot FROM unnest(:names::text[]) AS u ORDER BY u
ON CONFLICT (name) DO UPDATE SET node = excluded.node, boot = excluded.boot
WHERE NOT EXISTS (SELECT FROM nodes AS n WHERE n.node = s.node AND n.boot = s.boot AND n.lost_at_ms IS NULL)

-- :led
SELECT name FROM singletons WHERE node = :node AND boot = :boot

-- :standing
SELECT n.boot, n.started_ms, n.lost_at_ms, r.restored_at_ms
FROM registers AS r LEFT JOIN nodes AS n ON n.node = :node

-- :restored
UPDATE registers SET restored_at_ms = (extract(epoch FROM clock_timestamp()) * 1000)::bigint

-- :fence_writers
UPDATE writers SET lost_at_ms = coalesce(lost_at_ms, (extract(epoch FROM clock_timestamp()) * 1000)::bigint)

-- :fence_nodes
WITH fenced AS (
    UPDATE nodes SET lost_at_ms = (extract(epoch FROM clock_timestamp()) * 1000)::bigint
    WHERE lost_at_ms IS NULL
    RETURNING 1
)
SELECT count(*) FROM fenced

-- :nodes
SELECT node, boot, lost_at_ms FROM nodes

-- :behind
SELECT count(*) FROM nodes
WHERE
    lost_at_ms IS NULL AND registers_seen < :version
    AND until_ms >= (extract(epoch FROM clock_timestamp()) * 1000)::bigint

-- :writers
SELECT w.writer, w.seq, w.boot, (SELECT version FROM registers) AS version FROM writers AS w

-- :writer_seq
SELECT seq FROM writers WHERE writer = :writer AND boot = :boot AND lost_at_ms IS NULL FOR UPDATE

-- :skip
WITH w AS (UPDATE writers SET seq = :seq WHERE writer = :writer AND boot = :boot AND seq = :seq::bigint - 1 RETURNING 1)
INSERT INTO news (writer, seq, topics) SELECT :writer, :seq, :topics FROM w

-- :news_of
SELECT topics FROM news WHERE writer = :writer AND seq = :seq

-- :news
SELECT n.writer, n.seq, n.topics
FROM unnest(:writers::bigint[], :seqs::bigint[]) AS u (writer, seq)
JOIN news AS n ON n.writer = u.writer AND n.seq > u.seq
ORDER BY n.writer, n.seq
LIMIT :count

-- :counts
SELECT kind, lane, sum(n)::bigint AS n FROM lane_counts GROUP BY kind, lane HAVING sum(n) <> 0

-- :registers
SELECT kind, name, version, body FROM register_rows WHERE version > :version ORDER BY version, made

-- :all_registers
SELECT kind, name, version, body FROM register_rows WHERE body IS NOT NULL ORDER BY made

-- :lock_registers
SELECT version FROM registers FOR UPDATE

-- :heard
SELECT peer, heard_at_ms FROM peers_heard

-- :forget_news
DELETE FROM news WHERE at < clock_timestamp() - make_interval(secs => :kept_s)

-- :forget_messages
DELETE FROM messages WHERE place < (SELECT min(place) FROM (SELECT place FROM messages ORDER BY place DESC LIMIT :kept) AS m)

-- :vacuum_live
VACUUM live

-- :vacuum_queue
VACUUM queue

-- :vacuum_results
VACUUM results

-- :vacuum_counts
VACUUM lane_counts

-- :vacuum_news
VACUUM news

-- :vacuum_writers
VACUUM writers

-- :tell
SELECT pg_notify('covenant_news', :writer)

-- :operating
SELECT
    (SELECT coalesce(sum(n_dead_tup), 0)::bigint FROM pg_stat_user_tables WHERE schemaname = current_schema()) AS rows_dead,
    (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend') AS connections,
    current_setting('max_connections')::bigint AS connections_max,
    (
        SELECT coalesce(max(r.version - n.registers_seen), 0)::bigint
        FROM registers AS r JOIN nodes AS n
            ON n.lost_at_ms IS NULL AND n.until_ms >= (extract(epoch FROM clock_timestamp()) * 1000)::bigint
    ) AS registers_behind

-- :columns
SELECT table_name, column_name, data_type FROM information_schema.columns WHERE table_schema = :schema

-- :rights_missing
SELECT tablename AS table_name FROM pg_tables
WHERE
    schemaname = :schema
    AND EXISTS (
        SELECT FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS r (right_)
        WHERE NOT has_table_privilege(format('%I.%I', schemaname, tablename), r.right_)
    )
