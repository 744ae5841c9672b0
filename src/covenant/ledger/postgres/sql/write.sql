-- The statements of a batch. Every batch runs the first one; the others are for rows that few batches have.
--
-- A vacuum often finds hot tables empty, and a plan for an empty table scans all of it, with every row that was deleted
-- since. So no join with one of them leaves the order to the planner: rows are found by `= ANY`, by a lateral look-up,
-- or by the index of a conflict.

-- :batch
WITH w AS (
    UPDATE writers SET seq = :seq, audit_index = :audit_index, audit_hash = :audit_hash
    -- By `part`, and by no index that has all versions of the row.
    WHERE
        part = (:seq::bigint - 1) / 64 AND writer IS NOT DISTINCT FROM :writer
        AND boot = :boot AND seq = :seq::bigint - 1 AND lost_at_ms IS NULL
    RETURNING 1
),

/* held */

ok AS MATERIALIZED (
    SELECT 1 FROM w
    WHERE (SELECT version FROM registers) = :version /* gates */
),

/* parts */

told AS (
    -- Also for a batch that the gate refuses: its number is used up.
    INSERT INTO news (writer, seq, topics)
    SELECT :writer, :seq, CASE WHEN EXISTS (SELECT FROM ok) THEN :topics ELSE '{}' END FROM w
)

-- A batch with audit rows extends its writer's chain. If the gate refuses it, the whole batch must fail: such a batch is
-- divided by the number of the gate's rows, and fails if that is zero.
SELECT EXISTS (SELECT FROM w) AS writer, /* gated */ EXISTS (SELECT FROM ok) AS written, nextval('places') AS place

-- The gates of a batch, and its parts: each is included if the batch has rows for it.

-- :held
held AS MATERIALIZED (
    -- The numbers are sorted, and so is the order of the locks.
    SELECT l.no
    FROM unnest(:held_nos::bigint[], :held_ns::integer[]) AS u (no, n)
    CROSS JOIN LATERAL (SELECT x.no, x.n FROM live AS x WHERE x.no = u.no FOR UPDATE) AS l
    WHERE l.n = u.n AND EXISTS (SELECT FROM w)
),

-- :gate_held
AND (SELECT count(*) FROM held) = cardinality(:held_nos::bigint[])

-- :gate_started
-- No task starts before those that wait.
AND NOT EXISTS (
    SELECT FROM unnest(:started::text[], :started_from::bigint[]) AS u (recipient, place)
    CROSS JOIN LATERAL (
        SELECT FROM queue AS q WHERE q.recipient = u.recipient AND q.place >= u.place LIMIT 1
    ) AS waiting
)

-- :gate_alone
-- The place was drawn earlier: no other node has drawn one since, whose tasks would be behind those queued now.
AND (SELECT last_value FROM places) = :last_place

-- :gate_taken
-- The taken rows, and no others, were first.
AND NOT EXISTS (
    SELECT FROM unnest(:qt_recipient::text[], :qt_first::bigint[], :qt_last::bigint[], :qt_count::bigint[])
        AS u (recipient, first_place, last_place, n)
    WHERE u.n <> (
        SELECT count(*) FROM queue AS q
        WHERE q.recipient = u.recipient AND q.place >= u.first_place AND q.place <= u.last_place
    )
)

-- :gate_drained
AND NOT EXISTS (
    SELECT FROM unnest(:rt_sender::text[], :rt_first::bigint[], :rt_last::bigint[], :rt_count::bigint[])
        AS u (sender, first_place, last_place, n)
    WHERE u.n <> (
        SELECT count(*) FROM results AS r
        WHERE r.sender = u.sender AND r.place >= u.first_place AND r.place <= u.last_place
    )
)

-- :new_ids
new_ids AS (
    INSERT INTO ids (task_id, no)
    SELECT u.* FROM unnest(:id_task_ids::text[], :id_nos::bigint[]) AS u CROSS JOIN ok
),

