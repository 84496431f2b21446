"""Addresses of nodes: where MASTER_ADDR leads, and which of this node's interfaces leads there.

gloo, left alone, listens where the machine's own name leads, and on Debian that is 127.0.1.1: the
other nodes then connect to themselves. So ranks of several nodes take the interface on the way to
MASTER_ADDR, or the one that GLOO_SOCKET_IFNAME names.
"""

from __future__ import annotations

import ipaddress
import os
import socket

import psutil

from megappo.errors import UserError

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def resolve(address: str) -> str:
    """The IP address that a name stands for, seen from this node.

    Raises:
        UserError: it stands for none.
    """
    try:
        return str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:  # UnicodeError: a part of the name is too long
        raise UserError(
            f"MASTER_ADDR is {address!r}, which {socket.gethostname()} cannot resolve ({error}): "
            "give the address of node 0 as the other nodes reach it"
        ) from error


def is_loopback(ip: str) -> bool:
    """Whether an address leads back to the machine that uses it."""
    parsed = ipaddress.ip_address(ip.partition("%")[0])
    return parsed.is_loopback or parsed.is_unspecified


def own_addresses() -> dict[str, str]:
    """This machine's addresses that are not loopback, with their interfaces."""
    return {
        address.address: name
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6) and not is_loopback(address.address)
    }


def interface_towards(ip: str) -> tuple[str, str]:
    """This node's interface and address on the way to another (or to itself).

    Raises:
        UserError: no route, an interface without address, or one that only leads to itself.
    """
    mine = own_addresses()
    known = ", ".join(f"{address} ({name})" for address, name in mine.items()) or "no other"
    wanted = os.environ.get(GLOO_INTERFACE, "").split(",")[0]
    if wanted:
        found = [address for address, name in mine.items() if name == wanted]
        if not found:
            raise UserError(
                f"{GLOO_INTERFACE} is {wanted!r}, which has no address on {socket.gethostname()}, "
                f"where there are {known}: name one of these"
            )
        return wanted, found[0]
    source = _route_source(ip)
    if source not in mine:
        raise UserError(
            f"the way from {socket.gethostname()} to MASTER_ADDR ({ip}) starts at {source}, which "
            f"is no address that other nodes reach; there are {known}: set MASTER_ADDR to node "
            f"0's address in the network of the nodes, or {GLOO_INTERFACE} to the interface"
        )
    return mine[source], source


def choose_gloo_interface(address: str) -> tuple[str, str]:
    """Has gloo use the interface towards MASTER_ADDR; before any group is made.

    Returns the interface and its address. The variable is gloo's only setting that also reaches
    the groups that Megatron makes.

    Raises:
        UserError: see `interface_towards`.
    """
    name, own = interface_towards(resolve(address))
    os.environ[GLOO_INTERFACE] = name
    return name, own


def _route_source(ip: str) -> str:
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((ip, 9))  # sends nothing: the kernel only chooses the route
        except OSError as error:
            raise UserError(
                f"{socket.gethostname()} has no route to MASTER_ADDR ({ip}): {error}; is it an "
                "address in the network of the nodes?"
            ) from error
        return str(probe.getsockname()[0])
