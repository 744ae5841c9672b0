-- Nodes, writers, registers and news.

-- :left
SELECT m.home FROM moves AS m WHERE m.direction = 'out' AND m.at_ms = (SELECT max(o.at_ms) FROM moves AS o)

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
-- Others end a run when its time is over. A run that ended before that has left by itself.
UPDATE nodes SET lost_at_ms = t.now_ms, until_ms = greatest(until_ms, t.now_ms)
FROM (SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint AS now_ms) AS t
WHERE node = :node AND boot = :boot AND lost_at_ms IS NULL

-- :lapsed
SELECT node, boot FROM nodes
WHERE lost_at_ms IS NULL AND until_ms < (extract(epoch FROM clock_timestamp()) * 1000)::bigint

-- :fence
WITH idle AS (SELECT node FROM writers WHERE node = :node AND boot = :boot FOR UPDATE NOWAIT),
lost AS (
    UPDATE nodes AS n SET lost_at_ms = (extract(epoch FROM clock_timestamp()) * 1000)::bigint
    FROM idle
    WHERE
        n.node = idle.node AND n.boot = :boot AND n.lost_at_ms IS NULL
        AND n.until_ms < (extract(epoch FROM clock_timestamp()) * 1000)::bigint
    RETURNING n.node, n.lost_at_ms
)
UPDATE writers AS w SET lost_at_ms = lost.lost_at_ms FROM lost WHERE w.node = lost.node
RETURNING w.node

-- :lead
INSERT INTO singletons AS s (name, node, boot) SELECT u, :node, :boot FROM unnest(:names::text[]) AS u ORDER BY u
ON CONFLICT (name) DO UPDATE SET node = excluded.node, boot = excluded.boot
WHERE NOT EXISTS (SELECT FROM nodes AS n WHERE n.node = s.node AND n.boot = s.boot AND n.lost_at_ms IS NULL)

-- :held
SELECT s.name, s.node FROM singletons AS s JOIN nodes AS n ON n.node = s.node AND n.boot = s.boot AND n.lost_at_ms IS NULL

-- :release
DELETE FROM singletons WHERE name = any(:names::text[]) AND node = :node AND boot = :boot

-- :own_run
-- A node that was lost and then forgotten has only its fenced writer.
SELECT
    coalesce(n.boot, w.boot) AS boot, n.started_ms, coalesce(n.lost_at_ms, w.lost_at_ms) AS lost_at_ms, r.restored_at_ms
FROM registers AS r LEFT JOIN nodes AS n ON n.node = :node
LEFT JOIN writers AS w ON n.node IS NULL AND w.node = :node AND w.lost_at_ms IS NOT NULL

-- :last_restore
SELECT max(restored_at_ms) AS restored_at_ms FROM registers

-- :restored
UPDATE registers SET restored_at_ms = (extract(epoch FROM clock_timestamp()) * 1000)::bigint

-- :chain
INSERT INTO writers AS w (writer, node, boot, audit_hash, lost_at_ms) VALUES (
    nextval('writer_numbers'), :chain, :chain, :genesis, (extract(epoch FROM clock_timestamp()) * 1000)::bigint
)
ON CONFLICT (node) DO UPDATE SET lost_at_ms = w.lost_at_ms
RETURNING audit_index, audit_hash, nextval('places') AS place

-- :chain_row
INSERT INTO audit (chain, idx, place, ts_ms, issuer, chain_hash, row)
VALUES (:chain, :idx, :place, :ts_ms, :issuer, :chain_hash, :row)

-- :chain_moved
UPDATE writers SET audit_index = :idx, audit_hash = :chain_hash WHERE node = :chain

-- :forget_node
DELETE FROM nodes WHERE node = :node AND lost_at_ms IS NOT NULL

-- :forget_nodes
WITH over AS (
    SELECT node FROM nodes
    WHERE lost_at_ms < (extract(epoch FROM clock_timestamp()) * 1000)::bigint - :kept_ms::bigint
    LIMIT :count FOR UPDATE SKIP LOCKED
),

gone AS (DELETE FROM nodes AS n USING over WHERE n.node = over.node RETURNING n.node),

announced AS (
    DELETE FROM register_rows AS r USING gone
    WHERE r.kind = 'resident' AND starts_with(r.name, '["' || gone.node || '",')
),

led AS (DELETE FROM singletons AS s USING gone WHERE s.node = gone.node)

SELECT w.writer FROM writers AS w JOIN gone ON gone.node = w.node

