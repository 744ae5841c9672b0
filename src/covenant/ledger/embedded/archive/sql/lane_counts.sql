-- The number of tasks in each lane, in total and by agent; agents with the most open work first.
WITH counted AS (
    SELECT
        recipient_display AS agent,
        tenant_id AS tenant,
        sum(iif(ledger_state = 'queued', tasks, 0)) AS queued,
        sum(iif(ledger_state = 'in_flight', tasks, 0)) AS in_flight,
        sum(iif(ledger_state = 'parked', tasks, 0)) AS parked,
        sum(iif(ledger_state = 'following', tasks, 0)) AS following,
        sum(iif(ledger_state = 'result_pending', tasks, 0)) AS result_pending,
        sum(iif(ledger_state = 'resolved' AND state = 'failed', tasks, 0)) AS failed,
        sum(iif(ledger_state = 'resolved' AND state <> 'failed', tasks, 0)) AS done
    FROM task_counts
    WHERE
        (:within IS NULL OR tenant_id = :within)
        AND (:viewer IS NULL OR recipient_pubkey = :viewer)
    GROUP BY 1, 2
    HAVING sum(tasks) > 0
)

SELECT
    json_object(
        'lanes', (
            SELECT
                json_object(
                    'queued', coalesce(sum(queued), 0),
                    'in_flight', coalesce(sum(in_flight), 0),
                    'parked', coalesce(sum(parked), 0),
                    'following', coalesce(sum(following), 0),
                    'result_pending', coalesce(sum(result_pending), 0),
                    'failed', coalesce(sum(failed), 0),
                    'done', coalesce(sum(done), 0)
                )
            FROM counted
        ),
        'by_agent', (
            SELECT
                json_group_array(
                    json_object(
                        'agent', agent,
                        'tenant', nullif(tenant, ''),
                        'queued', queued,
                        'in_flight', in_flight,
                        'parked', parked,
                        'following', following,
                        'result_pending', result_pending,
                        'failed', failed,
                        'done', done
                    )
                )
            FROM (
                SELECT * FROM counted
                ORDER BY queued + in_flight + parked + following DESC, failed + done + result_pending DESC, agent, tenant
                LIMIT :limit
            )
        )
    )
