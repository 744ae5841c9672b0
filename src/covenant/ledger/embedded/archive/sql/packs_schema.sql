-- The parts of a finished task beside its row: its request, updates, handovers and result, compressed into one (see
-- `task_packs`). A task is in a pack, or in the tables of these, never in both. Of the result of a packed task the row
-- keeps the part that queries read: the error message, if there is one.
CREATE TABLE packs (
    task_no INTEGER PRIMARY KEY,
    pack BLOB NOT NULL
);
