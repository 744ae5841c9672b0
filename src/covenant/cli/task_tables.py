"""Tasks, leases, updates and results as tables and trees for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from covenant.cli.terminal import age, ago, brief, clean, clock_time, console, content_text, distance, narrow, table
from covenant.daemon.environment import now_ms
from covenant.ledger.machine.states import FOLLOWING, LEASED, PARKED, QUEUED, SETTLED

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

COUNTS: Final = {
    QUEUED.wire_name: "queued",
    LEASED.wire_name: "in flight",
    "holders_lost": "lost",
    "delegations_lost": "lost at peers (see covenant peers delegations)",
    PARKED.wire_name: "parked",
    FOLLOWING.wire_name: "following",
    SETTLED.wire_name: "undrained",
    "cached": "results kept for the same work",
}
REMOTE_MARK: Final = "⇄"
BY_ADDRESS: Final = "remote.url"
BY_PEER: Final = "remote.peer"
"""The recipients of tasks for agents that no catalogue has."""
PUSH_COLUMNS: Final = ("task", "push", "agent", "host", "delivered", "state", "failed", "why")
TASK_COLUMNS: Final = ("state", "task", "lease", "to", "age", "try", "held", "deadline", "intent")
NARROW_TASK_COLUMNS: Final = ("state", "task", "lease", "for", "try", "to", "intent")
CUT_COLUMNS: Final = ("to", "held", "intent")
OUTCOME_WIDTH: Final = 70
"""The width of a repaired task's id, state and outcome, with the gaps between."""
SHORT_ID: Final = 8
STATE_STYLES: Final = {"ok": "green", "completed": "green", "error": "red", "failed": "red"}


def queue_tables(answer: dict[str, Any]) -> RenderableType:
    """Tasks and waiting results, what needs the operator first and in colour; then the counts that are not zero."""
    from rich.console import Group

    tasks, results, counted = answer["tasks"], answer["results"], answer.get("counts") or {}
    counts = ", ".join(f"{counted[name]} {words}" for name, words in COUNTS.items() if counted.get(name))
    parts: list[RenderableType] = [f"warning: {clean(warning)}" for warning in answer.get("warnings", ())]
    if not tasks and not results:
        idle = f"nothing is queued, in flight or waiting to be drained{f'; {counts}' if counts else ''}"
        return Group(*parts, idle) if parts else idle
    if tasks:
        parts.append(_task_table(tasks))
    if results:
        parts.append(_result_table(results))
    if counts:
        parts.append(counts)
    return Group(*parts)


def _task_table(tasks: list[dict[str, Any]]) -> RenderableType:
    """One line a task, in 80 columns, too. Ids are cut there, since every command takes the beginning of an id, and
    the age of a lease and of a task without one share a column.
    """
    from rich.text import Text

    slim = narrow()
    id_length, intent_length = (SHORT_ID, 15) if slim else (None, 40)
    columns = NARROW_TASK_COLUMNS if slim else TASK_COLUMNS
    rows: list[list[Text]] = []
    for entry in tasks:
        task, deadline, since = entry["task"], entry["task"].get("deadline_ms"), age(now_ms() - entry["created_at_ms"])
        to = task["recipient"]["display"]
        cells = {
            "state": _queue_state(entry),
            "task": Text(task["id"][:id_length]),
            "lease": Text((entry.get("lease_id") or "")[:id_length]),
            "to": Text(brief(to, 16) if slim else clean(to)),
            "age": Text(since),
            "for": Text(_held_for(entry) or since),
            "try": Text(str(entry["attempt"])),
            "held": Text(clean(_held(entry))),
            "deadline": Text(distance(deadline), "red" if deadline < now_ms() else "") if deadline else Text(),
            "intent": Text(brief(task["intent_text"], intent_length)),
        }
        rows.append([cells[name] for name in columns])
    return _fitted_table("tasks", columns, rows)


def _fitted_table(title: str, columns: tuple[str, ...], rows: list[list[Text]]) -> RenderableType:
    """One line a row. If there is no room, names and descriptions are cut, the widest first; ids stay whole."""
    made = table(title, *columns)
    widths = {
        name: max(len(name), *(row[at].cell_len for row in rows)) + made.padding[1] for at, name in enumerate(columns)
    }
    cut = [name for name in columns if name in CUT_COLUMNS]
    for _ in range(sum(widths.values()) - made.padding[1] - console().width):
        widths[max(cut, key=widths.__getitem__)] -= 1
    for row in rows:
        for at, name in enumerate(columns):
            row[at].truncate(widths[name] - made.padding[1], overflow="ellipsis")
        made.add_row(*row)
    for column in made.columns:
        column.no_wrap = True
    return made