-- :new_live
new_live AS (
    INSERT INTO live (
        no, task_id, n, state, a2a_state, sender, recipient, lessee, tenant, agent_id, context_id, origin, parent,
        created_at_ms, updated_at_ms, generation, turn, attempt, deadline_ms, place, settled_place, touched,
        touched_at_ms, due_at_ms, shared, node, boot, interrupted, pushed, ended_n, head, rest,
        sender_display, recipient_display, task_kind, idempotency_key, remote, cause, error_message, intent, size
    )
    SELECT u.* FROM unnest(
        :l_no::bigint[], :l_task_id::text[], :l_n::integer[], :l_state::text[], :l_a2a_state::text[], :l_sender::text[],
        :l_recipient::text[], :l_lessee::text[], :l_tenant::text[], :l_agent_id::text[], :l_context_id::text[],
        :l_origin::text[], :l_parent::text[], :l_created_at_ms::bigint[], :l_updated_at_ms::bigint[],
        :l_generation::integer[], :l_turn::integer[], :l_attempt::integer[], :l_deadline_ms::bigint[], :l_place::bigint[],
        :l_settled_place::bigint[], :l_touched::bigint[], :l_touched_at_ms::bigint[], :l_due_at_ms::bigint[],
        :l_shared::text[], :l_node::text[], :l_boot::text[], :l_interrupted::boolean[], :l_pushed::boolean[],
        :l_ended_n::integer[], :l_head::text[], :l_rest::text[], :l_sender_display::text[], :l_recipient_display::text[],
        :l_task_kind::text[], :l_idempotency_key::text[], :l_remote::boolean[], :l_cause::text[],
        :l_error_message::text[], :l_intent::text[], :l_size::bigint[]
    ) AS u CROSS JOIN ok
),

-- :moved_live
moved_live AS (
    -- The rows exist and are locked: columns that SET does not name stay as they are.
    INSERT INTO live AS l (
        no, n, state, a2a_state, lessee, updated_at_ms, generation, turn, attempt, place, settled_place, touched,
        touched_at_ms, due_at_ms, node, boot, interrupted, pushed, ended_n, rest, cause, error_message, size,
        task_id, sender, recipient, agent_id, context_id, origin, created_at_ms, head, sender_display,
        recipient_display, remote, intent
    )
    SELECT u.*, '', '', '', '', '', '', 0, '', '', '', false, '' FROM unnest(
        :m_no::bigint[], :m_n::integer[], :m_state::text[], :m_a2a_state::text[], :m_lessee::text[],
        :m_updated_at_ms::bigint[], :m_generation::integer[], :m_turn::integer[], :m_attempt::integer[],
        :m_place::bigint[], :m_settled_place::bigint[], :m_touched::bigint[], :m_touched_at_ms::bigint[],
        :m_due_at_ms::bigint[], :m_node::text[], :m_boot::text[], :m_interrupted::boolean[], :m_pushed::boolean[],
        :m_ended_n::integer[], :m_rest::text[], :m_cause::text[], :m_error_message::text[],
        :m_size::bigint[]
    ) AS u CROSS JOIN ok
    ON CONFLICT (no) DO UPDATE SET
        n = excluded.n, state = excluded.state, a2a_state = excluded.a2a_state, lessee = excluded.lessee,
        updated_at_ms = excluded.updated_at_ms, generation = excluded.generation, turn = excluded.turn,
        attempt = excluded.attempt, place = excluded.place, settled_place = excluded.settled_place,
        touched = excluded.touched, touched_at_ms = excluded.touched_at_ms, due_at_ms = excluded.due_at_ms,
        node = excluded.node, boot = excluded.boot, interrupted = excluded.interrupted, pushed = excluded.pushed,
        ended_n = excluded.ended_n, rest = excluded.rest, cause = excluded.cause,
        error_message = excluded.error_message, size = excluded.size
),

-- :gone_live
gone_live AS (
    DELETE FROM live AS l USING ok WHERE l.no = ANY(:gone_nos::bigint[])
),

