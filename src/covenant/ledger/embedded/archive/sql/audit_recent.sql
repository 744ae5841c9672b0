-- The newest audit rows of a span of time below a place, oldest first. The clock may have been set back, so the time
-- only decides where to begin: at the first row, by index, that is new enough; and to end: at the last of the thousand
-- newest that are old enough.
SELECT json_group_array(json_object('index', idx, 'timestamp_ms', ts_ms, 'row', row, 'place', idx)) FROM (
    SELECT * FROM (
        SELECT idx, ts_ms, row FROM audit
        WHERE
            {issuer}
            AND idx < :below
            AND idx <= coalesce(
                (
                    SELECT max(idx)
                    FROM (SELECT idx FROM audit WHERE ts_ms < :before_ms ORDER BY ts_ms DESC LIMIT 1000)
                ),
                0
            )
            AND idx >= coalesce((SELECT min(idx) FROM audit WHERE ts_ms >= :since_ms), 0)
            AND +ts_ms >= :since_ms
            AND +ts_ms < :before_ms
        ORDER BY idx DESC
        LIMIT :limit
    )
    ORDER BY idx
)
