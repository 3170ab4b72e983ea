"""Which requests go through the proxy that the environment names (`http_proxy`, `https_proxy`, `no_proxy`).

Commands that an operator types, and the exporter of traces, follow it by the usual rules, except to this machine: a
proxy cannot reach a loopback address of its client. Workers, routers and etcd talk to each other directly.
"""

import ipaddress
import urllib.request
from urllib.parse import urlsplit

__all__ = ["is_loopback", "proxy_of"]


def is_loopback(url: str) -> bool:
    """True if the URL is one of this machine's loopback addresses."""
    host = (urlsplit(url).hostname or "").removesuffix(".")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def proxy_of(url: str) -> str | None:
    """Returns the HOST:PORT of the proxy through which the URL is asked, without a password; None without a proxy."""
    parts = urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy is None or is_loopback(url) or urllib.request.proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    return (urlsplit(proxy).netloc or proxy).rpartition("@")[2]
