-- News are read once by each node and kept for two minutes: to compress those of a large batch costs more than it saves.

ALTER TABLE news ALTER COLUMN topics SET STORAGE EXTERNAL;
