-- From a task's id to its number. Ids come in no order: in one large index each would be written to a page of its own,
-- which is read, logged and written back for those few bytes; with a million tasks each new one cost a third more.
-- So new ids gather in a small table; when that is full, the next part of it, in the order of ids, moves on to a larger
-- one where many of them share each page, and from there to the last. An id is in one of the three.
--
-- Names of contexts and parents that were no task's id when they were first mentioned are here too, with the number of
-- the task that mentioned them: '@' or '>' before the name, as blobs, which come after all ids and equal none.
CREATE TABLE ids_new (
    task_id TEXT PRIMARY KEY,
    task_no INTEGER NOT NULL
) WITHOUT ROWID;

CREATE TABLE ids_recent (
    task_id TEXT PRIMARY KEY,
    task_no INTEGER NOT NULL
) WITHOUT ROWID;

CREATE TABLE ids_old (
    task_id TEXT PRIMARY KEY,
    task_no INTEGER NOT NULL
) WITHOUT ROWID;

-- The newest first: a look-up of one row stops where it is.
CREATE VIEW ids AS
SELECT task_id, task_no FROM ids_new
UNION ALL
SELECT task_id, task_no FROM ids_recent
UNION ALL
SELECT task_id, task_no FROM ids_old;

-- The first two tables, and the id up to which each was emptied. At least a whole part moves: with few tasks a batch,
-- moving ids one by one would touch more pages than it spares.
CREATE TABLE shelves (
    shelf TEXT PRIMARY KEY,
    room INTEGER NOT NULL,
    part INTEGER NOT NULL,
    held INTEGER NOT NULL,
    emptied TEXT NOT NULL, -- the last id that moved
    emptying TEXT NOT NULL -- the last id that moves now
) WITHOUT ROWID;

INSERT INTO shelves VALUES ('new', 4096, 512, 0, '', ''), ('recent', 65536, 512, 0, '', '');
