-- Taking records in is one statement: INSERT INTO inbox VALUES (records, last_seq).
--
-- `records` is a JSON array of journal lines. One statement, because the driver takes the interpreter's lock again
-- after each, and beside a busy loop that is a wait. Rows end up as if the events had been applied one by one:
-- for each task `fold` finds the last event of every kind that decides a column.

-- What an event means here: the state it leaves its task in, what else it decides, where to find what it carries.
--
--       1 begins a task   2 queues it      4 leases it      8 renews it        16 interrupts it
--      32 calms it       64 parks it     128 unparks it   256 begins a turn   512 settles it
--    1024 adds to the audit           2048 purges the audit
CREATE TEMP TABLE moves (
    type TEXT PRIMARY KEY,
    ledger_state TEXT,
    flags INTEGER NOT NULL,
    kind TEXT, -- of the update that it becomes; that of `task_updated` is its detail
    handover TEXT,
    number TEXT, -- from here on, paths
    body TEXT,
    detail TEXT,
    extra TEXT,
    reason TEXT
) WITHOUT ROWID;

INSERT INTO moves VALUES
    ('task_sent', 'queued', 1 + 2, 'submitted', NULL, NULL, '$.task', '$.digest', NULL, NULL),
    ('task_followed', 'following', 1 + 2, 'submitted', NULL, NULL, '$.task', '$.digest', NULL, NULL),
    ('task_promoted', 'queued', 2, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
    ('task_leased', 'in_flight', 4 + 32, 'working', 'leased', '$.generation', '$.lease', NULL, NULL, NULL),
    ('lease_renewed', 'in_flight', 8 + 32, NULL, NULL, NULL, NULL, '$.renewed_at_ms', NULL, NULL),
    ('lease_released', 'queued', 2 + 32, NULL, 'released', NULL, NULL, NULL, NULL, '$.reason'),
    ('lease_interrupted', 'in_flight', 16, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
    ('task_updated', 'in_flight', 0, NULL, NULL, '$.generation', '$.update', '$.update.type', NULL, NULL),
    ('task_requeued', 'queued', 2 + 32, NULL, 'requeued', NULL, NULL, NULL, NULL, '$.reason'),
    ('task_parked', 'parked', 64, 'parked', 'parked', '$.generation', '$.update', '$.interruption', NULL, NULL),
    (
        'task_continued', 'queued', 2 + 128 + 256, 'continued', 'continued',
        '$.generation', '$.message', NULL, NULL, NULL
    ),
    -- The state stays what it was.
    ('message_kept', NULL, 0, 'continued', NULL, '$.generation', '$.message', NULL, NULL, NULL),
    ('turn_ended', 'queued', 2 + 32 + 128 + 256, 'message', 'continued', '$.generation', '$.reply', NULL, NULL, NULL),
    (
        'task_settled', 'result_pending', 32 + 128 + 512, 'settled', 'settled',
        '$.generation', '$.result', '$.ending', '$.cause', '$.reason'
    ),
    (
        'task_closed', 'resolved', 32 + 128 + 512, 'settled', 'settled',
        '$.generation', '$.result', '$.ending', '$.cause', '$.reason'
    ),
    ('result_drained', 'resolved', 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
    ('audited', NULL, 1024, NULL, NULL, '$.index', '$.row', '$.chain_hash', '$.issuer', NULL),
    ('audit_purged', NULL, 2048, NULL, NULL, '$.through', NULL, '$.anchor_hash', NULL, NULL);

CREATE TEMP TABLE batch (
    place INTEGER PRIMARY KEY,
    ts_ms INTEGER NOT NULL,
    flags INTEGER NOT NULL,
    ledger_state TEXT,
    kind TEXT,
    handover TEXT,
    task_id TEXT,
    number INTEGER NOT NULL, -- the generation that the event became; the index of an audit row
    body TEXT,
    detail TEXT,
    extra TEXT,
    reason TEXT
);

CREATE TEMP TABLE fold (
    task_id TEXT PRIMARY KEY,
    task_no INTEGER NOT NULL, -- null, and so refused, for a task that was never sent
    sent INTEGER,
    settled INTEGER,
    ledger_state TEXT NOT NULL,
    updated_at INTEGER NOT NULL,
    place INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    turn INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    interrupted INTEGER NOT NULL,
    interruption TEXT,
    lease_id TEXT,
    leased_to_display TEXT,
    leased_to_pubkey TEXT,
    leased_at_ms INTEGER,
    renewed_at_ms INTEGER,
    node TEXT,
    boot TEXT,
    ending TEXT,
    cause TEXT
) WITHOUT ROWID;

CREATE TEMP VIEW inbox AS SELECT '' AS records, 0 AS last_seq;

CREATE TEMP TRIGGER apply INSTEAD OF INSERT ON inbox BEGIN

    DELETE FROM batch;
    DELETE FROM fold;

    -- `seq` and `ts_ms` are read off the front of the line, where the journal's format has them: a parse less.
    INSERT INTO batch
    SELECT
        v.seq * 1048576 + v.i,
        v.ts_ms,
        m.flags,
        m.ledger_state,
        m.kind,
        m.handover,
        json_extract(v.event, '$.task_id'),
        coalesce(json_extract(v.event, m.number), m.flags & 1),
        json_extract(v.event, m.body),
        json_extract(v.event, m.detail),
        json_extract(v.event, m.extra),
        iif(m.reason IS NULL, NULL, json_extract(v.event, m.reason, '$.absent'))
    FROM (
        -- Every mention of `value` writes the JSON out anew; LIMIT keeps this apart, and so to one.
        SELECT
            CAST(substr(e.json, 8, 20) AS INTEGER) AS seq,
            CAST(substr(e.json, instr(e.json, '"ts_ms":') + 8, 20) AS INTEGER) AS ts_ms,
            e.key AS i,
            e.value AS event
        FROM json_each(NEW.records) AS r CROSS JOIN json_each(r.value, '$.events') AS e
        LIMIT -1
    ) AS v
    CROSS JOIN moves AS m ON m.type = json_extract(v.event, '$.type')
    WHERE v.seq > (SELECT value FROM meta WHERE key = 'archived_seq');

    INSERT INTO fold
    SELECT
        g.task_id,
        coalesce(nullif(g.sent, 0), old.task_no),
        nullif(g.sent, 0),
        nullif(g.settled, 0),
        coalesce(m.ledger_state, old.ledger_state),
        e.ts_ms,
        coalesce(nullif(g.queued, 0), old.place),
        coalesce(nullif(g.generation, 0), old.generation),
        coalesce(old.turn, 1) + g.turns,
        CASE
            WHEN g.leased > g.continued THEN json_extract(l.body, '$.attempt')
            WHEN g.continued > 0 THEN 0
            ELSE coalesce(old.attempt, 0)
        END,
        CASE
            WHEN g.interrupted > 0 OR g.calmed > 0 THEN g.interrupted > g.calmed
            ELSE coalesce(old.interrupted, 0)
        END,
        CASE
            WHEN g.parked > g.unparked THEN (SELECT detail FROM batch WHERE place = g.parked)
            WHEN g.unparked = 0 THEN old.interruption
        END,
        CASE
            WHEN g.leased > g.continued THEN json_extract(l.body, '$.lease_id')
            WHEN g.continued = 0 THEN old.lease_id
        END,
        CASE
            WHEN g.leased > g.continued THEN json_extract(l.body, '$.leased_to.display')
            WHEN g.continued = 0 THEN old.leased_to_display
        END,
        CASE
            WHEN g.leased > g.continued THEN json_extract(l.body, '$.leased_to.pubkey')
            WHEN g.continued = 0 THEN old.leased_to_pubkey
        END,
        CASE
            WHEN g.leased > g.continued THEN json_extract(l.body, '$.leased_at_ms')
            WHEN g.continued = 0 THEN old.leased_at_ms
        END,
        CASE
            WHEN g.renewed > g.leased AND g.renewed > g.continued
                THEN (SELECT CAST(detail AS INTEGER) FROM batch WHERE place = g.renewed)
            WHEN g.leased > g.continued THEN coalesce(json_extract(l.body, '$.renewed_at_ms'), 0)
            WHEN g.continued = 0 THEN old.renewed_at_ms
        END,
        CASE
            WHEN g.leased > g.continued THEN json_extract(l.body, '$.node')
            WHEN g.continued = 0 THEN old.node
        END,
        CASE
            WHEN g.leased > g.continued THEN json_extract(l.body, '$.boot')
            WHEN g.continued = 0 THEN old.boot
        END,
        coalesce(s.detail, old.ending),
        coalesce(s.extra, old.cause)
    FROM (
        SELECT
            task_id,
            max(place) AS last,
            max(iif(ledger_state IS NOT NULL, place, 0)) AS moved,
            max(number) AS generation,
            max(iif(flags & 1, place, 0)) AS sent,
            max(iif(flags & 2, place, 0)) AS queued,
            max(iif(flags & 4, place, 0)) AS leased,
            max(iif(flags & 8, place, 0)) AS renewed,
            max(iif(flags & 16, place, 0)) AS interrupted,
            max(iif(flags & 32, place, 0)) AS calmed,
            max(iif(flags & 64, place, 0)) AS parked,
            max(iif(flags & 128, place, 0)) AS unparked,
            max(iif(flags & 256, place, 0)) AS continued,
            sum(flags & 256) / 256 AS turns,
            max(iif(flags & 512, place, 0)) AS settled
        FROM batch
        WHERE task_id IS NOT NULL
        GROUP BY task_id
    ) AS g
    CROSS JOIN batch AS e ON e.place = g.last
    LEFT JOIN batch AS m ON m.place = g.moved
    LEFT JOIN a2a_tasks AS old
        ON old.task_no = iif(g.sent, NULL, (SELECT i.task_no FROM ids AS i WHERE i.task_id = g.task_id))
    LEFT JOIN batch AS l ON l.place = g.leased
    LEFT JOIN batch AS s ON s.place = g.settled;

    INSERT INTO a2a_tasks (
        task_no, task_id, tenant_id, agent_id, context_id, created_at, updated_at, ledger_state, digest,
        sender_display, sender_pubkey, recipient_display, recipient_pubkey,
        parent, task_kind, deadline_ms, origin,
        place, settled_place, generation, turn, attempt, interrupted, interruption,
        lease_id, leased_to_display, leased_to_pubkey, leased_at_ms, renewed_at_ms, node, boot,
        ending, cause, result
    )
    SELECT
        f.task_no,
        f.task_id,
        coalesce(json_extract(b.body, '$.tenant'), ''),
        substr(
            json_extract(b.body, '$.recipient.display'),
            1,
            instr(json_extract(b.body, '$.recipient.display'), '@') - 1
        ),
        coalesce(json_extract(b.body, '$.context_id'), ''),
        b.ts_ms,
        f.updated_at,
        f.ledger_state,
        b.detail,
        json_extract(b.body, '$.sender.display'),
        json_extract(b.body, '$.sender.pubkey'),
        json_extract(b.body, '$.recipient.display'),
        json_extract(b.body, '$.recipient.pubkey'),
        json_extract(b.body, '$.parent'),
        json_extract(b.body, '$.task_kind'),
        json_extract(b.body, '$.deadline_ms'),
        coalesce(json_extract(b.body, '$.origin'), 'mailbox'),
        f.place,
        f.settled,
        f.generation,
        f.turn,
        f.attempt,
        f.interrupted,
        f.interruption,
        f.lease_id,
        f.leased_to_display,
        f.leased_to_pubkey,
        f.leased_at_ms,
        f.renewed_at_ms,
        f.node,
        f.boot,
        f.ending,
        f.cause,
        (SELECT body FROM batch WHERE place = f.settled)
    FROM fold AS f CROSS JOIN batch AS b ON b.place = f.sent;

    INSERT INTO requests SELECT place, body FROM batch WHERE flags & 1;

    INSERT INTO ids_new SELECT task_id, task_no FROM fold WHERE sent IS NOT NULL ORDER BY task_id;

    UPDATE shelves SET held = held + changes() WHERE shelf = 'new';

    -- What is too much moves on, from where the last part ended and round again. Nothing lies up to an empty id, so
    -- nothing moves unless `emptying` is set.
    UPDATE shelves SET
        emptying = coalesce(
            (
                SELECT i.task_id FROM ids_new AS i
                WHERE i.task_id > emptied
                ORDER BY i.task_id
                LIMIT 1 OFFSET (SELECT s.held - s.room FROM shelves AS s WHERE s.shelf = 'new')
            ),
            '~'
        )
    WHERE shelf = 'new' AND held >= room + part;

    INSERT INTO ids_recent
    SELECT i.task_id, i.task_no
    FROM shelves AS s CROSS JOIN ids_new AS i ON i.task_id > s.emptied AND i.task_id <= s.emptying
    WHERE s.shelf = 'new';

    UPDATE shelves SET held = held + changes() WHERE shelf = 'recent';

    DELETE FROM ids_new
    WHERE
        task_id > (SELECT emptied FROM shelves WHERE shelf = 'new')
        AND task_id <= (SELECT emptying FROM shelves WHERE shelf = 'new');

    UPDATE shelves SET held = held - changes(), emptied = iif(emptying = '~', '', emptying), emptying = ''
    WHERE shelf = 'new' AND emptying <> '';

    UPDATE shelves SET
        emptying = coalesce(
            (
                SELECT i.task_id FROM ids_recent AS i
                WHERE i.task_id > emptied
                ORDER BY i.task_id
                LIMIT 1 OFFSET (SELECT s.held - s.room FROM shelves AS s WHERE s.shelf = 'recent')
            ),
            '~'
        )
    WHERE shelf = 'recent' AND held >= room + part;

    INSERT INTO ids_old
    SELECT i.task_id, i.task_no
    FROM shelves AS s CROSS JOIN ids_recent AS i ON i.task_id > s.emptied AND i.task_id <= s.emptying
    WHERE s.shelf = 'recent';

    DELETE FROM ids_recent
    WHERE
        task_id > (SELECT emptied FROM shelves WHERE shelf = 'recent')
        AND task_id <= (SELECT emptying FROM shelves WHERE shelf = 'recent');

    UPDATE shelves SET held = held - changes(), emptied = iif(emptying = '~', '', emptying), emptying = ''
    WHERE shelf = 'recent' AND emptying <> '';

    UPDATE a2a_tasks SET
        updated_at = f.updated_at,
        ledger_state = f.ledger_state,
        place = f.place,
        settled_place = coalesce(f.settled, a2a_tasks.settled_place),
        generation = f.generation,
        turn = f.turn,
        attempt = f.attempt,
        interrupted = f.interrupted,
        interruption = f.interruption,
        lease_id = f.lease_id,
        leased_to_display = f.leased_to_display,
        leased_to_pubkey = f.leased_to_pubkey,
        leased_at_ms = f.leased_at_ms,
        renewed_at_ms = f.renewed_at_ms,
        node = f.node,
        boot = f.boot,
        ending = f.ending,
        cause = f.cause,
        result = coalesce((SELECT body FROM batch WHERE place = f.settled), a2a_tasks.result)
    FROM fold AS f
    WHERE f.sent IS NULL AND a2a_tasks.task_no = f.task_no;

    INSERT INTO updates
    SELECT
        f.task_no,
        b.number,
        coalesce(b.kind, b.detail),
        b.ts_ms,
        iif(b.flags & (1 + 4 + 512), NULL, b.body)
    FROM batch AS b CROSS JOIN fold AS f ON f.task_id = b.task_id
    WHERE b.number > 0;

    -- `reason` is '[…,null]': a JSON array is the only form in which a string keeps its escapes.
    INSERT INTO handovers
    SELECT
        f.task_no,
        b.place,
        b.handover,
        b.ts_ms,
        iif(b.flags & 4, b.body, NULL),
        nullif(substr(b.reason, 2, length(b.reason) - 7), 'null')
    FROM batch AS b CROSS JOIN fold AS f ON f.task_id = b.task_id
    WHERE b.handover IS NOT NULL;

    -- A row that was there already was not ours: the journal's word replaces it.
    INSERT OR REPLACE INTO audit
    SELECT number, json_extract(body, '$.timestamp_ms'), extra, detail, body
    FROM batch
    WHERE flags & 1024;

    DELETE FROM audit WHERE idx <= (SELECT max(number) FROM batch WHERE flags & 2048);

    UPDATE meta SET value = p.number
    FROM (SELECT number FROM batch WHERE flags & 2048 ORDER BY place DESC LIMIT 1) AS p
    WHERE key = 'audit_anchor_index';

    UPDATE meta SET value = p.detail
    FROM (SELECT detail FROM batch WHERE flags & 2048 ORDER BY place DESC LIMIT 1) AS p
    WHERE key = 'audit_anchor_hash';

    UPDATE meta SET value = NEW.last_seq WHERE key = 'archived_seq' AND value < NEW.last_seq;

END;
