"""How many bytes a text has, without encoding it where that can be known."""

from __future__ import annotations


def utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
