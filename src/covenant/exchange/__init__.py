"""The verbs: accept, lease, report, settle, cancel, repair, retry, watch; access checks and audit."""