-- :fence_writers
UPDATE writers SET lost_at_ms = coalesce(lost_at_ms, (extract(epoch FROM clock_timestamp()) * 1000)::bigint)

-- :fence_nodes
WITH fenced AS (
    UPDATE nodes SET lost_at_ms = t.now_ms, until_ms = least(until_ms, t.now_ms - 1)
    FROM (SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint AS now_ms) AS t
    WHERE lost_at_ms IS NULL
    RETURNING 1
)
SELECT count(*) FROM fenced

-- :nodes
SELECT node, boot, lost_at_ms, level FROM nodes

-- :behind
SELECT count(*) FROM nodes
WHERE
    lost_at_ms IS NULL AND registers_seen < :version
    AND until_ms >= (extract(epoch FROM clock_timestamp()) * 1000)::bigint

-- :writers
SELECT w.writer, w.seq, w.boot, (SELECT version FROM registers) AS version FROM writers AS w

-- :writers_of_nodes
-- Those that may write: a node that comes back after it was forgotten is among the nodes first.
SELECT w.writer, w.seq, w.boot, (SELECT version FROM registers) AS version
FROM nodes AS n JOIN writers AS w ON w.node = n.node

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
SELECT kind, lane, sum(n)::bigint AS n FROM counts GROUP BY kind, lane HAVING sum(n) <> 0

-- :live_rows
-- Counts are written with the rows that they count, so that they agree in every snapshot.
SELECT
    (SELECT coalesce(sum(n), 0)::bigint FROM counts WHERE kind = 'state') AS counted,
    (SELECT count(*) FROM (SELECT no FROM live LIMIT :most) AS l) AS found

-- :recount_live
INSERT INTO lane_counts AS c (kind, lane, writer, n)
SELECT 'state', x.lane, -1, sum(x.n) FROM (
    SELECT lane, -n AS n FROM counts WHERE kind = 'state'
    UNION ALL
    SELECT state, count(*) FROM live GROUP BY state
) AS x
GROUP BY x.lane HAVING sum(x.n) <> 0
ON CONFLICT (kind, lane, writer) DO UPDATE SET n = c.n + excluded.n

-- :merge_counts
-- Merges a writer's counter rows that it no longer uses, and those of its batches. Row 0 has the counts of erased tasks:
-- only erasures change it.
WITH rows_over AS (
    DELETE FROM lane_counts WHERE writer = :writer OR (writer >= :first_counter AND writer < :counter)
    RETURNING kind, lane, n
),

batches_over AS (
    DELETE FROM counted WHERE batch >= :first_counter AND batch < :first_counter::bigint + (1::bigint << 40)
    RETURNING kinds, lanes, ns
),

over AS (
    SELECT kind, lane, n FROM rows_over
    UNION ALL
    SELECT u.kind, u.lane, u.n
    FROM batches_over AS b CROSS JOIN LATERAL unnest(b.kinds, b.lanes, b.ns) AS u (kind, lane, n)
)

INSERT INTO lane_counts AS c (kind, lane, writer, n)
SELECT kind, lane, -1, sum(n) FROM over GROUP BY kind, lane HAVING sum(n) <> 0 ORDER BY kind, lane
ON CONFLICT (kind, lane, writer) DO UPDATE SET n = c.n + excluded.n

-- :registers
SELECT kind, name, version, body FROM register_rows WHERE version > :version ORDER BY version, made

-- :announce
WITH v AS (UPDATE registers SET version = version + 1 RETURNING version),

gone AS (
    UPDATE register_rows AS r SET body = NULL, version = v.version FROM v
    WHERE
        r.kind = 'resident' AND starts_with(r.name, :prefix) AND r.name <> ALL(:names::text[]) AND r.body IS NOT NULL
),

here AS (
    INSERT INTO register_rows (kind, name, version, made, body)
    SELECT 'resident', u.name, v.version, v.version, u.body
    FROM v CROSS JOIN unnest(:names::text[], :bodies::text[]) AS u (name, body)
    ON CONFLICT (kind, name) DO UPDATE SET version = excluded.version, body = excluded.body
)

SELECT version FROM v

-- :all_registers
SELECT kind, name, version, body FROM register_rows ORDER BY made

-- :identities
SELECT body FROM register_rows WHERE kind = 'identity' AND body IS NOT NULL

-- :secrets
SELECT name, body FROM secrets

-- :secret
SELECT body FROM secrets WHERE name = :name

-- :keep_secret
INSERT INTO secrets (name, body) VALUES (:name, :body) ON CONFLICT (name) DO NOTHING

