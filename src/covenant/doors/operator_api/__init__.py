"""Every request of the mailbox and of operators, a module a noun: what is asked, what is answered, what is done."""
