"""The scenario agent of `covenant prove`, for LangGraph's development server: `langgraph_agent.py PORT HOME`.

The server keeps what it has in the folder that it runs in. The production server, which needs a
licence, PostgreSQL and Redis, is another one.
"""

import asyncio
import os
import sys

from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import interrupt


async def scenario(state: MessagesState):
    content = state["messages"][-1].content
    text = content if isinstance(content, str) else content[0]["text"]
    verb, key, *rest = text.split()
    numbers = [int(word) for word in rest]
    with open(os.environ["PROVE_RUNS"], "a", encoding="utf-8") as runs:
        runs.write(f"{key}\n")
    said = f"{key} done"
    if verb == "stream":
        count, pause_ms, size = (*numbers, 0)[:3]
        said = ""
        for number in range(count):
            said += f"{number} ".ljust(size)
            await asyncio.sleep(pause_ms / 1000)
    elif verb == "ask":
        answer = interrupt("what now?")
        said = f"{answer.split()[1]} done" if isinstance(answer, str) else f"{answer} done"
    elif verb == "fail":
        raise RuntimeError("asked to fail")
    elif verb == "run":
        await asyncio.sleep(numbers[0] / 1000)
    return {"messages": [("ai", said)]}


builder = StateGraph(MessagesState)
builder.add_node("scenario", scenario)
builder.add_edge(START, "scenario")
graph = builder.compile()


def main(port: str, home: str) -> None:
    from langgraph_api.cli import run_server  # noqa: PLC0415  (the server imports this file again for its graph)

    file = os.path.abspath(__file__)  # noqa: PTH100
    os.chdir(home)
    run_server(host="127.0.0.1", port=int(port), graphs={"prove": f"{file}:graph"}, n_jobs_per_worker=4)


if __name__ == "__main__":
    main(*sys.argv[1:])
