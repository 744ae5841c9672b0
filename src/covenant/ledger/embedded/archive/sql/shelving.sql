-- After new ids: INSERT INTO shelving VALUES (how many). One statement, because the driver takes the interpreter's lock
-- again after each, which is a wait beside a busy loop.
CREATE TEMP VIEW shelving AS SELECT 0 AS added;

CREATE TEMP TRIGGER shelve INSTEAD OF INSERT ON shelving BEGIN

    UPDATE shelves SET held = held + new.added WHERE shelf = 'new';

    -- Excess ids move on, from where the last part ended, and around again. No id is below an empty one, so nothing
    -- moves unless `emptying` is set.
    UPDATE shelves SET
        emptying = coalesce(
            (
                SELECT i.task_id FROM ids_new AS i
                WHERE i.task_id > emptied
                ORDER BY i.task_id
                LIMIT 1 OFFSET (SELECT s.held - s.room FROM shelves AS s WHERE s.shelf = 'new')
            ),
            x'ff'
        )
    WHERE shelf = 'new' AND held >= room + part;

    -- An existing id is replaced: a leftover must not stop later ones.
    INSERT OR REPLACE INTO ids_recent
    SELECT i.task_id, i.task_no
    FROM shelves AS s CROSS JOIN ids_new AS i ON i.task_id > s.emptied AND i.task_id <= s.emptying
    WHERE s.shelf = 'new';

    UPDATE shelves SET held = held + changes() WHERE shelf = 'recent';

    DELETE FROM ids_new
    WHERE
        task_id > (SELECT emptied FROM shelves WHERE shelf = 'new')
        AND task_id <= (SELECT emptying FROM shelves WHERE shelf = 'new');

    UPDATE shelves SET held = held - changes(), emptied = iif(emptying = x'ff', '', emptying), emptying = ''
    WHERE shelf = 'new' AND emptying <> '';

    UPDATE shelves SET
        emptying = coalesce(
            (
                SELECT i.task_id FROM ids_recent AS i
                WHERE i.task_id > emptied
                ORDER BY i.task_id
                LIMIT 1 OFFSET (SELECT s.held - s.room FROM shelves AS s WHERE s.shelf = 'recent')
            ),
            x'ff'
        )
    WHERE shelf = 'recent' AND held >= room + part;

    INSERT OR REPLACE INTO ids_old
    SELECT i.task_id, i.task_no
    FROM shelves AS s CROSS JOIN ids_recent AS i ON i.task_id > s.emptied AND i.task_id <= s.emptying
    WHERE s.shelf = 'recent';

    DELETE FROM ids_recent
    WHERE
        task_id > (SELECT emptied FROM shelves WHERE shelf = 'recent')
        AND task_id <= (SELECT emptying FROM shelves WHERE shelf = 'recent');

    UPDATE shelves SET held = held - changes(), emptied = iif(emptying = x'ff', '', emptying), emptying = ''
    WHERE shelf = 'recent' AND emptying <> '';

END;
