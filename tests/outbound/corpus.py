# ruff: noqa: RUF001  (letters and digits that look like others are the point)
"""URLs that people have used to make a server call what it should not, and some that are as good as they look.

Names lead where `ZONE` says; whatever is not there does not exist. `REFUSED` are refused without an allow-list.
"""

from typing import Final

PUBLIC: Final = "93.184.215.14"
PUBLIC_V6: Final = "2606:2800:21f:cb07:6820:80da:af6b:8b2c"

ZONE: Final[dict[str, list[str]]] = {
    "good.example": [PUBLIC],
    "six.example": [PUBLIC_V6],
    "both.example": [PUBLIC, PUBLIC_V6],
    "under_score.example": [PUBLIC],
    "xn--bcher-kva.example": [PUBLIC],
    "xn--fa-hia.example": [PUBLIC],
    "dns64.example": ["64:ff9b::5db8:d70e"],
    "loopback.example": ["127.0.0.1"],
    "private.example": ["10.1.2.3"],
    "mixed.example": [PUBLIC, "10.1.2.3"],
    "mixed-families.example": [PUBLIC, "::1"],
    "mapped.example": ["::ffff:127.0.0.1"],
    "dns64-private.example": ["64:ff9b::a01:203"],
    "metadata.google.internal": ["169.254.169.254"],
    "instance-data": ["169.254.169.254"],
    "printer.local": ["192.168.1.9"],
    "db.internal": ["10.0.0.7"],
    "zero.example": ["0.0.0.0"],
    "xn--n3h.example": ["127.0.0.1"],
}

CALLABLE: Final[dict[str, str]] = {
    "http://good.example": "http://good.example/",
    "https://good.example/": "https://good.example/",
    "HTTPS://GOOD.Example:443/Path?q=%2F#fragment": "https://good.example/Path?q=%2F",
    "http://good.example.:80/": "http://good.example/",
    "http://good.example:8080?q": "http://good.example:8080/?q",
    "https://good.example:8443/a%20b": "https://good.example:8443/a%20b",
    "http://good.example/ä": "http://good.example/%C3%A4",
    "http://good.example/@user:pass@10.0.0.1/": "http://good.example/@user:pass@10.0.0.1/",
    "http://under_score.example/": "http://under_score.example/",
    "http://bücher.example/": "http://xn--bcher-kva.example/",
    "http://BÜCHER.example/": "http://xn--bcher-kva.example/",
    "http://xn--bcher-kva.example/": "http://xn--bcher-kva.example/",
    "http://faß.example/": "http://xn--fa-hia.example/",
    "http://good。example/": "http://good.example/",
    "http://six.example/": "http://six.example/",
    "http://both.example/": "http://both.example/",
    "http://dns64.example/": "http://dns64.example/",
    f"http://{PUBLIC}/": f"http://{PUBLIC}/",
    f"http://{PUBLIC}./": f"http://{PUBLIC}/",
    f"http://[{PUBLIC_V6}]/": f"http://[{PUBLIC_V6}]/",
    f"http://[{PUBLIC_V6.upper()}]:9000/": f"http://[{PUBLIC_V6}]:9000/",
}

