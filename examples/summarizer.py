r"""An agent in one function: the first sentences of a text, and how many words it had.

    covenant serve examples/summarizer.py
    curl -sS http://127.0.0.1:8421/v1/a2a/agents/summarizer -H 'Content-Type: application/json' \
      -H "Authorization: Bearer $(cat ~/.covenant/operator.token)" -d '{"jsonrpc": "2.0", "id": 1,
      "method": "SendMessage", "params": {"message": {"messageId": "1", "role": "ROLE_USER",
      "parts": [{"text": "A text. With several sentences. And one more."}]}}}'

What is yielded is streamed; to return is to have completed the task, to raise is to have failed it. The daemon keeps
all of it: kill it half way, and the task is there afterwards.
"""

import re
from collections.abc import AsyncIterator

from covenant import Agent, Text, Turn

agent = Agent("summarizer", description="Summarises a text", skills=["summarize"], idempotent=True)


@agent
async def summarize(turn: Turn) -> AsyncIterator[object]:
    text = "\n".join(said.text for said in turn.parts if isinstance(said, Text))
    if not text.strip():
        yield turn.need_input("Which text?")
        return
    sentences = re.findall(r"[^.!?]+[.!?]?", text)
    for sentence in sentences[:2]:
        yield sentence
    yield turn.data({"words": len(text.split()), "sentences": len(sentences)})
    yield turn.file("summary.md", "".join(sentences[:2]).encode())