def found_table(tasks: list[dict[str, Any]]) -> RenderableType:
    """One line a task. A narrow terminal gets the beginnings of ids, which every command takes."""
    from rich.text import Text

    slim = narrow()
    rows = table("", "state", "task", *(() if slim else ("from",)), "to", "try", "age", "what")
    for task in tasks:
        state = _found_state(task)
        text = task["error_message"] or task["intent"]
        rows.add_row(
            Text(state, STATE_STYLES.get(state, "yellow" if task["outcome"] is None else "")),
            task["task_id"][:SHORT_ID] if slim else task["task_id"],
            *(() if slim else (Text(brief(task["sender"], 24)),)),
            Text(brief(task["agent"], 20 if slim else 40)),
            str(task["attempt"]),
            age(now_ms() - task["created_at_ms"]),
            Text(brief(text, 24 if slim else 60)),
        )
    for column in rows.columns:
        column.no_wrap = True
    return rows


def _found_state(task: dict[str, Any]) -> str:
    """How the task ended, if it has; else its state."""
    if task["holder_lost"]:
        return "holder lost"
    return str(task["outcome"] or task["state"]).replace("_", " ")


def _queue_state(entry: dict[str, Any]) -> Text:
    from rich.text import Text

    if entry.get("holder_lost"):
        return Text("holder lost", "bold red")
    return Text(entry["state"].replace("_", " "), "yellow" if entry["state"] == LEASED.wire_name else "green")


def _held_for(entry: dict[str, Any]) -> str:
    leased_at_ms = entry.get("leased_at_ms")
    return age(now_ms() - max(leased_at_ms, entry.get("renewed_at_ms") or 0)) if leased_at_ms is not None else ""


def _held(entry: dict[str, Any]) -> str:
    held = _held_for(entry)
    return f"{held} by {entry['leased_to']['display']}" if held else ""


def _result_table(results: list[dict[str, Any]]) -> RenderableType:
    from rich.text import Text

    rows = table("results waiting to be drained", "status", "task", "says")
    for result in results:
        style = "green" if result["status"] == "ok" else "red"
        task_id, length = (result["task_id"][:SHORT_ID], 50) if narrow() else (result["task_id"], 60)
        rows.add_row(Text(result["status"], style), task_id, Text(brief(summary(result), length)))
    return rows


def summary(result: dict[str, Any]) -> str:
    """A result in one line: its error, else its text."""
    if result.get("error_message"):
        return str(result["error_message"])
    return content_text(result["content"])


def facts_table(shown: dict[str, Any]) -> RenderableType:
    from rich.text import Text

    task, result = shown["task"], shown.get("result")
    state = shown["state"].replace("_", " ")
    facts = {
        "task": task["id"],
        "state": f"{state}, its holder is lost" if shown.get("holder_lost") else state,
        "cause": shown.get("cause"),
        "from": task["sender"]["display"],
        "to": task["recipient"]["display"],
        "kind": task.get("task_kind"),
        "parent": task.get("parent"),
        "key": (task.get("idempotency") or {}).get("key"),
        "deadline": distance(task["deadline_ms"]) if task.get("deadline_ms") else None,
        "accepted": ago(shown["created_at_ms"]),
        "attempts": str(shown["attempt"]),
        "intent": task["intent_text"],
        "result": f"{result['status']}: {summary(result)}" if result else None,
    }
    rows = table("", "what", "value")
    rows.show_header = False
    for name, value in facts.items():
        if value is not None:
            rows.add_row(Text(name, "bold"), Text(clean(str(value))))
    return rows


def lease_table(leases: list[dict[str, Any]]) -> RenderableType:
    rows = table("leases", "try", "lease", "held by", "since", "ended", "outcome")
    for lease in leases:
        ended = lease.get("ended_at_ms")
        rows.add_row(
            str(lease["attempt"]),
            lease["lease_id"],
            lease["leased_to"]["display"],
            ago(lease["leased_at_ms"]),
            ago(ended) if ended else "",
            brief(" ".join(filter(None, (lease.get("outcome") or "live", lease.get("reason"))))),
        )
    return rows


def update_table(updates: list[dict[str, Any]]) -> RenderableType:
    rows = table("updates", "gen", "when", "kind", "says")
    for update in updates:
        text = brief(_body_text(update.get("body")))
        rows.add_row(str(update["generation"]), ago(update["ts_ms"]), update["kind"], text)
    return rows


def update_line(update: dict[str, Any]) -> str:
    return f"{clock_time(update['ts_ms'])} {update['kind']} {brief(_body_text(update.get('body')))}".rstrip()


def log_text(line: dict[str, Any]) -> str:
    """A line of a task's log: its time, level, source and text."""
    source = line.get("logger") or (line["stream"] if line["writer"] == "agent" else "covenant")
    words = [clock_time(line["ts_ms"]), f"{line['level']:<7}", f"[{source}]", line["text"]]
    words += [f"{name}={value}" for name, value in line.get("fields", {}).items() if name != "agent"]
    text = " ".join(words)
    return f"{text}\n{line['traceback']}" if line.get("traceback") else text


def frame_text(frame: dict[str, Any]) -> str:
    """A frame of a task: when, which way, at which door, its headers, and what it says."""
    way, cut = "<" if frame["direction"] == "in" else ">", " (cut)" if frame.get("truncated") else ""
    headers = [f"    {name}: {value}" for name, value in frame.get("headers", {}).items()]
    first = f"{clock_time(frame['at_ms'])} {way} {frame['door']} {frame['what']}{cut}"
    return "\n".join([first, *headers, *([frame["text"]] if frame["text"] else [])])