-- :back_tasks
back_tasks AS (
    DELETE FROM tasks AS t USING ok WHERE t.no = ANY(:back_nos::bigint[])
),

-- :new_tasks
new_tasks AS (
    INSERT INTO tasks (
        no, task_id, n, a2a_state, sender, recipient, lessee, tenant, agent_id, context_id, origin, parent,
        created_at_ms, updated_at_ms, generation, turn, attempt, settled_place, ended_n, error_message, rest,
        sender_display, recipient_display, task_kind, idempotency_key, deadline_ms, remote, cause, intent, size
    )
    SELECT u.* FROM unnest(
        :t_no::bigint[], :t_task_id::text[], :t_n::integer[], :t_a2a_state::text[], :t_sender::text[],
        :t_recipient::text[], :t_lessee::text[], :t_tenant::text[], :t_agent_id::text[], :t_context_id::text[],
        :t_origin::text[], :t_parent::text[], :t_created_at_ms::bigint[], :t_updated_at_ms::bigint[],
        :t_generation::integer[], :t_turn::integer[], :t_attempt::integer[], :t_settled_place::bigint[],
        :t_ended_n::integer[], :t_error_message::text[], :t_rest::text[], :t_sender_display::text[],
        :t_recipient_display::text[], :t_task_kind::text[], :t_idempotency_key::text[], :t_deadline_ms::bigint[],
        :t_remote::boolean[], :t_cause::text[], :t_intent::text[], :t_size::bigint[]
    ) AS u CROSS JOIN ok
),

-- :new_events
new_events AS (
    INSERT INTO events (no, n, generation, ts_ms, kind, body)
    SELECT u.* FROM unnest(
        :e_no::bigint[], :e_n::integer[], :e_generation::integer[], :e_ts_ms::bigint[], :e_kind::text[], :e_body::text[]
    ) AS u CROSS JOIN ok
),

-- :left_queue
left_queue AS (
    -- No two rows have one place.
    DELETE FROM queue AS q USING ok WHERE q.recipient = ANY(:ql_recipient::text[]) AND q.place = ANY(:ql_place::bigint[])
),

-- :new_queue
new_queue AS (
    INSERT INTO queue (no, place, recipient)
    SELECT u.* FROM unnest(:q_no::bigint[], :q_place::bigint[], :q_recipient::text[]) AS u CROSS JOIN ok
),

-- :left_results
left_results AS (
    DELETE FROM results AS r USING ok WHERE r.sender = ANY(:rl_sender::text[]) AND r.place = ANY(:rl_place::bigint[])
),

-- :new_results
new_results AS (
    INSERT INTO results (no, place, sender)
    SELECT u.* FROM unnest(:r_no::bigint[], :r_place::bigint[], :r_sender::text[]) AS u CROSS JOIN ok
),

-- :new_audit
new_audit AS (
    INSERT INTO audit (chain, idx, place, ts_ms, issuer, chain_hash, row)
    SELECT :chain, u.* FROM unnest(
        :a_idx::bigint[], :a_place::bigint[], :a_ts_ms::bigint[], :a_issuer::text[], :a_chain_hash::text[], :a_row::text[]
    ) AS u CROSS JOIN ok
),

-- :counted
counted AS (
    INSERT INTO counted (batch, kinds, lanes, ns)
    SELECT :counted, :c_kind::text[], :c_lane::text[], :c_n::bigint[] FROM ok
),

-- :added_counts
over AS (
    DELETE FROM counted AS c USING ok WHERE c.batch >= :added_from AND c.batch < :counted
    RETURNING c.kinds, c.lanes, c.ns
),

added_counts AS (
    INSERT INTO lane_counts AS c (kind, lane, writer, n)
    SELECT u.kind, u.lane, :counter, sum(u.n)
    FROM over CROSS JOIN LATERAL unnest(over.kinds, over.lanes, over.ns) AS u (kind, lane, n)
    GROUP BY u.kind, u.lane
    HAVING sum(u.n) <> 0
    ON CONFLICT (kind, lane, writer) DO UPDATE SET n = c.n + excluded.n
),

