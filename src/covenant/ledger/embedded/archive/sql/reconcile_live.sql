-- A task of the snapshot, as it was then. The places where it was queued and ended follow from its handovers; the place
-- of an end that the archive lacks is :lost_place.
UPDATE a2a_tasks SET
    task_id = :task_id,
    updated_at = :updated_at,
    ledger_state = :ledger_state,
    state = :state,
    place = iif(
        place < :after_place,
        place,
        coalesce(
            (
                SELECT max(h.place) FROM handovers AS h
                WHERE
                    h.task_no = a2a_tasks.task_no AND h.place < :after_place
                    AND h.event IN ('released', 'requeued', 'continued')
            ),
            task_no
        )
    ),
    settled_place = iif(
        :ending IS NULL,
        NULL,
        coalesce(
            (
                SELECT max(h.place) FROM handovers AS h
                WHERE h.task_no = a2a_tasks.task_no AND h.place < :after_place AND h.event = 'settled'
            ),
            :lost_place
        )
    ),
    generation = :generation,
    turn = :turn,
    attempt = :attempt,
    interrupted = :interrupted,
    interruption = :interruption,
    lease_id = :lease_id,
    leased_to_display = :leased_to_display,
    leased_to_pubkey = :leased_to_pubkey,
    leased_at_ms = :leased_at_ms,
    renewed_at_ms = :renewed_at_ms,
    node = :node,
    boot = :boot,
    ending = :ending,
    cause = :cause,
    result = :result
WHERE task_no = :task_no