def _body_text(body: Any) -> str:
    match body:
        case {"text": str(text)}:
            return text
        case {"state": str(state), "result": {"content": list()} as result}:
            return f"{state}: {summary(result)}"
        case {"parts": list(parts)}:
            return content_text(parts)
        case None:
            return ""
        case _:
            return str(body)


def tree_of(root: dict[str, Any]) -> RenderableType:
    from rich.tree import Tree

    top = Tree(_label(root))
    open_nodes = [(top, root)]
    while open_nodes:  # not recursive: a chain of tasks may be longer than the stack
        branch, node = open_nodes.pop()
        open_nodes.extend((branch.add(_label(child)), child) for child in node["children"])
    return top


def _label(node: dict[str, Any]) -> RenderableType:
    from rich.text import Text

    task, task_id = node["task"], node["task_id"]
    if task is None and node.get("remote"):
        # A task that a peer has delegated, as that peer reported it.
        place = f"{REMOTE_MARK} {node.get('provider') or 'at the peer'}"
        state = node.get("status") or ""
        style = STATE_STYLES.get(state, "yellow")
        named = (f"{brief(node.get('profile') or '', 64)} ", "bold")
        return Text.assemble((state, style), " ", task_id, " ", named, (place, "cyan"), (_node_facts(node), "dim"))
    if task is None:
        return Text(f"{task_id} (not sent here)", "dim")
    state = _node_state(node)
    style = STATE_STYLES.get(state, "yellow")
    facts = (_node_facts(node), "dim")
    return Text.assemble((state, style), " ", task_id, " ", *_agent(node), facts, " ", brief(task["intent_text"]))


def _agent(node: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """The agent's name; for a remote one, the name that the caller used, and where it is."""
    shown: str = node["task"]["recipient"]["display"]
    if not node.get("remote"):
        return ((shown, "bold"),)
    if shown.startswith(f"{BY_ADDRESS}@"):
        shown = (node["task"].get("target") or {}).get("name") or ""
    elif shown.startswith(f"{BY_PEER}@"):
        shown = brief(node.get("profile") or "", 64)
    place = f"{REMOTE_MARK} {node.get('url') or node.get('provider') or 'elsewhere'}"
    return ((f"{shown} ", "bold"), (place, "cyan")) if shown else ((place, "cyan"),)


def _node_state(node: dict[str, Any]) -> str:
    if node.get("holder_lost"):
        return "holder lost"
    state: str = node["result_status"] or node["state"].replace("_", " ")
    a2a_state = node.get("a2a_state")
    # How the task ended says more than its status.
    return a2a_state if a2a_state in ("canceled", "rejected", "input-required", "auth-required") else state


def _node_facts(node: dict[str, Any]) -> str:
    from covenant.model.usage import tokens_of

    facts = []
    if node["attempt"] > 1:
        facts.append(f"attempt {node['attempt']}")
    if node["created_at_ms"] is not None:
        until_ms = node["updated_at_ms"] if node.get("result_status") else now_ms()
        took = _duration_text(until_ms - node["created_at_ms"])
        facts.append(took if node.get("result_status") else f"{took} so far")
    tokens = tokens_of(node.get("usage_total") or {})
    if tokens:
        facts.append(f"{tokens:g} tokens")
    return f" ({', '.join(facts)})" if facts else ""


def _duration_text(ms: int) -> str:
    """A duration as exactly as it matters: 8ms, 3.2s, 2m 05s, 3h 07m."""
    ms = max(0, ms)
    if ms < 1_000:
        return f"{ms}ms"
    if ms < 60_000:
        return f"{ms / 1_000:.1f}s"
    minutes, seconds = divmod(ms // 1_000, 60)
    return f"{minutes}m {seconds:02}s" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02}m"


def outcome_row(each: dict[str, Any]) -> tuple[str, ...]:
    """The outcome of one task of a bulk repair. In a narrow terminal the code is the reason."""
    style, what = "red" if each["outcome"] == "refused" else "", each["outcome"].replace("_", " ")
    if narrow():
        return style, each["task_id"][:SHORT_ID], each["state"], what, brief(each.get("code", "").replace("_", " "), 36)
    room = console().width - OUTCOME_WIDTH
    return style, each["task_id"], each["state"], what, brief(each.get("reason") or each.get("code", ""), room)


def push_row(push: dict[str, Any]) -> tuple[str, ...]:
    state, style = push["state"], "red" if push["state"] == "dead" else ""
    if "dead_at_ms" in push:
        state = f"given up {ago(push['dead_at_ms'])}"
    elif "next_ms" in push:
        state = f"again in {age(push['next_ms'] - now_ms())}"
    name, host, failure = (brief(push.get(field, "")) for field in ("push_id", "host", "failure"))
    tries = str(push["attempts"])
    return style, push["task_id"], name, push["agent"], host, str(push["delivered"]), state, tries, failure
