INSERT INTO stored_sizes VALUES {rows}
ON CONFLICT (tenant_id) DO UPDATE SET tasks = tasks + excluded.tasks, bytes = bytes + excluded.bytes
