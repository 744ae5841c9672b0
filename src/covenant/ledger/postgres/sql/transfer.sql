-- A whole ledger, read and written at once, only by a move.

-- :lock
-- No daemon begins or ends a run meanwhile.
LOCK TABLE writers IN EXCLUSIVE MODE

-- :held
SELECT EXISTS (SELECT FROM register_rows) OR EXISTS (SELECT FROM ids) OR EXISTS (SELECT FROM audit)
    OR EXISTS (SELECT FROM blob) OR EXISTS (SELECT FROM secrets)

-- :living
SELECT node FROM nodes
WHERE lost_at_ms IS NULL AND until_ms >= (extract(epoch FROM clock_timestamp()) * 1000)::bigint
ORDER BY node

-- :moved
SELECT direction FROM moves WHERE id = :id

-- :move
INSERT INTO moves (id, direction, at_ms, home) VALUES (
    :id, :direction, (extract(epoch FROM clock_timestamp()) * 1000)::bigint, :home
)

-- :tables
SELECT tablename FROM pg_tables WHERE schemaname = current_schema() ORDER BY 1

-- :tasks
SELECT
    no, task_id, state, a2a_state, created_at_ms, updated_at_ms, generation, turn, attempt, rest
FROM live
UNION ALL
SELECT
    no, task_id, 'drained', a2a_state, created_at_ms, updated_at_ms, generation, turn, attempt, rest
FROM tasks
ORDER BY created_at_ms, no

-- :events
SELECT no, ts_ms, kind, generation, body FROM events WHERE no = ANY(:nos::bigint[]) ORDER BY no, n

-- :live
SELECT l.*, e.body AS ended_body FROM live AS l LEFT JOIN events AS e ON e.no = l.no AND e.n = l.ended_n ORDER BY l.no

-- :erased
SELECT i.task_id FROM ids AS i
WHERE NOT EXISTS (SELECT FROM live AS l WHERE l.no = i.no) AND NOT EXISTS (SELECT FROM tasks AS t WHERE t.no = i.no)
ORDER BY 1

-- :uses
SELECT signature, used FROM grant_uses

-- :heard
SELECT peer, heard_at_ms FROM peers_heard

-- :pushes
SELECT body FROM pushes ORDER BY made

-- :delegations
SELECT body FROM delegations ORDER BY moved

-- :parcels
SELECT body FROM parcels ORDER BY made

-- :envelopes
SELECT sender, jti, until_ms FROM envelopes ORDER BY until_ms

-- :messages
SELECT body FROM messages ORDER BY place

-- :usage
SELECT * FROM peer_usage ORDER BY day

-- :cached
SELECT name, cached, leader FROM shared ORDER BY cached_place

-- :requests
SELECT verb, holder, request_id, given FROM requests ORDER BY place

-- :end
SELECT coalesce(sum(seq), 0)::bigint FROM writers

-- :chains
SELECT
    w.node AS chain, w.audit_index, w.audit_hash, coalesce(c.anchor_index, 0) AS anchor_index,
    coalesce(c.anchor_hash, repeat('0', 64)) AS anchor_hash
FROM writers AS w LEFT JOIN audit_chains AS c ON c.chain = w.node
WHERE w.audit_index > 0
ORDER BY w.node

-- :audit
SELECT chain, idx, ts_ms, issuer, chain_hash, row FROM audit ORDER BY place, chain, idx

-- :notes
SELECT tenant, agent_id, body FROM notes ORDER BY tenant, agent_id

-- :blobs
SELECT
    b.space, b.sha256, b.size, b.stored_at_ms, b.upload_id,
    ARRAY(SELECT r.task_id FROM blob_reference AS r WHERE r.space = b.space AND r.sha256 = b.sha256 ORDER BY r.task_id) AS ids,
    ARRAY(SELECT r.made_at_ms FROM blob_reference AS r WHERE r.space = b.space AND r.sha256 = b.sha256 ORDER BY r.task_id) AS since
FROM blob AS b
ORDER BY b.space, b.sha256

-- :chunk
SELECT body FROM blob_chunk WHERE upload_id = :upload_id AND no = :no

-- :upload
SELECT nextval(pg_get_serial_sequence('blob_upload', 'id'))

-- :numbers
SELECT setval('task_numbers', :task_no), setval('places', :place)

-- :registers
UPDATE registers SET version = 1

-- :writer
INSERT INTO writers (writer, node, boot, seq, audit_index, audit_hash, lost_at_ms) VALUES (
    nextval('writer_numbers'), :chain, 'moved', :seq, :index, :chain_hash,
    (extract(epoch FROM clock_timestamp()) * 1000)::bigint
)
