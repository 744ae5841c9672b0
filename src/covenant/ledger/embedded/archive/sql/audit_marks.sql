-- The chain's anchor, and the end of its verified part.
SELECT
    json_object(
        'anchor', json_object(
            'index', (SELECT value FROM meta WHERE key = 'audit_anchor_index'),
            'chain_hash', (SELECT value FROM meta WHERE key = 'audit_anchor_hash')
        ),
        'verified', json_object(
            'index', (SELECT value FROM meta WHERE key = 'audit_verified_index'),
            'chain_hash', (SELECT value FROM meta WHERE key = 'audit_verified_hash')
        ),
        'first', coalesce((SELECT min(idx) FROM audit), 0)
    )
