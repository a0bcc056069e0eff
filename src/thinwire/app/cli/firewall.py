"""Rules for a machine's firewall: the ports of a run, for its replicas alone."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from pathlib import Path

from thinwire.errors import ConfigurationError
from thinwire.membership.channel import LIGHTHOUSE_PORT

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def rules(addresses: Sequence[str], master_port: int) -> str:
    """Rules for nftables (`nft -f FILE`) by which only `addresses` reach the ports of replicas on this machine.

    Raises `ConfigurationError`.
    """
    try:
        networks = [ipaddress.ip_network(address) for address in addresses]
    except ValueError as error:
        raise ConfigurationError(
            f"--firewall: {error}; IP addresses (or networks such as 10.0.0.0/24) of the machines of the run are needed."
        ) from None
    first, last = _chosen_by_the_system()
    ports = f"{{ {master_port}, {LIGHTHOUSE_PORT}-{LIGHTHOUSE_PORT + 1}, {first}-{last} }}"
    sets, accepts = [], []
    for version, kind, word in ((4, "ipv4_addr", "ip"), (6, "ipv6_addr", "ip6")):
        if own := [str(network) for network in networks if network.version == version]:
            name = f"replicas{version}"
            sets.append(f"    set {name} {{ type {kind}; flags interval; elements = {{ {', '.join(own)} }}; }}")
            accepts.append(f"        {word} saddr @{name} tcp dport {ports} accept")
    return "\n".join(
        [
            "# rank 0's store, the lighthouse, and the system's range of ephemeral ports, which gloo uses",
            "table inet thinwire {}",
            "delete table inet thinwire",
            "table inet thinwire {",
            *sets,
            "    chain input {",
            "        type filter hook input priority 0; policy accept;",
            '        iifname "lo" accept',
            "        ct state established,related accept",
            *accepts,
            f"        tcp dport {ports} drop",
            "    }",
            "}",
        ]
    )


def _chosen_by_the_system() -> tuple[int, int]:
    try:
        first, last = map(int, _RANGE.read_text().split())
    except (OSError, ValueError):  # not Linux
        return 32768, 60999
    return first, last
