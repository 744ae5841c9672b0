"""A domain that lists instances, on a real name server."""

import dns.flags
import dns.message
import dns.name
import dns.rdatatype
import dns.rrset

from covenant.peers.discovery.dns_sd import SERVICE, TxtRecord, encode_txt
from tests.outbound.dns_server import NameServer

DOMAIN = "corp.example"


class Zone:
    """Records of any kind; what is asked for and not there is answered as such."""

    def __init__(self, server: NameServer, *, authenticated: bool = False) -> None:
        self._server = server
        self.authenticated = authenticated
        self.rrsets: dict[tuple[str, int], dns.rrset.RRset] = {}
        self.asked_with_ad = 0

    def add(self, name: str, kind: str, *texts: str) -> None:
        rrset = dns.rrset.from_text_list(dns.name.from_text(name), 60, "IN", kind, texts)
        key = rrset.name.to_text(omit_final_dot=True).lower()
        self.rrsets[key, rrset.rdtype] = rrset
        self._server.speak[key] = self._speak

    def lists(self, *labels: str) -> None:
        self.add(f"{SERVICE}.{DOMAIN}.", "PTR", *(instance(label) for label in labels))

    def offers(self, label: str, said: TxtRecord | str, *places: str) -> None:
        """`places` are SRV records: priority, weight, port, target."""
        if places:
            self.add(instance(label), "SRV", *places)
        self.add(instance(label), "TXT", said if isinstance(said, str) else quoted(encode_txt(said)))

    def _speak(self, query: dns.message.Message, reply: dns.message.Message, before: int) -> bytes:
        question = query.question[0]
        self.asked_with_ad += bool(query.flags & dns.flags.AD)
        found = self.rrsets.get((question.name.to_text(omit_final_dot=True).lower(), question.rdtype))
        if found is not None:
            reply.answer.append(found)
        if self.authenticated:
            reply.flags |= dns.flags.AD
        return reply.to_wire(max_size=65_535)


def instance(label: str) -> str:
    return f"{label}.{SERVICE}.{DOMAIN}."


def quoted(record: bytes) -> str:
    """The strings of a record, as a zone file has them."""
    strings = []
    while record:
        size = record[0]
        strings.append('"' + record[1 : 1 + size].decode() + '"')
        record = record[1 + size :]
    return " ".join(strings)
