-- Changed tasks in their new state: new ones and existing ones. Constant columns are not written again. A result of
-- `null` removes the existing one: it is in a pack now.
INSERT INTO a2a_tasks (
    task_no, task_id, tenant_id, agent_id, context_id, context_no, parent, parent_no, created_at, updated_at,
    ledger_state, state, digest, sender_display, sender_pubkey, recipient_display, recipient_pubkey, task_kind,
    deadline_ms, origin, idempotency_key, place, settled_place, generation, turn, attempt, interrupted, interruption, lease_id,
    leased_to_display, leased_to_pubkey, leased_at_ms, renewed_at_ms, node, boot, ending, cause, result
)
VALUES {rows}
ON CONFLICT (task_no) DO UPDATE SET
    updated_at = excluded.updated_at,
    ledger_state = excluded.ledger_state,
    state = excluded.state,
    place = excluded.place,
    settled_place = excluded.settled_place,
    generation = excluded.generation,
    turn = excluded.turn,
    attempt = excluded.attempt,
    interrupted = excluded.interrupted,
    interruption = excluded.interruption,
    lease_id = excluded.lease_id,
    leased_to_display = excluded.leased_to_display,
    leased_to_pubkey = excluded.leased_to_pubkey,
    leased_at_ms = excluded.leased_at_ms,
    renewed_at_ms = excluded.renewed_at_ms,
    node = excluded.node,
    boot = excluded.boot,
    ending = excluded.ending,
    cause = excluded.cause,
    result = nullif(coalesce(excluded.result, a2a_tasks.result), 'null')