-- :new_counts
new_counts AS (
    -- While a daemon lives that knows these rows alone. The number changes from time to time: while somebody holds a
    -- snapshot, a row that every batch changes has a version for each, and a look-up of the newest walks over all.
    INSERT INTO lane_counts AS c (kind, lane, writer, n)
    SELECT u.kind, u.lane, :counter, u.n
    FROM unnest(:c_kind::text[], :c_lane::text[], :c_n::bigint[]) AS u (kind, lane, n) CROSS JOIN ok
    ON CONFLICT (kind, lane, writer) DO UPDATE SET n = c.n + excluded.n
),

-- :room_used
-- 64 KiB that cannot be compressed, in the table that grows fastest.
INSERT INTO events (no, n, generation, ts_ms, kind, body)
SELECT -1, 0, 0, 0, '', string_agg(md5(i::text), '') FROM generate_series(1, 2048) AS i

-- :room_left
DELETE FROM events WHERE no = -1

-- :new_requests
INSERT INTO requests (verb, holder, request_id, place, given)
SELECT u.* FROM unnest(:verbs::text[], :holders::text[], :request_ids::text[], :places::bigint[], :given::text[]) AS u

-- :requests
UPDATE requests AS r SET given = u.given, place = u.place
FROM unnest(:verbs::text[], :holders::text[], :request_ids::text[], :places::bigint[], :given::text[])
    AS u (verb, holder, request_id, place, given)
WHERE r.verb = u.verb AND r.holder = u.holder AND r.request_id = u.request_id

-- :requests_over
DELETE FROM requests WHERE (verb, holder, request_id) IN (
    SELECT verb, holder, request_id FROM requests ORDER BY place LIMIT :count
)

-- :shared
INSERT INTO shared AS s (key, name, leader, cached, cached_at_ms, cached_bytes, cached_place)
SELECT u.* FROM unnest(
    :keys::text[], :names::text[], :leaders::text[], :cached::text[], :cached_at_ms::bigint[], :cached_bytes::bigint[],
    :cached_places::bigint[]
) AS u
ON CONFLICT (key) DO UPDATE SET
    leader = excluded.leader, cached = excluded.cached, cached_at_ms = excluded.cached_at_ms,
    cached_bytes = excluded.cached_bytes, cached_place = excluded.cached_place

-- :new_shared
INSERT INTO shared (key, name, leader, cached, cached_at_ms, cached_bytes, cached_place)
SELECT u.* FROM unnest(
    :keys::text[], :names::text[], :leaders::text[], :cached::text[], :cached_at_ms::bigint[], :cached_bytes::bigint[],
    :cached_places::bigint[]
) AS u

-- :shared_gone
DELETE FROM shared WHERE key = ANY(:keys::text[])

-- :uses
INSERT INTO grant_uses AS g (signature, used)
SELECT u.* FROM unnest(:signatures::text[], :used::bigint[]) AS u
ON CONFLICT (signature) DO UPDATE SET used = excluded.used

-- :pushes
INSERT INTO pushes AS p (task_id, id, made, idle_at_ms, body)
SELECT u.* FROM unnest(:task_ids::text[], :ids::text[], :made::bigint[], :idle_at_ms::bigint[], :bodies::text[]) AS u
ON CONFLICT (task_id, id) DO UPDATE SET idle_at_ms = excluded.idle_at_ms, body = excluded.body

-- :pushes_gone
DELETE FROM pushes AS p USING unnest(:task_ids::text[], :ids::text[]) AS u (task_id, id)
WHERE p.task_id = u.task_id AND p.id = u.id

-- :registers
UPDATE registers SET version = :version