# Each to be called as http://HOST/: the loopback, inside, reserved, IPv4 inside IPv6, mixed or nowhere.
HOSTS: Final = """
    127.0.0.1 127.0.0.1:8080 127.0.0.1. 127.8.8.8 127.255.255.255 127.1 127.0.1 127.0.0.1.1 127.0.0.1.0x
    127.000.000.001 2130706433 017700000001 0177.0.0.1 0x7f000001 0x7f.0.0.1 0X7F.1 0x7F.0x0.0x0.0x1 127.0.0.0x1
    00000177.1 4294967297 １２７.０.０.１ ①②⑦.⓪.⓪.① 127。0。0。1 127．0．0．1 ０x7f.1 127%2e0%2e0%2e1 %31%32%37.0.0.1
    127.0.0.1%00.good.example 0 0x [::1] [0:0:0:0:0:0:0:1] [::] 0.0.0.0 0.1.2.3 [::1]:80 localhost LOCALHOST
    localhost. a.localhost ｌocalhost localhost:8421 loopback.example xn--n3h.example

    10.0.0.1 10.255.255.255 172.16.0.1 172.31.255.254 192.168.0.1 100.64.0.1 100.127.255.255 100.100.100.200
    168.63.129.16 169.254.0.1 2852039166 0xa9fea9fe [fd00:ec2::254] [fd00::1] [fc00::1] [fe80::1] [febf::1]
    [fe80::1%25eth0] [fe80::1%eth0] [fec0::1] [::1%25lo] private.example metadata.google.internal instance-data
    printer.local db.internal zero.example

    192.0.0.8 192.0.0.192 192.0.2.1 198.51.100.1 203.0.113.1 192.88.99.1 198.18.0.1 198.19.255.255 224.0.0.1
    239.255.255.255 240.0.0.1 255.255.255.255 [ff02::1] [2001:db8::1] [3fff::1] [100::1] [2001:2::1] [2001:10::1]
    [5f00::1] [4000::1]

    [::ffff:127.0.0.1] [::ffff:7f00:1] [::ffff:10.0.0.1] [::ffff:93.184.215.14] [::127.0.0.1] [::7f00:1]
    [64:ff9b::7f00:1] [64:ff9b::10.0.0.1] [64:ff9b::a9fe:a9fe] [64:ff9b:1::1] [64:ff9b:1::93.184.215.14]
    [2002:7f00:1::] [2002:a00:1::1] [2002:5db8:d70e::1] [2001:0:7f00:1::] [2001:0:4136:e378:8000:63bf:80ff:fffe]
    mapped.example dns64-private.example [::ffff:0:127.0.0.1] [0:0:0:0:0:ffff:169.254.169.254]

    mixed.example mixed-families.example nowhere.example example
""".split()

REFUSED: Final = [
    *(f"http://{host}/" for host in HOSTS),
    "http://lo\xadcalhost/",
    "http://169.254.169.254/latest/meta-data/",
    "http://user@good.example/",
    "http://user:pass@good.example/",
    "http://@good.example/",
    "http://good.example@10.0.0.1/",
    "http://good.example%40127.0.0.1/",
    "http://127.0.0.1\\@good.example/",
    "http://good.example\\.private.example/",
    "http:///path",
    "http://",
    "http:good.example",
    "http:/good.example",
    "//good.example/",
    "good.example",
    "",
    " ",
    "http://[127.0.0.1]/",
    "http://[v1.fe]/",
    "http://[]/",
    "http://[::1/",
    "http://::1/",
    "http://good.example]/",
    "http://good example/",
    " http://good.example/",
    "http://good.example/\n",
    "http://good.example/\tx",
    "http://good.example/ x",
    "http://good.example\r\nHost: x/",
    "http://good.example/\x00",
    "http://good..example/",
    "http://.good.example/",
    "http://-good.example/",
    "http://good-.example/",
    "http://*.example/",
    "http://good.example,private.example/",
    "http://℀.example/",
    "http://good.ex℀mple/",
    "http://\u202egood.example/",
    "http://good.example;x/",
    "http://xn--ü.example/",
    "ftp://good.example/",
    "file:///etc/passwd",
    "gopher://good.example/",
    "javascript:alert(1)",
    "ws://good.example/",
    "unix:///run/x.sock",
    "data:text/plain,x",
    "http+unix://good.example/",
    "ldap://good.example/",
    "httpſ://good.example/",
    "http://good.example:22/",
    "http://good.example:25/",
    "http://good.example:0/",
    "http://good.example:65536/",
    "http://good.example:6379/",
    "http://good.example:11211/",
    "http://good.example:6667/",
    "http://good.example:081a/",
    "http://good.example:/",
    "http://good.example:-80/",
    "http://good.example:８０/",
    "http://good.example:80:80/",
    "https://good.example:1/",
    "http://good.example:2049/",
    "http://good.example:000080/",
    "http://good.example:+80/",
    f"http://{'a' * 64}.example/",
    f"http://{'a.' * 127}example/",
    "http://good.example/" + "a" * 5_000,
]
