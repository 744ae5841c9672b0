"""The limits of an account: how many live tasks it may have, and how many bytes may wait in them.

An account is a tenant, or a sender that has no tenant. Both limits are decided in the same step as the task that would
pass them, so two callers at once cannot pass them together.
"""

from __future__ import annotations

from typing import Final

from covenant.ledger.machine.decision import Decide
from covenant.model.errors import OverLimit
from covenant.model.task import Task, account_of

LIVE_TASKS: Final = "live_task_limit"
QUEUED_BYTES: Final = "queued_bytes_limit"
RETRY_MS: Final = 1_000


def check_account(decide: Decide, task: Task, *, tasks: int, size: int) -> None:
    """Refuse what would take a task's account over one of its limits: so many more tasks, and so many more bytes."""
    view = decide.view
    account, limits = view.account(account_of(task)), view.limits
    tenant = view.tenant(task.tenant) if task.tenant is not None else None
    tasks_max, bytes_max = limits.live_tasks_max, limits.queued_bytes_max
    if tenant is not None:
        tasks_max = tenant.limits.live_tasks or tasks_max
        bytes_max = tenant.limits.queued_bytes or bytes_max
    if tasks and tasks_max and account.tasks + tasks > tasks_max:
        raise decide.refuse(
            OverLimit(
                LIVE_TASKS,
                f"{tasks_max} tasks that have not ended are the limit; send again when some have",
                retry_after_ms=RETRY_MS,
            )
        )
    if bytes_max and account.size + size > bytes_max:
        raise decide.refuse(
            OverLimit(
                QUEUED_BYTES,
                f"the tasks that have not ended may have {bytes_max} bytes together; send again when some have ended",
                retry_after_ms=RETRY_MS,
            )
        )
