-- Live tasks in one state and of one role, in the order of the queue; `queue` puts these parts together. Every part
-- walks the index of its role in order, so that a long queue costs no more than a page of it. Filters come before the
-- limit. A lease may be too young for the filter; a task without a lease always passes.
SELECT * FROM (
    SELECT
        task_no,
        {rank} AS rank,
        {key} AS key
    FROM a2a_tasks
    WHERE
        settled_place IS NULL
        AND ledger_state = '{state}'
        AND {role}
        AND coalesce(:state_filter, '{state}') = '{state}'
        AND (:touched_by IS NULL OR ledger_state <> 'in_flight' OR touched_at_ms <= :touched_by)
        AND (:due_by IS NULL OR deadline_ms <= :due_by)
    ORDER BY {order}
    LIMIT :limit
)
