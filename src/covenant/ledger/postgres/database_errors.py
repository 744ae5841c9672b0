"""Errors of a database that cannot serve, as refusals of the ledger: each names the fix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import asyncpg
from asyncpg.protocol import Protocol

from covenant.model.errors import OUTCOME_UNKNOWN, Unavailable

BROKEN: Final = (
    OSError,
    TimeoutError,
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.IdleInTransactionSessionTimeoutError,
)
"""Errors of a lost connection."""
UNAVAILABLE: Final = (
    *BROKEN,
    asyncpg.InsufficientResourcesError,
    asyncpg.OperatorInterventionError,
    asyncpg.CannotConnectNowError,
    asyncpg.ReadOnlySQLTransactionError,
)
"""Errors of a database that cannot serve now."""
CONFLICTS: Final = (
    asyncpg.UniqueViolationError,
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
    asyncpg.LockNotAvailableError,
    asyncpg.DivisionByZeroError,
    asyncpg.InvalidCachedStatementError,
)
"""Errors of a batch that was decided on rows or on a schema which another daemon has changed."""
REFUSED: Final = (
    asyncpg.InsufficientPrivilegeError,
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.SyntaxOrAccessError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.IntegrityConstraintViolationError,
    asyncpg.FeatureNotSupportedError,
    asyncpg.StringDataRightTruncationError,
    asyncpg.NumericValueOutOfRangeError,
    asyncpg.PLPGSQLError,
    asyncpg.ExternalRoutineError,
    asyncpg.ExternalRoutineInvocationError,
    asyncpg.DataCorruptedError,
    asyncpg.IndexCorruptedError,
)
"""Errors of a database that was damaged, or in which somebody changed a table, a column, a privilege or a trigger.