-- :register_rows
INSERT INTO register_rows AS r (kind, name, version, made, body)
SELECT u.kind, u.name, :version, u.made, u.body
FROM unnest(:kinds::text[], :names::text[], :made::bigint[], :bodies::text[]) AS u (kind, name, made, body)
ON CONFLICT (kind, name) DO UPDATE SET
    version = excluded.version, body = excluded.body,
    made = CASE WHEN r.body IS NULL THEN excluded.made ELSE r.made END

-- :audit_purged
DELETE FROM audit WHERE chain = :chain AND idx <= :through

-- :audit_anchored
INSERT INTO audit_chains AS c (chain, anchor_index, anchor_hash, verified_index, verified_hash)
VALUES (:chain, :through, :anchor_hash, 0, '')
ON CONFLICT (chain) DO UPDATE SET anchor_index = excluded.anchor_index, anchor_hash = excluded.anchor_hash

-- :delegations
INSERT INTO delegations AS d (role, peer, offer_id, task_id, moved, ended, body)
VALUES (:role, :peer, :offer_id, :task_id, :moved, :ended, :body)
ON CONFLICT (role, peer, offer_id) DO UPDATE SET
    task_id = excluded.task_id, moved = excluded.moved, ended = excluded.ended, body = excluded.body

-- :delegation_gone
DELETE FROM delegations WHERE role = :role AND peer = :peer AND offer_id = :offer_id

-- :parcel
INSERT INTO parcels AS p (role, peer, offer_id, seq, made, body)
VALUES (:role, :peer, :offer_id, :seq, :made, :body)
ON CONFLICT (peer, role, offer_id, seq) DO UPDATE SET body = excluded.body

-- :parcels_gone
DELETE FROM parcels WHERE role = :role AND peer = :peer AND offer_id = :offer_id AND seq <= :through

-- :parcels_of_peer_gone
DELETE FROM parcels WHERE peer = :peer

-- :envelope
INSERT INTO envelopes (sender, jti, until_ms) VALUES (:sender, :jti, :until_ms)

-- :envelopes_over
DELETE FROM envelopes WHERE until_ms < :now_ms

-- :heard
INSERT INTO peers_heard AS h (peer, heard_at_ms) VALUES (:peer, :heard_at_ms)
ON CONFLICT (peer) DO UPDATE SET heard_at_ms = excluded.heard_at_ms

-- :message
INSERT INTO messages (place, body) VALUES (:place, :body)

-- :usage
INSERT INTO peer_usage AS u (day, role, peer, profile, offers, accepted, rejected, completed, failed, cancelled, timeout, tokens)
VALUES (:day, :role, :peer, :profile, :offers, :accepted, :rejected, :completed, :failed, :cancelled, :timeout, :tokens)
ON CONFLICT (day, role, peer, profile) DO UPDATE SET
    offers = u.offers + excluded.offers, accepted = u.accepted + excluded.accepted, rejected = u.rejected + excluded.rejected,
    completed = u.completed + excluded.completed, failed = u.failed + excluded.failed, cancelled = u.cancelled + excluded.cancelled,
    timeout = u.timeout + excluded.timeout, tokens = u.tokens + excluded.tokens

-- :usage_over
DELETE FROM peer_usage WHERE day <= :day

-- :usage_succeeded
WITH gone AS (DELETE FROM peer_usage WHERE peer = :old RETURNING *)
INSERT INTO peer_usage AS u (day, role, peer, profile, offers, accepted, rejected, completed, failed, cancelled, timeout, tokens)
SELECT day, role, :new, profile, offers, accepted, rejected, completed, failed, cancelled, timeout, tokens FROM gone
ON CONFLICT (day, role, peer, profile) DO UPDATE SET
    offers = u.offers + excluded.offers, accepted = u.accepted + excluded.accepted, rejected = u.rejected + excluded.rejected,
    completed = u.completed + excluded.completed, failed = u.failed + excluded.failed, cancelled = u.cancelled + excluded.cancelled,
    timeout = u.timeout + excluded.timeout, tokens = u.tokens + excluded.tokens

-- :usage_of_peer_gone
DELETE FROM peer_usage WHERE peer = :peer
