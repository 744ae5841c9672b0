-- Tasks by their ids, as rows of an array, without their results.
WITH asked (task_id) AS (VALUES {rows})

SELECT
    json_group_array(
        json_array(
            t.task_no, t.task_id, t.tenant_id, t.agent_id, t.context_id, t.context_no, t.parent, t.parent_no,
            t.created_at, t.updated_at, t.ledger_state, t.state, t.digest, t.sender_display, t.sender_pubkey,
            t.recipient_display, t.recipient_pubkey, t.task_kind, t.deadline_ms, t.origin,
            t.idempotency_key, t.place, t.settled_place,
            t.generation, t.turn, t.attempt, t.interrupted, t.interruption, t.lease_id, t.leased_to_display,
            t.leased_to_pubkey, t.leased_at_ms, t.renewed_at_ms, t.node, t.boot, t.ending, t.cause
        )
    )
FROM asked AS a
CROSS JOIN a2a_tasks AS t ON t.task_no = (SELECT i.task_no FROM ids AS i WHERE i.task_id = a.task_id)