Conflicts are checked before these.
"""
SESSIONLESS: Final = (
    asyncpg.ProtocolViolationError,
    asyncpg.DuplicatePreparedStatementError,
    asyncpg.InvalidSQLStatementNameError,
)
"""Errors of a transaction pooler."""

_CAUSES: Final = (
    (
        (asyncpg.TooManyConnectionsError,),
        "has no connection left for this daemon",
        "raise max_connections, or the CONNECTION LIMIT of the role or the database, or end connections of others",
    ),
    ((asyncpg.DiskFullError,), "has no room left", "make room on its disk"),
    (
        (asyncpg.ReadOnlySQLTransactionError,),
        "takes no writes",
        "name its primary in ledger.url, or all of its hosts with target_session_attrs=read-write",
    ),
    (
        (asyncpg.InvalidAuthorizationSpecificationError,),
        "does not let this daemon's role in",
        "put the role and its password in ledger.url right, or let the role in again",
    ),
    (
        (asyncpg.InvalidCatalogNameError,),
        "is not there",
        "put the database's name in ledger.url right, or bring the database back",
    ),
    (
        SESSIONLESS,
        "keeps no session for this daemon",
        "set ledger.pooler = true if a transaction pooler stands before it",
    ),
    (
        (asyncpg.UndefinedObjectError, asyncpg.CantChangeRuntimeParamError),
        "does not know something that it is asked for",
        "remove the parameter that is named from ledger.url",
    ),
    (
        (asyncpg.DataCorruptedError, asyncpg.IndexCorruptedError),
        "is damaged",
        "rebuild the index that is named, or restore a backup and run `covenant ledger restored`",
    ),
    (
        (asyncpg.DeadlockDetectedError, asyncpg.SerializationError, asyncpg.LockNotAvailableError),
        "lets this daemon wait for another session",
        "it is tried again; if this lasts, end what it waits for: `covenant doctor` names a standby that is away",
    ),
    (
        (asyncpg.QueryCanceledError,),
        "ends this daemon's statements",
        "raise the statement_timeout of its role, of the database or in ledger.url, or find out who cancels them",
    ),
    (
        (asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError),
        "shows this daemon's role no such table",
        "set its search_path to the ledger's schema, grant USAGE, or put the table back: `covenant doctor` says which",
    ),
    (
        REFUSED,
        "refuses what the ledger needs",
        "give its role back its rights, or put back the table that was altered: `covenant doctor` says which",
    ),
)
STANDBY_FIX: Final = "start the standby, or take it out of synchronous_standby_names and reload the database's settings"
_URL_FIX: Final = (
    "write it as postgres://ROLE:PASSWORD@HOST:PORT/DATABASE, and percent-encode signs in the password (/ as %2F, "
    "? as %3F, # as %23, @ as %40)"
)
_NAMED_MAX: Final = 5
_REPEAT: Final = "; the request can be repeated"


def describe_trouble(error: BaseException) -> str:
    """The trouble of the database in words, and the fix."""
    if isinstance(error, asyncpg.InterfaceError) and isinstance(error.__context__, UNAVAILABLE):
        # A transaction cannot be left on a lost connection: why it was lost says more.
        return describe_trouble(error.__context__)
    reason = str(error).partition("\n")[0] or type(error).__name__
    for kinds, what, fix in _CAUSES:
        if isinstance(error, kinds):
            return f"the ledger's database {what} ({reason}): {fix}"
    # A URL that cannot be parsed fails before any host is reached.
    if type(error) is ValueError:
        return f"ledger.url cannot be read: {_URL_FIX}"  # the reason may show a part of the password
    if isinstance(error, asyncpg.ClientConfigurationError):
        return f"ledger.url cannot be read ({reason}): {_URL_FIX}"
    if isinstance(error, UNAVAILABLE):
        return f"the ledger's database cannot be reached ({reason}): check that it runs and ledger.url leads to it"
    return (
        f"the ledger's database answers what this daemon does not understand ({type(error).__name__}: {reason}): put "
        "back the table that was altered: `covenant doctor` says which"
    )


def has_wrong_type(error: asyncpg.PostgresError) -> bool:
    """Whether a column is of another type than the value that is written to it."""
    return isinstance(error, asyncpg.DataError) and isinstance(error.__cause__, TypeError)


def refused(error: BaseException) -> Unavailable:
    return Unavailable("database_refused", describe_trouble(error), retry_after_ms=5_000)


def altered(columns: Sequence[str]) -> Unavailable:
    words = "; ".join(columns[:_NAMED_MAX])
    return Unavailable(
        "database_refused",
        "the ledger's database answers what this daemon does not understand, since somebody altered a table "
        f"({words}): put the column back",
        retry_after_ms=5_000,
    )


def unavailable(error: BaseException, known: str | None = None) -> Unavailable:
    """`known`: the trouble of another connection, which is told if this one was only lost, or waited for a lock."""
    vague = isinstance(error, (*BROKEN, asyncpg.LockNotAvailableError))
    words = known if known and vague else describe_trouble(error)
    return Unavailable("database_unavailable", f"{words}{_REPEAT}", retry_after_ms=1_000)


@contextmanager
def lost_if_dropped() -> Iterator[None]:
    """Raises ConnectionError in place of asyncpg's AttributeError at a connection that was dropped.

    `terminate` removes the protocol of a connection: a caller that goes on with the connection finds None there.
    """
    try:
        yield
    except AttributeError as error:
        if error.obj is None and hasattr(Protocol, error.name or ""):
            raise ConnectionError("the connection was dropped") from error
        raise


@contextmanager
def translated(known: Callable[[], str | None] = lambda: None) -> Iterator[None]:
    """Raises errors of the database as refusals. `known`: as in `unavailable`."""
    try:
        with lost_if_dropped():
            yield
    except UNAVAILABLE as error:
        raise unavailable(error, known()) from error
    except asyncpg.InvalidCachedStatementError as error:
        words = "a table of the ledger's database was altered while this was read; repeat the request"
        raise Unavailable("busy", words, retry_after_ms=1_000) from error
    except CONFLICTS as error:
        waited = isinstance(error, asyncpg.LockNotAvailableError) and known() is not None
        raise (unavailable(error, known()) if waited else busy()) from error
    except asyncpg.PostgresError as error:
        raise refused(error) from error


def busy() -> Unavailable:
    words = "too many other requests change the same data; repeat the request"
    return Unavailable("busy", words, retry_after_ms=1_000)


def fenced(*, restored: bool = False) -> Unavailable:
    """`restored`: this run is fenced because the ledger was marked as restored, and not because it was silent."""
    why = (
        "the ledger was restored (`covenant ledger restored`)"
        if restored
        else "other daemons had declared this one lost, since they did not hear from it"
    )
    words = f"{why}; this daemon begins anew, and the request can be repeated"
    return Unavailable("ledger_fenced", words, retry_after_ms=1_000)


def standby_away() -> Unavailable:
    words = f"the ledger's database lets commits wait for a synchronous standby that does not answer: {STANDBY_FIX}"
    return Unavailable("database_unavailable", words, retry_after_ms=1_000)


def outcome_unknown(trouble: Unavailable) -> Unavailable:
    """`trouble`: why the outcome cannot be found out."""
    return Unavailable(
        OUTCOME_UNKNOWN,
        "the ledger's database went away while this was being written; it may or may not have happened. "
        f"Repeat the request under the same id. The trouble: {trouble.message.removesuffix(_REPEAT)}",
        retry_after_ms=1_000,
    )
