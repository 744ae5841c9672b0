"""The verbs that doors call: accept, lease, report, settle, cancel, repair, retry. Authorisation happens here."""