-- :replace_secret
WITH s AS (UPDATE secrets SET body = :body WHERE name = :name AND body = :before RETURNING name, body),

v AS (UPDATE registers AS r SET version = r.version + 1 FROM s RETURNING r.version),

told AS (
    INSERT INTO register_rows (kind, name, version, made, body)
    SELECT 'secret', s.name, v.version, v.version, to_json(s.body)::text FROM s CROSS JOIN v
    ON CONFLICT (kind, name) DO UPDATE SET version = excluded.version, body = excluded.body
)

SELECT version FROM v

-- :lock_registers
SELECT version FROM registers FOR UPDATE

-- :heard
SELECT peer, heard_at_ms FROM peers_heard

-- :forget_news
-- Rows that another node deletes right now are left to it: two that lock them in another order would wait for each other.
DELETE FROM news AS n USING (
    SELECT writer, seq FROM news WHERE at < statement_timestamp() - make_interval(secs => :kept_s) FOR UPDATE SKIP LOCKED
) AS o
WHERE n.writer = o.writer AND n.seq = o.seq

-- :forget_messages
DELETE FROM messages WHERE place < (SELECT min(place) FROM (SELECT place FROM messages ORDER BY place DESC LIMIT :kept) AS m)

-- :notify
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

-- :indexes
SELECT tablename AS table_name, indexname AS name, regexp_replace(indexdef, ' ON \S+ ', ' ') AS definition
FROM pg_indexes WHERE schemaname = :schema

-- :bounds
-- What refuses or hides rows, in words.
WITH c AS (
    SELECT oid, relname, relrowsecurity, relpersistence FROM pg_class
    WHERE relnamespace = :schema::text::regnamespace AND relname = any(:tables::text[])
)
SELECT format('the table %s has the trigger %s', c.relname, t.tgname) AS what
FROM pg_trigger AS t JOIN c ON c.oid = t.tgrelid
WHERE NOT t.tgisinternal
UNION ALL
SELECT format('the table %s has the constraint %s', c.relname, t.conname)
FROM pg_constraint AS t JOIN c ON c.oid = t.conrelid
WHERE t.contype IN ('c', 'f', 'x')
UNION ALL
SELECT format('%s.%s takes no row without a value', c.relname, a.attname)
FROM pg_attribute AS a JOIN c ON c.oid = a.attrelid
WHERE a.attnum > 0 AND NOT a.attisdropped AND a.attnotnull AND NOT a.atthasdef
UNION ALL
SELECT format('the table %s has the rule %s', c.relname, t.rulename)
FROM pg_rewrite AS t JOIN c ON c.oid = t.ev_class
WHERE t.rulename <> '_RETURN'
UNION ALL
SELECT format('the table %s has row security', relname) FROM c WHERE relrowsecurity
UNION ALL
SELECT format('the table %s is emptied by a crash (UNLOGGED)', relname) FROM c WHERE relpersistence = 'u'

-- :rights_missing
-- What this role may not do, in words.
SELECT format('this role may not change the table %s', tablename) AS what FROM pg_tables
WHERE
    schemaname = :schema AND tablename = any(:tables::text[])
    AND EXISTS (
        SELECT FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS r (right_)
        WHERE NOT has_table_privilege(format('%I.%I', schemaname, tablename), r.right_)
    )
UNION ALL
SELECT format('this role may not use the sequence %s', u.name)
FROM unnest(ARRAY['places', 'task_numbers', 'writer_numbers']) AS u (name)
JOIN pg_class AS c ON c.relname = u.name AND c.relkind = 'S' AND c.relnamespace = :schema::text::regnamespace
WHERE NOT has_sequence_privilege(c.oid, 'USAGE')
UNION ALL
SELECT format('the sequence %s is not there', u.name)
FROM unnest(ARRAY['places', 'task_numbers', 'writer_numbers']) AS u (name)
WHERE NOT EXISTS (
    SELECT FROM pg_class AS c
    WHERE c.relname = u.name AND c.relkind = 'S' AND c.relnamespace = :schema::text::regnamespace
)

-- :hidden_in
SELECT n.nspname::text FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.relname = 'ledger_level' AND c.relkind = 'r' AND n.nspname <> all(current_schemas(false))
ORDER BY n.nspname
LIMIT 1

-- :waiting_for_standby
-- A commit waits for a moment while all is well.
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND wait_event = 'SyncRep' AND query_start < clock_timestamp() - interval '0.5 seconds'
